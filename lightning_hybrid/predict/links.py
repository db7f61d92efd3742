"""Where the ranks of a mesh axis lie in the nodes of a cluster, and seconds of their collectives and messages.

Ranks fill the nodes in ascending order. The groups of an axis are those ranks that differ in its coordinate alone:
``size`` ranks, each ``stride`` from the next one.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.predict.hardware import Hardware


@dataclass(frozen=True)
class RankGroup:
    """The groups of one mesh axis, and their place in the cluster."""

    size: int  # ranks of each group
    nodes: int  # nodes that the most widely spread group has members in
    # groups with members in one node and in others, which share that node's links to others: their number in the node
    # that has most of them, and 1 at least
    groups_per_node: int


def group_of_axis(size: int, stride: int, devices_per_node: int, ranks: int | None = None) -> RankGroup:
    """Return the groups of an axis.

    Args:
        size: Ranks of the axis.
        stride: Product of the sizes of the axes inside it, by which consecutive members differ.
        devices_per_node: Devices of a node.
        ranks: Number of ranks of the cluster; if None, any multiple of ``size * stride``.
    """
    block, node = size * stride, devices_per_node
    if size == 1:
        return RankGroup(1, 1, 1)
    if ranks is not None and ranks <= node:
        return RankGroup(size, 1, 1)
    if node % block == 0:
        return RankGroup(size, 1, 1)
    if stride >= node:
        return RankGroup(size, size, node)
    if node % stride == 0 and block % node == 0:
        return RankGroup(size, block // node, stride)
    return _enumerated(size, stride, node, ranks)


def group_of_two_axes(inner: RankGroup, outer: RankGroup, devices_per_node: int) -> RankGroup:
    """Return the groups over two axes that are not adjacent in the mesh."""
    if min(inner.size, outer.size) == 1:
        return max(inner, outer, key=lambda group: group.size)
    size, nodes = inner.size * outer.size, inner.nodes * outer.nodes
    return RankGroup(size, nodes, 1 if nodes == 1 else max(1, devices_per_node * nodes // size))


@functools.lru_cache(maxsize=4096)
def _enumerated(size: int, stride: int, node: int, ranks: int | None) -> RankGroup:
    """Go through the ranks until their places in nodes repeat."""
    block = size * stride
    period = math.lcm(block, node) if ranks is None else min(ranks, math.lcm(block, node))
    nodes_of_group: dict[tuple[int, int], set[int]] = {}
    for rank in range(period):
        nodes_of_group.setdefault((rank // block, rank % stride), set()).add(rank // node)
    crossing = [nodes for nodes in nodes_of_group.values() if len(nodes) > 1]
    groups = dict.fromkeys(itertools.chain(*crossing), 0)
    for number in itertools.chain(*crossing):
        groups[number] += 1
    return RankGroup(size, max(map(len, crossing), default=1), max(groups.values(), default=1))


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
    """Return the seconds of an all-to-all in which each rank sends ``size`` bytes in total, as much to each rank."""
    if group.size <= 1 or size <= 0:
        return 0.0
    members = group.size / group.nodes
    inside = size * (members - 1) / group.size
    seconds = inside / (hardware.within_node.bandwidth(size) * shares.within * links_used(group, hardware))
    if group.nodes == 1:
        return seconds + hardware.latency_within
    outside = size * (1 - 1 / group.nodes) * members * group.groups_per_node
    between = outside / (hardware.between_nodes.bandwidth(outside) * shares.between)
    return max(seconds, between) + hardware.latency_between


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
