"""The constants of the time model, the same for all models, layouts and hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EfficiencyConstants:
    """What a step achieves of the figures of its hardware.

    Attributes:
        half_size: Size of one dimension of a matrix product at which it reaches half of the rate of a large one.
        half_inner: The same of the dimension that is summed over.
        misaligned: Rate of a product one of whose sizes is a multiple of 8 elements but not of 16, relative to one of
            multiples of 64.
        attention: Rate of products of fused attention, relative to those of linear layers.
        half_head: Width of a head at which fused attention reaches half of its rate.
        attention_backward: Floating-point operations of fused attention's backward over those of its forward.
        memory_share: Share of the memory's bandwidth that operations between products achieve.
        backward_moved: Bytes that memory-bound operations move in the backward over those of the forward.
        within_share: Share of the bandwidth of links within a node that collectives achieve beside kernels.
        between_share: The same of links between nodes, for reductions of large buckets.
        gather_share: The same for gathers and reductions of single layers (ZeRO-3) between very many nodes.
        gather_nodes: Number of nodes at which the rest of their bandwidth is halved.
    """

    half_size: float = 110
    half_inner: float = 20
    misaligned: float = 0.69
    attention: float = 0.61
    half_head: float = 9.2
    attention_backward: float = 3.5
    memory_share: float = 0.83
    backward_moved: float = 3.0
    within_share: float = 0.55
    between_share: float = 1.0
    gather_share: float = 0.096
    gather_nodes: float = 1.0


CONSTANTS = EfficiencyConstants()
