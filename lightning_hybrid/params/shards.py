"""Local shards of parameters, which several axes of the mesh may shard one after the other.

Between steps a sharded parameter holds its local shard, in the user's own ``Parameter`` object, which is all that
optimizers, the reduction over replicas and gradient clipping see. Checkpoints, hooks that read parameters, averages of
weights and the end of a run get full tensors from here.

    full tensor -> sharded over tensor ranks -> sharded over the replicas of a shard group -> local shard
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import on_group_device
from lightning_hybrid.params import store
from lightning_hybrid.params.owners import ParameterOwners
from lightning_hybrid.params.pickles import copy_as_is, guard_copies
from lightning_hybrid.params.placement import Shard, join, padded, shard_tensor
from lightning_hybrid.step.standins.tensors import FULL_SHAPE, is_absent


@dataclass(frozen=True)
class AxisSharding:
    """The parameters that one axis of the mesh shards."""

    group: dist.ProcessGroup  # the ranks along the axis
    # of each sharded parameter, by FQN; they shard what the axes before this one leave of it
    placements: Mapping[str, Shard]
    axis: str = ""  # name of the axis on the mesh
    # coordinates of this rank, by the base axes that it consists of: two sharding axes may share some
    places: Mapping[str, int] = field(default_factory=dict)

    @property
    def named_coordinates(self) -> Mapping[str, int]:
        """Coordinates of this rank along it; keyed by the group's name if no axis has one."""
        return self.places or {self.axis or self.group.group_name: self.group.rank()}

    def shard(self, full: Tensor, placement: Shard) -> Tensor:
        """The local shard of a tensor: its own memory, of the shape that ``placement`` gives this rank."""
        return shard_tensor(full, placement, self.group.rank(), self.group.size())

    def unshard(self, local: Tensor, placement: Shard) -> Tensor:
        """All-gather local shards, of the shape that `shard` gives, into a dense tensor of full shape; collective."""
        local = local.detach().to_dense() if local.is_sparse else local.detach()
        message = on_group_device(padded(local, placement).contiguous(), self.group)
        received = [torch.empty_like(message) for _ in range(self.group.size())]
        dist.all_gather(received, message, group=self.group)
        return join(received, placement).to(local.device)

    def local_length(self, placement: Shard) -> int:
        """Size of the sharded dim on this rank."""
        return sum(length for _, length in placement.ranges(self.group.rank(), self.group.size()))


