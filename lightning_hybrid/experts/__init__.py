"""Mixture of experts: routers, grouped experts, the MoE layer, and expert parallelism."""

from lightning_hybrid.experts.moe.grouped_mlp import GroupedExperts
from lightning_hybrid.experts.moe.moe_layer import MoE
from lightning_hybrid.experts.moe.routers import ExpertChoiceRouter, Report, Routing, TopKRouter
from lightning_hybrid.experts.parallel.adapter_registry import register_experts
from lightning_hybrid.experts.parallel.batched_expert_adapters import ExpertsAdapter
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
