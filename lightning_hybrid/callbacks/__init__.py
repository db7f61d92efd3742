"""Lightning callbacks: activation checkpointing, the timeline of a step, and AdaScale."""

from typing import TYPE_CHECKING

from lightning_hybrid.namespaces import public_names

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.activation_checkpointing import ActivationCheckpointing
    from lightning_hybrid.callbacks.adascale import AdaScale
    from lightning_hybrid.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["ActivationCheckpointing", "AdaScale", "PipelineTimeline"]

__getattr__ = public_names(__name__, *__all__)
