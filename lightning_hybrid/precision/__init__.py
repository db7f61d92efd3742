"""Precision plugin, gradient scaler and gradient norm over a mesh: one loss scale and one norm for all ranks."""

from typing import TYPE_CHECKING

from lightning_hybrid.namespace import late_names
from lightning_hybrid.precision.float8 import Float8
from lightning_hybrid.precision.norm import MeshNorm
from lightning_hybrid.precision.scaler import MeshGradScaler

if TYPE_CHECKING:
    from lightning_hybrid.precision.hybrid import HybridPrecision

__all__ = ["Float8", "HybridPrecision", "MeshGradScaler", "MeshNorm"]

__getattr__ = late_names(__name__, {"HybridPrecision": "precision.hybrid"})
