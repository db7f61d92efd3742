"""Carried state of a run: copies of weights, gradients and optimizer states."""
