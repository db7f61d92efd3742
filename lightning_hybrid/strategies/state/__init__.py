"""Copies of weights, gradients and optimizer states."""
