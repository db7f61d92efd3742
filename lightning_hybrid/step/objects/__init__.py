"""Helpers for containers, tensors and modules that do not depend on absent tensors."""
