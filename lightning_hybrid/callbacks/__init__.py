"""Lightning callbacks: memory of activations, slow links, experts, AdaScale, monitors, pictures of steps and runs."""

from typing import TYPE_CHECKING

from lightning_hybrid.namespace import late_names

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.activations import (
        ActivationCheckpointing,
        ActivationCompression,
        ActivationOffload,
    )
    from lightning_hybrid.callbacks.adascale import AdaScale
    from lightning_hybrid.callbacks.expert_load import ExpertLoadMonitor
    from lightning_hybrid.callbacks.expert_upcycle import MoEUpcycle
    from lightning_hybrid.callbacks.monitors.goodput import GoodputMonitor
    from lightning_hybrid.callbacks.monitors.memory import MemoryMonitor
    from lightning_hybrid.callbacks.monitors.throughput import ThroughputMonitor
    from lightning_hybrid.callbacks.plot import RunPlot
    from lightning_hybrid.callbacks.slow_links import GradientCompression, LocalSGD
    from lightning_hybrid.callbacks.timeline import PipelineTimeline

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

_MODULES = {
    "ActivationCheckpointing": "callbacks.activations",
    "ActivationCompression": "callbacks.activations",
    "ActivationOffload": "callbacks.activations",
    "AdaScale": "callbacks.adascale",
    "ExpertLoadMonitor": "callbacks.expert_load",
    "GoodputMonitor": "callbacks.monitors.goodput",
    "GradientCompression": "callbacks.slow_links",
    "LocalSGD": "callbacks.slow_links",
    "MemoryMonitor": "callbacks.monitors.memory",
    "MoEUpcycle": "callbacks.expert_upcycle",
    "PipelineTimeline": "callbacks.timeline",
    "RunPlot": "callbacks.plot",
    "ThroughputMonitor": "callbacks.monitors.throughput",
}
__getattr__ = late_names(__name__, _MODULES)
