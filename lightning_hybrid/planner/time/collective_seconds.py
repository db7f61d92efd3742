"""Seconds of collectives over a group of ranks, by algorithm, size and the place of the ranks in nodes."""

from __future__ import annotations

from typing import NamedTuple

from lightning_hybrid.planner.hardware.hardware import Hardware
from lightning_hybrid.planner.time.place_of_ranks import RankGroup


class Shares(NamedTuple):
    """Shares of the bandwidth of links that collectives achieve, within a node and between nodes."""

    within: float
    between: float


FULL = Shares(1.0, 1.0)


def all_reduce_seconds(size: float, group: RankGroup, hardware: Hardware, shares: Shares = FULL) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes: a ring moves ``2 (n - 1) / n`` of them."""
    return 2.0 * _ring_seconds(size, group, hardware, shares)


def gather_seconds(size: float, group: RankGroup, hardware: Hardware, shares: Shares = FULL) -> float:
    """Return the seconds of an all-gather to, or a reduce-scatter of, ``size`` bytes: a ring moves ``(n - 1) / n``."""
    return _ring_seconds(size, group, hardware, shares)


def all_to_all_seconds(size: float, group: RankGroup, hardware: Hardware, shares: Shares = FULL) -> float:
    """Return the seconds of an all-to-all in which each rank sends ``size`` bytes in total."""
    return _ring_seconds(size, group, hardware, shares)


def message_seconds(size: float, crosses_nodes: bool, senders: int, hardware: Hardware) -> float:
    """Return the seconds of one message, while ``senders`` ranks of the node send at once."""
    if not crosses_nodes:
        return hardware.latency_within + size / hardware.within_node.bandwidths[-1]
    return hardware.latency_between + size * senders / hardware.between_nodes.bandwidths[-1]


def links_used(group: RankGroup, hardware: Hardware) -> float:
    """Return the share of a device's links within its node that lead to other devices of its group."""
    members = group.size / group.nodes
    if not hardware.direct_links or members <= 1 or hardware.devices_per_node <= 1:
        return 1.0
    return min(1.0, (members - 1) / (hardware.devices_per_node - 1))


def _ring_seconds(size: float, group: RankGroup, hardware: Hardware, shares: Shares) -> float:
    """Half an all-reduce: each rank passes on ``(n - 1) / n`` of the bytes in ``n - 1`` steps."""
    if group.size <= 1 or size <= 0:
        return 0.0
    moved = size * (group.size - 1) / group.size
    within = moved / (hardware.within_node.bandwidth(size) * shares.within * links_used(group, hardware))
    if group.nodes == 1:
        return within + hardware.latency_within
    between = (
        moved
        * group.groups_per_node
        / (hardware.between_nodes.bandwidth(size * group.groups_per_node) * shares.between)
    )
    return max(within, between) + hardware.latency_between * group.nodes
