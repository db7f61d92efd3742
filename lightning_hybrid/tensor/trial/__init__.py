"""Try a plan with threads as ranks, and compare it with the layer."""
