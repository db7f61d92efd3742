"""Mixture of experts: routers, grouped experts, the MoE layer, and expert parallelism."""

from lightning_hybrid.experts.moe.grouped import GroupedExperts
from lightning_hybrid.experts.moe.layer import MoE
from lightning_hybrid.experts.moe.routers import ExpertChoiceRouter, Report, Routing, TopKRouter
from lightning_hybrid.experts.parallel.adapters import ExpertsAdapter, register_experts
from lightning_hybrid.step.tracing.asides import give_aside, taking_asides

__all__ = [
    "ExpertChoiceRouter",
    "ExpertsAdapter",
    "GroupedExperts",
    "MoE",
    "Report",
    "Routing",
    "TopKRouter",
    "give_aside",
    "register_experts",
    "taking_asides",
]
