"""Lightning strategies, precision plugins and callbacks that parallelise an unmodified LightningModule.

Importing the package registers the strategies, with `lightning.pytorch` or with `pytorch_lightning`, and imports
neither: ``Trainer(strategy="hybrid3d")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_hybrid.namespace import install, late_names
from lightning_hybrid.registration import PREPARE
from lightning_hybrid.version import __version__

if TYPE_CHECKING:
    from lightning_hybrid.precision.hybrid import HybridPrecision
    from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy

__all__ = ["Hybrid3DStrategy", "HybridPrecision", "__version__"]

# Public names are loaded when they are first asked for: they import torch and Lightning.
__getattr__ = late_names(__name__, {"Hybrid3DStrategy": "strategies.hybrid3d", "HybridPrecision": "precision.hybrid"})

install(PREPARE)
