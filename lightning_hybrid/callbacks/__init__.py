"""Lightning callbacks: activation checkpointing, sparse upcycling, expert load, pipeline timelines, and AdaScale."""

from typing import TYPE_CHECKING

from lightning_hybrid.namespaces.detect_lightning_namespace import public_names

if TYPE_CHECKING:
    from lightning_hybrid.callbacks.activation_checkpointing import ActivationCheckpointing
    from lightning_hybrid.callbacks.adascale import AdaScale
    from lightning_hybrid.callbacks.expert_load import ExpertLoadMonitor
    from lightning_hybrid.callbacks.moe_upcycle import MoEUpcycle
    from lightning_hybrid.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["ActivationCheckpointing", "AdaScale", "ExpertLoadMonitor", "MoEUpcycle", "PipelineTimeline"]

__getattr__ = public_names(__name__, *__all__)
