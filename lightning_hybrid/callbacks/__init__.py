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

_MODULES = {
    "ActivationCheckpointing": "callbacks.activations",
    "ActivationCompression": "callbacks.activations",
    "ActivationOffload": "callbacks.activations",
    "AdaScale": "callbacks.adascale",
    "ExpertLoadMonitor": "callbacks.expert_load",
    "GoodputMonitor": "callbacks.monitors.goodput_monitor",
    "GradientCompression": "callbacks.slow_link_callbacks",
    "LocalSGD": "callbacks.slow_link_callbacks",
    "MemoryMonitor": "callbacks.monitors.memory_monitor",
    "MoEUpcycle": "callbacks.moe_upcycle",
    "PipelineTimeline": "callbacks.pipeline_timeline",
    "RunPlot": "callbacks.run_plot",
    "ThroughputMonitor": "callbacks.monitors.throughput_monitor",
}
__getattr__ = late_names(__name__, _MODULES)
