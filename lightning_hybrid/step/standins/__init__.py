"""Tensors and numbers that are not on this rank, and what kernels make of them."""
