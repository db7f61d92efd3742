"""Copies of a model on the data axes: their gradients are averaged here."""

from lightning_hybrid.replicate.gradient_reducer import GradientObserver, GradientReducer

__all__ = ["GradientObserver", "GradientReducer"]
