"""Lightning strategies, precision plugins and callbacks that parallelise an unmodified LightningModule.

Importing the package registers the strategies: ``Trainer(strategy="hybrid3d")``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_hybrid.registration import register

if TYPE_CHECKING:
    from lightning_hybrid.precision import HybridPrecision
    from lightning_hybrid.strategies import Hybrid3DStrategy

__version__ = "0.1.0.dev0"
__all__ = ["Hybrid3DStrategy", "HybridPrecision"]

_HOMES = {"Hybrid3DStrategy": "strategies", "HybridPrecision": "precision"}

register()


def __getattr__(name: str) -> Any:
    """Load public names when they are first asked for: they import torch and Lightning."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"lightning_hybrid.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lightning_hybrid' has no attribute {name!r}")
