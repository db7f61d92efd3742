"""The constants of the time model, the same for all models, layouts and hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EfficiencyConstants:
    """What a step achieves of the figures of its hardware.

    Attributes:
        half_size: Size of one dimension of a matrix product at which it reaches half of the rate of a large one.
        half_inner: The same of the dimension that is summed over.
        misaligned: Rate of a product one of whose sizes is no multiple of 64 elements, relative to an aligned one.
        attention: Rate of products of fused attention, relative to those of linear layers.
        half_head: Width of a head at which fused attention reaches half of its rate.
        attention_backward: Floating-point operations of fused attention's backward over those of its forward.
        memory_share: Share of the memory's bandwidth that operations between products achieve.
        backward_moved: Bytes that memory-bound operations move in the backward over those of the forward.
        within_share: Share of the bandwidth of links within a node that collectives achieve beside kernels.
        between_share: The same of links between nodes, for reductions of large buckets.
        gather_share: The same for gathers and reductions of single layers (ZeRO-3) between very many nodes.
        gather_nodes: Number of nodes at which the rest of their bandwidth is halved.
        tensor_hidden: Share of the collectives of tensor ranks that products hide where they overlap.
    """

    half_size: float = 80.0
    half_inner: float = 20.0
    misaligned: float = 0.65
    attention: float = 0.57
    half_head: float = 8.0
    attention_backward: float = 3.5
    memory_share: float = 0.68
    backward_moved: float = 3.0
    within_share: float = 0.45
    between_share: float = 0.8
    gather_share: float = 0.09
    gather_nodes: float = 1.0
    tensor_hidden: float = 0.86


CONSTANTS = EfficiencyConstants()
