"""Lightning strategies: hooks of Lightning, translated to calls of the packages below."""

from typing import TYPE_CHECKING

from lightning_hybrid.namespaces.detect_lightning_namespace import public_names

if TYPE_CHECKING:
    from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy

__all__ = ["Hybrid3DStrategy"]

__getattr__ = public_names(__name__, *__all__)
