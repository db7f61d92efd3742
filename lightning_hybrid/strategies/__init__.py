"""Lightning strategies: hooks of Lightning, translated to calls of the packages below."""

from typing import TYPE_CHECKING

from lightning_hybrid.namespace import late_names

if TYPE_CHECKING:
    from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy

__all__ = ["Hybrid3DStrategy"]

__getattr__ = late_names(__name__, {"Hybrid3DStrategy": "strategies.hybrid3d"})
