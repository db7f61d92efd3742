"""Lightning callbacks: the timeline of a step, and AdaScale."""

from lightning_hybrid.callbacks.adascale import AdaScale
from lightning_hybrid.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["AdaScale", "PipelineTimeline"]
