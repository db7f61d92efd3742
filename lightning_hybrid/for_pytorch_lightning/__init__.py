"""The public classes for `pytorch_lightning`, whichever namespace the importing file uses.

The modules below are those of `lightning_hybrid`, loaded again by `namespaces/load_twins_for_pytorch_lightning.py`.
"""

from typing import Any

from lightning_hybrid.namespaces.detect_lightning_namespace import public_names
from lightning_hybrid.namespaces.lightning_namespaces import PUBLIC
from lightning_hybrid.namespaces.load_twins_for_pytorch_lightning import find_twins

# Type checkers see only files; what they say of `lightning_hybrid.for_lightning` holds here too.
ActivationCheckpointing: Any
ActivationCompression: Any
ActivationOffload: Any
AdaScale: Any
ExpertLoadMonitor: Any
GradientCompression: Any
Hybrid3DStrategy: Any
HybridPrecision: Any
LocalSGD: Any
MoEUpcycle: Any
PipelineTimeline: Any
RunPlot: Any

__all__ = [
    "ActivationCheckpointing",
    "ActivationCompression",
    "ActivationOffload",
    "AdaScale",
    "ExpertLoadMonitor",
    "GradientCompression",
    "Hybrid3DStrategy",
    "HybridPrecision",
    "LocalSGD",
    "MoEUpcycle",
    "PipelineTimeline",
    "RunPlot",
]

find_twins()
__getattr__ = public_names(__name__, *PUBLIC)
