"""For each sharded parameter the rank that steps it in full, and keeps its full optimizer states.

A parameter that is sharded over tensor ranks and over replicas has one owner among these tensor ranks x replicas:

    gradient   shards -> gathered over replicas, on the owner's replica -> over tensor ranks, on the owner
    new value  full, on the owner -> sharded over tensor ranks -> sharded over replicas

Owners are balanced by elements: the largest parameter goes to the rank that owns least so far. Each rank computes the
same owners from shapes alone. Other axes (stages, replicas that hold copies) have an owner each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.objects import gather_on_first
from lightning_hybrid.params.placement import Shard


class ShardingAxis(Protocol):
    """An axis of the mesh that shards parameters."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks along it."""

    @property
    def placements(self) -> Mapping[str, Shard]:
        """Of each parameter that it shards, by FQN."""


def axes_of(name: str, shardings: Sequence[ShardingAxis]) -> tuple[int, ...]:
    """Numbers of the axes that shard a parameter, from the full tensor to the local shard."""
    return tuple(number for number, axis in enumerate(shardings) if name in axis.placements)


def assign_owners(numel: Mapping[str, int], shardings: Sequence[ShardingAxis]) -> dict[str, dict[int, int]]:
    """Assign each sharded parameter an owner among the ranks that shard it.

    ``numel`` has the elements of each full parameter, in one order on all ranks.

    Returns:
        By FQN, the owner's rank along each axis that shards the parameter, by the number of the axis.
    """
    ranks = list(itertools.product(*(range(axis.group.size()) for axis in shardings)))
    loads = dict.fromkeys(ranks, 0)
    owners: dict[str, dict[int, int]] = {}
    for name in sorted(numel, key=lambda name: -numel[name]):
        axes = axes_of(name, shardings)
        fixed = {number: shardings[number].placements[name].pieces[0].owner for number in axes}  # of one expert
        fits = [rank for rank in ranks if all(own in (None, rank[number]) for number, own in fixed.items())]
        best = min(fits, key=loads.__getitem__)
        owners[name] = {number: best[number] for number in axes}
        for rank in ranks:
            if all(rank[number] == best[number] for number in axes):
                loads[rank] += numel[name]
    return {name: owners[name] for name in numel}


class ParameterOwners:
    """The owners of the parameters that some optimizers step in full."""

    def __init__(self, shardings: Sequence[ShardingAxis]) -> None:
        self._shardings = shardings
        self._names: dict[int, str] = {}
        self._owners: dict[str, dict[int, int]] = {}

    def add(self, parameters: Mapping[str, Tensor], numel: Mapping[str, int]) -> None:
        """Assign owners to the parameters of one optimizer, of any shape."""
        self._names |= {id(p): name for name, p in parameters.items()}
        self._owners |= assign_owners(numel, self._shardings)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._names

    def of(self, name: str) -> Mapping[int, int]:
        """The owner's rank along each axis that shards a parameter, by the number of the axis."""
        return self._owners[name]

    def has_states_of(self, parameter: Tensor) -> bool:
        """Whether this rank keeps optimizer states of a parameter of any shape: yes, unless another rank owns it."""
        name = self._names.get(id(parameter))
        return name is None or all(self._is_at(number, rank) for number, rank in self._owners[name].items())

    def _is_at(self, number: int, rank: int) -> bool:
        return self._shardings[number].group.rank() == rank

    def gather_states(self, entries: Mapping[Any, Any], parameters: Sequence[Tensor]) -> dict[Any, Any]:
        """Gather the states that owners keep on the first rank of each axis, in host memory; collective.

        ``entries`` are by the parameter's number, or other keys; parameters and states have any shape.

        Returns:
            The entries; what an owner keeps is then on the first rank alone.
        """
        found = dict(entries)
        if not any(p in self for p in parameters):
            return found
        for number, axis in reversed(list(enumerate(self._shardings))):
            here = {key for key in found if isinstance(key, int) and number in self._axes_of(parameters[key])}
            sent = {key: found.pop(key) for key in here}
            found |= {key: entry for row in gather_on_first(sent, axis.group) for key, entry in row.items()}
        return found

    def _axes_of(self, parameter: Tensor) -> Iterable[int]:
        return self._owners.get(self._names.get(id(parameter), ""), ())
