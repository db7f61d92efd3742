"""Data-parallel replicas: gradient averages, buffer broadcasts, synchronized BatchNorm."""

from lightning_hybrid.replicate.gradient_reducer import GradientObserver, GradientReducer

__all__ = ["GradientObserver", "GradientReducer"]
