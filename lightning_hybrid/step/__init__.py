"""See the user's step: record it once as a graph, cut the graph into stages, replay one stage of it."""
