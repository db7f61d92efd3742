"""Lightning callbacks: memory of activations, slow links, experts, AdaScale, monitors, pictures of steps and runs."""

from typing import TYPE_CHECKING

from lightning_hybrid.namespaces.detect_lightning_namespace import public_names

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.activations import (
        ActivationCheckpointing,
        ActivationCompression,
        ActivationOffload,
    )
    from lightning_hybrid.callbacks.adascale import AdaScale
    from lightning_hybrid.callbacks.expert_load import ExpertLoadMonitor
    from lightning_hybrid.callbacks.moe_upcycle import MoEUpcycle
    from lightning_hybrid.callbacks.monitors.goodput_monitor import GoodputMonitor
    from lightning_hybrid.callbacks.monitors.memory_monitor import MemoryMonitor
    from lightning_hybrid.callbacks.monitors.throughput_monitor import ThroughputMonitor
    from lightning_hybrid.callbacks.pipeline_timeline import PipelineTimeline
    from lightning_hybrid.callbacks.run_plot import RunPlot
    from lightning_hybrid.callbacks.slow_link_callbacks import GradientCompression, LocalSGD

__all__ = [
    "ActivationCheckpointing",
    "ActivationCompression",
    "ActivationOffload",
    "AdaScale",
    "ExpertLoadMonitor",
    "GoodputMonitor",
    "GradientCompression",
    "LocalSGD",
    "MemoryMonitor",
    "MoEUpcycle",
    "PipelineTimeline",
    "RunPlot",
    "ThroughputMonitor",
]

__getattr__ = public_names(__name__, *__all__)
