"""Containers, tensors and modules, without knowing what is absent."""
