"""The interface of techniques: what the strategy knows of each way of training.

A technique of your own goes into ``Hybrid3DStrategy(techniques=[...])``: most are a `LayerTechnique`.
"""

from lightning_hybrid.techniques.layers import LayerTechnique, computed_parameters
from lightning_hybrid.techniques.technique import Active, Technique

__all__ = ["Active", "LayerTechnique", "Technique", "computed_parameters"]
