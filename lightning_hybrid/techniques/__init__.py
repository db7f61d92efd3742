"""The interface of techniques: what the strategy knows of each way of training."""
