"""Means, sums and metrics of the full batch, computed from those of its microbatches."""
