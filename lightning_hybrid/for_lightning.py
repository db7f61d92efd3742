"""The public classes for `lightning.pytorch`, whichever namespace the importing file uses."""

from typing import TYPE_CHECKING

from lightning_hybrid.namespaces.detect_lightning_namespace import public_names
from lightning_hybrid.namespaces.lightning_namespaces import PUBLIC

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.activations import (
        ActivationCheckpointing,
        ActivationCompression,
        ActivationOffload,
    )
    from lightning_hybrid.callbacks.adascale import AdaScale
    from lightning_hybrid.callbacks.expert_load import ExpertLoadMonitor
    from lightning_hybrid.callbacks.moe_upcycle import MoEUpcycle
    from lightning_hybrid.callbacks.pipeline_timeline import PipelineTimeline
    from lightning_hybrid.callbacks.run_plot import RunPlot
    from lightning_hybrid.callbacks.slow_link_callbacks import GradientCompression, LocalSGD
    from lightning_hybrid.precision.hybrid import HybridPrecision
    from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy

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

__getattr__ = public_names(__name__, *PUBLIC)
