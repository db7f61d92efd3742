"""The planner: predicts memory and step time of every layout of a model on a cluster, and ranks the layouts."""
