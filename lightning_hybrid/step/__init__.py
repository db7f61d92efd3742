"""The user's step: recorded once as a graph; one stage of the graph is replayed."""
