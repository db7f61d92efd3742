"""Collectives of tensor and context ranks inside of layers, with their gradients."""
