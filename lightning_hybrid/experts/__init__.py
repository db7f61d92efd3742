"""Mixture of experts: routers, experts with stacked weights, and the layer made of them."""

from lightning_hybrid.experts.grouped import GroupedExperts
from lightning_hybrid.experts.layer import MoE
from lightning_hybrid.experts.routing import ExpertChoiceRouter, Report, Routing, TopKRouter

__all__ = ["ExpertChoiceRouter", "GroupedExperts", "MoE", "Report", "Routing", "TopKRouter"]
