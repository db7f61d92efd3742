"""Local shards of parameters, which several axes of the mesh may cut one after the other.

At rest a parameter that is cut holds this rank's part, in the user's own ``Parameter`` object: optimizers, the
reduction over replicas and clipping see nothing else. Whoever asks for wholes asks here: checkpoints, hooks that read
parameters, averages of weights, the end of a run.

    whole -> cut over the tensor ranks -> cut over the ranks of a shard -> what this rank holds
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.mesh import where_sent
from lightning_hybrid.parts.placement import Shard, cut, join, padded
from lightning_hybrid.step.module_state.parameter_pickling import copy_as_it_is, copy_in_full
from lightning_hybrid.step.standins.absent_tensors import WHOLE_SHAPE, is_absent


@dataclass(frozen=True)
class AxisCut:
    """What is cut over one axis of the mesh.

    Attributes:
        group: The ranks along the axis.
        placements: Of each parameter that is cut, by FQN; of what the cuts before this one leave of it.
        buffers: Those of which each rank writes its own part, though it holds the whole.
        axis: Its name on the mesh.
        places: Where this rank is along it, by the axes that it consists of: axes of two cuts may have some in common.
    """

    group: dist.ProcessGroup
    placements: Mapping[str, Shard]
    buffers: Mapping[str, Shard] = field(default_factory=dict)
    axis: str = ""
    places: Mapping[str, int] = field(default_factory=dict)

    @property
    def own_places(self) -> Mapping[str, int]:
        """Where this rank is along it, by axes that have names in any case."""
        return self.places or {self.axis or self.group.group_name: self.group.rank()}

    def part(self, whole: Tensor, placement: Shard) -> Tensor:
        """What this rank holds of a tensor."""
        return cut(whole, placement, self.group.rank(), self.group.size())

    def joined(self, local: Tensor, placement: Shard) -> Tensor:
        """The tensor of which each rank holds a part, as a dense one; collective."""
        local = local.detach().to_dense() if local.is_sparse else local.detach()
        message = where_sent(padded(local, placement).contiguous(), self.group)
        received = [torch.empty_like(message) for _ in range(self.group.size())]
        dist.all_gather(received, message, group=self.group)
        return join(received, placement).to(local.device)

    def local_length(self, placement: Shard) -> int:
        """The size on this rank of the dim that is cut."""
        return sum(length for _, length in placement.ranges(self.group.rank(), self.group.size()))


class HeldParts:
    """The parts of one module's parameters on one rank.

    A tensor that is as large as the whole along a cut is not cut there: a buffer, or a parameter while its parts are
    gathered.
    """

    def __init__(self, root: nn.Module, cuts: Sequence[AxisCut]) -> None:
        """Args: root: the user's module, whole. cuts: from the whole to what a rank holds."""
        self._root = root
        self._cuts = list(cuts)
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}

    @property
    def cuts(self) -> Sequence[AxisCut]:
        """From the whole to what a rank holds."""
        return self._cuts

    @property
    def names(self) -> set[str]:
        """FQNs of the parameters that are cut."""
        return {name for axis in self._cuts for name in axis.placements}

    @property
    def has_repeated(self) -> bool:
        """Whether some ranks hold the same part of a parameter."""
        return any(p.is_repeated(axis.group.size()) for axis in self._cuts for p in axis.placements.values())

    # -- cutting and joining, by FQN -----------------------------------------------------------------------------------

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of a whole parameter, or of a tensor of its shape; of its own memory if it is cut."""
        for axis in self._cuts:
            if name in axis.placements:
                whole = axis.part(whole, axis.placements[name])
        return whole

    def joined(self, name: str, local: Tensor, *, over_tensor_ranks: bool = True) -> Tensor:
        """The whole of what each rank holds of a parameter, or what a tensor rank has of it; collective."""
        for axis in reversed(self._cuts):
            placement = axis.placements.get(name)
            if placement is None or (axis.axis == "tp" and not over_tensor_ranks):
                continue
            # A tensor of which an earlier cut is undone already is longer than what this one cuts.
            length = local.shape[placement.dim]
            # The part of an owner is as large as the whole; and no rank gathers these otherwise than here.
            if length < placement.length or (placement.is_owned and length == placement.length):
                local = axis.joined(local, placement)
        return local

    def whole_of(self, name: str, value: Tensor) -> Tensor:
        """The whole of a parameter or buffer of this rank; collective."""
        for axis in self._cuts:
            if name in axis.buffers:
                placement = axis.buffers[name]
                return axis.joined(axis.part(value.detach(), placement).contiguous(), placement)
        return self.joined(name, value)

    def whole_shape(self, name: str, value: Tensor) -> torch.Size:
        """The shape of the whole of a parameter."""
        shape = list(value.shape)
        if not is_absent(value):
            for axis in reversed(self._cuts):
                if name in axis.placements:
                    shape[axis.placements[name].dim] = axis.placements[name].length
        return torch.Size(shape)

    def part_of(self, name: str, value: Tensor, whole: Tensor) -> Tensor:
        """What this rank keeps of a whole; all of it where it keeps the whole."""
        return whole if value.shape == whole.shape else self.part(name, whole)

    # -- what optimizers keep, like a parameter ------------------------------------------------------------------------

    def whole_like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """The whole of what an optimizer keeps for a parameter, if it is cut as that is; collective.

        After a fit the parameter is whole again, and what the optimizer keeps still is a part.
        """
        name = self._names.get(id(parameter), "")
        return self.joined(name, value) if value.shape == self._part_shape(name, parameter) else value

    def part_like(self, parameter: Tensor, value: Any) -> Any:
        """What this rank keeps of a whole that has the shape of the whole parameter."""
        shape = parameter.__dict__.get(WHOLE_SHAPE)
        if shape is None or not isinstance(value, Tensor) or value.shape != shape:
            return value
        return self.part(self._names[id(parameter)], value)

    def _part_shape(self, name: str, parameter: Tensor) -> torch.Size | None:
        shape = list(self.whole_shape(name, parameter))
        is_cut = False
        for axis in self._cuts:
            if name in axis.placements:
                shape[axis.placements[name].dim] = axis.local_length(axis.placements[name])
                is_cut = True
        return torch.Size(shape) if is_cut else None

    # -- all parameters ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def cut_parameters(self, root: nn.Module) -> None:
        """Keep this rank's part of each parameter of the module, or of a copy of it."""
        names = self.names
        for name, parameter in root.named_parameters():
            if name in names and not is_absent(parameter):
                shape = parameter.shape
                parameter.data = self.part(name, parameter.detach()).contiguous()
                copy_in_full(parameter, shape)

    @torch.no_grad()
    def make_whole(self, root: nn.Module | None = None) -> None:
        """Give every rank the whole of what its stages hold; collective.

        Args:
            root: A copy of the module that is cut alike; the module itself if None.
        """
        for name, parameter in (root or self._root).named_parameters():
            if WHOLE_SHAPE in parameter.__dict__ and not is_absent(parameter):
                parameter.data = self.joined(name, parameter.detach())
                parameter.grad = None
                copy_as_it_is(parameter)
        buffers = {name for axis in self._cuts for name in axis.buffers}
        for name, buffer in (root or self._root).named_buffers():
            if name in buffers and not is_absent(buffer):
                buffer.copy_(self.whole_of(name, buffer))

    @contextlib.contextmanager
    @torch.no_grad()
    def whole_inside(self) -> Iterator[None]:
        """Parameters are whole inside, on every rank; collective."""
        cut_parameters = [
            (name, parameter, parameter.data, parameter.grad)
            for name, parameter in self._root.named_parameters()
            if WHOLE_SHAPE in parameter.__dict__ and not is_absent(parameter)
        ]
        for name, parameter, local, _ in cut_parameters:
            parameter.grad = None
            parameter.data = self.joined(name, local)
        try:
            yield
        finally:
            for _, parameter, local, gradient in cut_parameters:
                parameter.data = local
                parameter.grad = gradient

    # -- counting ------------------------------------------------------------------------------------------------------

    def holds_first(self, parameter: Tensor, *, beside_replicas: bool = False) -> bool:
        """Whether no rank before this one holds the same of a parameter.

        Args:
            parameter: Of the module.
            beside_replicas: Whether each replica is looked at alone.
        """
        name = self._names.get(id(parameter), "")
        places: dict[str, int] = {}
        for along in self._cuts:
            if not beside_replicas or along.axis in ("tp", "cp"):
                places.update(along.own_places)
        cut_over = {place for along in self._cuts if name in along.placements for place in along.own_places}
        return all(place == 0 or axis in cut_over for axis, place in places.items())

    def first_held(self, parameter: Tensor, local: Tensor) -> list[Tensor]:
        """The parts of a local tensor that no rank before this one holds.

        Args:
            parameter: Of the module.
            local: It, its gradient, or another tensor of its shape.
        """
        if not self.holds_first(parameter):
            return []
        name = self._names.get(id(parameter), "")
        for number, axis in enumerate(self._cuts):
            placement = axis.placements.get(name)
            if placement is not None and placement.is_repeated(axis.group.size()):
                is_first = _first_places(axis, placement)
                for other in self._cuts[number + 1 :]:
                    further = other.placements.get(name)
                    if further is not None and further.dim == placement.dim:
                        is_first = other.part(is_first, replace(further, dim=0))
                return [local.index_select(placement.dim, is_first.nonzero().squeeze(1).to(local.device))]
        return [local]


def _first_places(axis: AxisCut, placement: Shard) -> Tensor:
    """Which places along a cut dim hold what no rank before this one holds."""
    rank, size = axis.group.rank(), axis.group.size()
    return torch.cat([torch.full((piece.local_length,), piece.is_first(rank, size)) for piece in placement.pieces])
