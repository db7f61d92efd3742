"""What users name: Lightning strategies that translate hooks to the floors below."""

from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy

__all__ = ["Hybrid3DStrategy"]
