"""Tensors that layers save for the backward: offloaded to host memory or files, and compressed."""
