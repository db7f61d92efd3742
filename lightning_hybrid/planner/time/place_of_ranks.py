"""Where the ranks of a mesh axis lie in the nodes of a cluster: `RankGroup`.

Ranks fill the nodes in ascending order. The groups of an axis are those ranks that differ in its coordinate alone:
``size`` ranks, each ``stride`` from the next one.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RankGroup:
    """The groups of one mesh axis, and their place in the cluster.

    Attributes:
        size: Ranks of each group.
        nodes: Nodes that the most widely spread group has members in.
        groups_per_node: Groups with members in one node and in others, which share that node's links to others; those
            of the node that has most of them, and 1 at least.
    """

    size: int
    nodes: int
    groups_per_node: int


def group_of_axis(size: int, stride: int, devices_per_node: int, ranks: int | None = None) -> RankGroup:
    """Return the groups of an axis.

    Args:
        size: Ranks of the axis.
        stride: Product of the sizes of the axes inside it, by which consecutive members differ.
        devices_per_node: Devices of a node.
        ranks: Ranks of the cluster; those of ``size * stride`` ranks and its repetitions, if None.
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
