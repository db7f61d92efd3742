"""Number formats of a run, and what a mesh adds to them: one loss scale and one gradient norm for all ranks."""

from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.precision.norm import MeshNorm
from lightning_hybrid.precision.scaler import MeshGradScaler

__all__ = ["HybridPrecision", "MeshGradScaler", "MeshNorm"]