class LocalShards:
    """The local shards of one module's parameters on one rank.

    A tensor that has the full size along a sharded dim counts as full: a buffer, or a parameter while it is gathered.

    Attributes:
        shardings: The axes that shard parameters, from the full tensor to the local shard.
        owners: Of parameters that are stepped in full, and whose states are full on one rank.
    """

    def __init__(self, root: nn.Module, shardings: Sequence[AxisSharding]) -> None:
        self._root = root
        self.shardings = list(shardings)
        self.owners = ParameterOwners(self.shardings)
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}

    def __bool__(self) -> bool:
        """Whether an axis shards parameters at all."""
        return bool(self.shardings)

    @property
    def names(self) -> set[str]:
        """FQNs of the sharded parameters."""
        return {name for axis in self.shardings for name in axis.placements}

    @property
    def has_repeated_shards(self) -> bool:
        """Whether some ranks hold the same shard of a parameter."""
        return any(p.is_repeated(axis.group.size()) for axis in self.shardings for p in axis.placements.values())

    def over(self, axis: str) -> LocalShards:
        """Those along one axis of the mesh."""
        return LocalShards(self._root, [sharding for sharding in self.shardings if sharding.axis == axis])

    # -- sharding and gathering, by FQN --------------------------------------------------------------------------------

    def shard(self, name: str, full: Tensor) -> Tensor:
        """The local shard of a full parameter, or of a tensor of its shape; its own memory if it is sharded."""
        for axis in self.shardings:
            if name in axis.placements:
                full = axis.shard(full, axis.placements[name])
        return full

    def unshard(self, name: str, local: Tensor, *, over_tensor_ranks: bool = True) -> Tensor:
        """All-gather shards to the full shape, without ``over_tensor_ranks`` to a tensor rank's shard; collective."""
        for axis in reversed(self.shardings):
            placement = axis.placements.get(name)
            if placement is None or (axis.axis == "tp" and not over_tensor_ranks):
                continue
            # A tensor that an earlier axis has gathered already is longer than what this axis shards.
            length = local.shape[placement.dim]
            # The shard of an owner rank is as large as the full tensor, and only this gathers it.
            if length < placement.length or (placement.is_owned and length == placement.length):
                local = axis.unshard(local, placement)
        return local

    def full_shape(self, name: str, value: Tensor) -> torch.Size:
        """The full shape of a parameter, from ``value``, its local shard or the full tensor."""
        shape = list(value.shape)
        if not is_absent(value):
            for axis in reversed(self.shardings):
                if name in axis.placements:
                    shape[axis.placements[name].dim] = axis.placements[name].length
        return torch.Size(shape)

    def shard_of(self, name: str, value: Tensor, full: Tensor) -> Tensor:
        """A tensor of the shape of ``value``: the shard of ``full`` along the axes that shard ``value``."""
        for axis in self.shardings:
            placement = axis.placements.get(name)
            if placement is not None and full.shape[placement.dim] > value.shape[placement.dim]:
                full = axis.shard(full, placement)
        return full

    # -- optimizer states of a parameter's shape -----------------------------------------------------------------------

    def full_state_of(self, parameter: Tensor, value: Tensor) -> Tensor:
        """The full tensor of an optimizer state if it has the shape of its parameter's shard; collective.

        After a fit the parameter is full again, and the optimizer's state still is a shard.
        """
        return self.unshard(self.name_of(parameter), value) if self.is_shard_of_state(parameter, value) else value

    def is_shard_of_state(self, parameter: Tensor, value: Tensor) -> bool:
        """Whether an optimizer state has the shape of its parameter's shard."""
        return value.shape == self._shard_shape(self.name_of(parameter), parameter)

    def name_of(self, parameter: Tensor) -> str:
        """FQN of a parameter of any shape; empty for one of another module."""
        return self._names.get(id(parameter), "")

    def shard_of_state(self, parameter: Tensor, value: Any) -> Any:
        """The local shard of an optimizer state that has the parameter's full shape; other values as they are."""
        shape = parameter.__dict__.get(FULL_SHAPE)
        if shape is None or not isinstance(value, Tensor) or value.shape != shape or parameter in self.owners:
            return value
        return self.shard(self._names[id(parameter)], value)

    def _shard_shape(self, name: str, parameter: Tensor) -> torch.Size | None:
        shape = list(self.full_shape(name, parameter))
        is_sharded = False
        for axis in self.shardings:
            if name in axis.placements:
                shape[axis.placements[name].dim] = axis.local_length(axis.placements[name])
                is_sharded = True
        return torch.Size(shape) if is_sharded else None

    # -- all parameters ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def shard_parameters(self, root: nn.Module) -> None:
        """Replace each sharded parameter of the module, or of a copy of it, by its local shard."""
        names = self.names
        for name, parameter in root.named_parameters():
            if name in names and not is_absent(parameter):
                store.shard(parameter, self.shard(name, parameter.detach()).contiguous())
                guard_copies(parameter)

    @torch.no_grad()
    def unshard_parameters(self, root: nn.Module | None = None, device: torch.device | None = None) -> None:
        """Gather the full parameters of this rank's stages, on every rank; collective.

        ``root`` is a copy of the module that is sharded in the same way. Each full parameter is moved to ``device``
        once it is gathered, if there is one.
        """
        for name, parameter in store.sharded_in(root or self._root):
            full = self.unshard(name, parameter.detach())
            store.unshard(parameter, full if device is None else full.to(device))
            copy_as_is(parameter)

    @contextlib.contextmanager
    @torch.no_grad()
    def summon_full_parameters(self) -> Iterator[None]:
        """Inside, parameters are full on every rank; collective (FSDP: ``summon_full_params``)."""
        sharded = [(name, p, p.data, p.grad) for name, p in store.sharded_in(self._root)]
        for name, parameter, local, _ in sharded:
            store.swap_in(parameter, self.unshard(name, local), None)
        try:
            yield
        finally:
            for _, parameter, local, gradient in sharded:
                if gradient is None or gradient.shape == local.shape:
                    store.swap_out(parameter, local, gradient)
                else:  # until it is averaged it is full, and torch sets it beside full data alone
                    parameter.grad = gradient
                    store.swap_out(parameter, local)

    # -- counting each element once ------------------------------------------------------------------------------------

    def is_first_owner(self, parameter: Tensor, *, within_replica: bool = False) -> bool:
        """Whether this is the first rank that holds its shard of a parameter, of any shape.

        Ranks of other replicas do not count ``within_replica``.
        """
        name = self.name_of(parameter)
        coordinates: dict[str, int] = {}
        sharded_over: set[str] = set()
        for along in self.shardings:
            if not within_replica or along.axis in ("tp", "cp"):
                coordinates.update(along.named_coordinates)
            if name in along.placements:
                sharded_over.update(along.named_coordinates)
        return all(index == 0 or axis in sharded_over for axis, index in coordinates.items())

    def first_owned_slices(self, parameter: Tensor, local: Tensor) -> list[Tensor]:
        """The slices of a local tensor that no rank before this one holds.

        ``local`` is the local shard, its gradient, or another tensor of its shape.

        Returns:
            At most one tensor, of the shape of ``local`` but for the sharded dim.
        """
        if not self.is_first_owner(parameter):
            return []
        name = self.name_of(parameter)
        for number, axis in enumerate(self.shardings):
            placement = axis.placements.get(name)
            if placement is not None and placement.is_repeated(axis.group.size()):
                rank, size = axis.group.rank(), axis.group.size()
                # By local row of the sharded dim: whether this is the first rank that holds it.
                is_first = torch.cat([torch.full((p.local_length,), p.is_first(rank, size)) for p in placement.pieces])
                for other in self.shardings[number + 1 :]:
                    further = other.placements.get(name)
                    if further is not None and further.dim == placement.dim:
                        is_first = other.shard(is_first, replace(further, dim=0))
                return [local.index_select(placement.dim, is_first.nonzero().squeeze(1).to(local.device))]
        return [local]
