"""What a rank holds of the parameters of a model whose units are sharded, and how it runs them.

At rest a parameter that is cut holds this rank's part, in the user's own ``Parameter`` object: optimizers, the
reduction over replicas and clipping see nothing else. Buffers stay whole, and a sharded unit works on a view of its
part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.step.absent import WHOLE_SHAPE, is_absent
from lightning_hybrid.step.randomness import replaced_forwards
from lightning_hybrid.tensor.apply import ShardedUnit
from lightning_hybrid.tensor.draws import AroundDraw
from lightning_hybrid.tensor.outside import OutsideReads
from lightning_hybrid.tensor.placement import Placement, Replicated, Shard, cut, join, padded
from lightning_hybrid.tensor.plan import UnitPlan
from lightning_hybrid.tensor.ranks import GroupRanks
from lightning_hybrid.tensor.traced import Entered, traced_forwards
from lightning_hybrid.tensor.units import compiled_modules


class ModelShards:
    """The sharded units of one model on one rank.

    Attributes:
        plans: By FQN of the unit.
        placements: Of each parameter and buffer that is cut, by its FQN in the root.
    """

    def __init__(self, root: nn.Module, plans: Mapping[str, UnitPlan], group: dist.ProcessGroup) -> None:
        """Args: root: the user's module, whole. plans: by FQN of the unit. group: the tensor ranks."""
        self.plans = dict(plans)
        self._root = root
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._runners: dict[str, ShardedUnit] = {}
        self._compiled: dict[ShardedUnit, Any] = {}  # what takes the place of a unit's own forward
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        names = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers())}
        self.placements: dict[str, Shard] = {}
        for fqn, plan in plans.items():
            tensors = _tensors_of(root.get_submodule(fqn))
            for name, placement in plan.placements.items():
                if isinstance(placement, Shard) and name in tensors:
                    self.placements[names[id(tensors[name])]] = placement

    @property
    def rank(self) -> int:
        """This tensor rank."""
        return self._rank

    @torch.no_grad()
    def cut(self, around_draw: AroundDraw | None = None) -> None:
        """Keep this rank's part of each parameter, and be ready to run.

        Args:
            around_draw: As for ``sharded``.
        """
        self.cut_parameters(self._root)
        ranks = GroupRanks(self._group)  # one, so that units know that they are dealt to the same
        hands_on = not compiled_modules(self._root)  # a compiler does not know what stands for a whole
        for fqn, plan in self.plans.items():
            unit = self._root.get_submodule(fqn)
            is_sharded = plan.num_sharded or plan.positions is not None
            if is_sharded and not any(is_absent(parameter) for parameter in unit.parameters()):
                buffers = _Buffers(unit, plan, self._group)
                self._runners[fqn] = ShardedUnit(unit, plan, ranks, tensors=buffers, around_draw=around_draw)
                self._runners[fqn].hands_on = hands_on

    @torch.no_grad()
    def cut_parameters(self, root: nn.Module) -> None:
        """Keep this rank's part of each parameter of the module, or of a copy of it."""
        for name, parameter in root.named_parameters():
            if name in self.placements and not is_absent(parameter):
                self._cut(parameter, self.placements[name])

    def _cut(self, parameter: Tensor, placement: Shard) -> None:
        shape = parameter.shape
        parameter.data = self.part(parameter.detach(), placement).contiguous()
        parameter.__dict__[WHOLE_SHAPE] = shape

    def compile(self, fqn: str, run: Callable[..., Any]) -> None:
        """Let a unit that this rank holds run compiled, where `why_not_traced` finds no reason against it.

        Args:
            fqn: Of the unit.
            run: ``run(unit, entered, args, kwargs)``, compiled: the unit's own forward.
        """
        runner = self._runners.get(fqn)
        if runner is None:
            return
        unit, entered = self._root.get_submodule(fqn), Entered()
        forwards = traced_forwards(dict(unit.named_modules()), self.plans[fqn], self._group, entered)
        self._compiled[runner] = lambda *args, **kwargs: run(unit, entered, args, kwargs), forwards

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Units of which `compile` was told run compiled inside."""
        for runner, compiled in self._compiled.items():
            runner.compiled = compiled
        try:
            yield
        finally:
            for runner in self._compiled:
                runner.compiled = None

    @property
    def has_repeated(self) -> bool:
        """Whether some tensor ranks hold the same part of a parameter."""
        return any(placement.is_repeated(self._size) for placement in self.placements.values())

    def part(self, whole: Tensor, placement: Placement) -> Tensor:
        """What this rank holds of a whole tensor."""
        return cut(whole, placement, self._rank, self._size)

    def outside_reads(self) -> AbstractContextManager[Any]:
        """Entered around the user's step, if code outside of units uses what is cut by its vocabulary."""
        parameters = dict(self._root.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        found = {}
        for fqn, plan in self.plans.items():
            unit = self._root.get_submodule(fqn)
            for inner in plan.outside:
                parameter = unit.get_parameter(inner)
                if WHOLE_SHAPE in parameter.__dict__:
                    found[id(parameter)] = self.placements[names[id(parameter)]]
        return OutsideReads(found, GroupRanks(self._group)) if found else contextlib.nullcontext()

    def running(self) -> AbstractContextManager[None]:
        """The units run sharded inside."""
        units = {fqn: self._root.get_submodule(fqn) for fqn in self._runners}
        return replaced_forwards(units, lambda fqn, _: self._runners[fqn].run_sharded)

    def joined(self, local: Tensor, placement: Placement) -> Tensor:
        """The whole tensor of what each tensor rank holds; collective."""
        if isinstance(placement, Replicated):
            return local
        return join(GroupRanks(self._group).all_gather(padded(local.detach(), placement)), placement)

    def joined_buffer(self, whole: Tensor, placement: Shard) -> Tensor:
        """A buffer of which each rank has written its own part; collective."""
        return self.joined(self.part(whole, placement).contiguous(), placement)

    @torch.no_grad()
    def make_whole(self, root: nn.Module | None = None) -> None:
        """Give every tensor rank the whole of what its stages hold; collective.

        Args:
            root: A copy of the module that is cut alike; the module itself if None.
        """
        for name, parameter in (root or self._root).named_parameters():
            if name in self.placements and WHOLE_SHAPE in parameter.__dict__ and not is_absent(parameter):
                parameter.data = self.joined(parameter.detach(), self.placements[name])
                parameter.grad = None
                del parameter.__dict__[WHOLE_SHAPE]
        for name, buffer in (root or self._root).named_buffers():
            if name in self.placements and not is_absent(buffer):
                buffer.copy_(self.joined_buffer(buffer, self.placements[name]))
        if root is None:
            self._runners, self._compiled = {}, {}

    @contextlib.contextmanager
    @torch.no_grad()
    def whole_inside(self) -> Iterator[None]:
        """Parameters are whole inside, on every tensor rank; collective."""
        cut_parameters = [
            (name, parameter, parameter.data, parameter.grad)
            for name, parameter in self._root.named_parameters()
            if WHOLE_SHAPE in parameter.__dict__ and not is_absent(parameter)
        ]
        for name, parameter, local, _ in cut_parameters:
            parameter.grad = None
            parameter.data = self.joined(local, self.placements[name])
        try:
            yield
        finally:
            for _, parameter, local, gradient in cut_parameters:
                parameter.data = local
                parameter.grad = gradient

    # -- states, by name of a parameter or buffer, or like a parameter -------------------------------------------------

    def whole_of(self, name: str, value: Tensor) -> Tensor:
        """The whole of a parameter or buffer of this rank; collective."""
        placement = self.placements.get(name)
        if placement is None:
            return value
        if value.shape[placement.dim] == placement.length:  # a buffer, whole at rest
            return self.joined_buffer(value.detach(), placement)
        return self.joined(value, placement)

    def whole_shape(self, name: str, value: Tensor) -> torch.Size:
        """The shape of the whole of a parameter."""
        placement = self.placements.get(name)
        if placement is None or is_absent(value):
            return value.shape
        shape = list(value.shape)
        shape[placement.dim] = placement.length
        return torch.Size(shape)

    def part_of(self, name: str, value: Tensor, whole: Tensor) -> Tensor:
        """What this rank keeps of a whole; all of it where it keeps the whole."""
        return whole if value.shape == whole.shape else self.part(whole, self.placements[name])

    def whole_like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """The whole of what an optimizer keeps for a parameter, if it is cut as that is; collective.

        After a fit the parameter is whole again, and what the optimizer keeps still is a part.
        """
        placement = self.placements.get(self._names.get(id(parameter), ""))
        if placement is None:
            return value
        part = list(parameter.shape)
        part[placement.dim] = sum(length for _, length in placement.ranges(self._rank, self._size))
        return self.joined(value, placement) if list(value.shape) == part else value

    def part_like(self, parameter: Tensor, value: Any) -> Any:
        """What this rank keeps of a whole that has the shape of the whole parameter."""
        placement = self._placement_of(parameter)
        if placement is None or not isinstance(value, Tensor) or value.shape != parameter.__dict__[WHOLE_SHAPE]:
            return value
        return self.part(value, placement)

    def _placement_of(self, parameter: Tensor) -> Shard | None:
        if WHOLE_SHAPE not in parameter.__dict__:
            return None
        return self.placements[self._names[id(parameter)]]

    # -- counting ------------------------------------------------------------------------------------------------------

    def holds_first(self, parameter: Tensor) -> bool:
        """Whether no tensor rank before this one holds the same of a parameter."""
        return self._rank == 0 or self._names.get(id(parameter)) in self.placements

    def first_held(self, parameter: Tensor, local: Tensor) -> list[Tensor]:
        """The parts of a local tensor that no tensor rank before this one holds.

        Args:
            parameter: Of the module.
            local: It, its gradient, or another tensor of its shape.
        """
        placement = self.placements.get(self._names.get(id(parameter), ""))
        if placement is None:
            return [local] if self._rank == 0 else []
        if not placement.is_repeated(self._size):
            return [local]
        parts, start = [], 0
        for piece in placement.pieces:
            part = piece.part_of(self._rank, self._size)
            if self._rank == 0 or piece.part_of(self._rank - 1, self._size) != part:
                parts.append(local.narrow(placement.dim, start, piece.local_length))
            start += piece.local_length
        return parts


class _Buffers:
    """The local parts of a unit's buffers, as views of the whole ones."""

    def __init__(self, unit: nn.Module, plan: UnitPlan, group: dist.ProcessGroup) -> None:
        self._unit = unit
        self._cuts: list[tuple[str, int, int, int]] = []
        for name, _ in unit.named_buffers():
            placement = plan.placements.get(name)
            if isinstance(placement, Shard):
                ((start, length),) = placement.ranges(group.rank(), group.size())
                self._cuts.append((name, placement.dim, start, length))

    def __call__(self) -> dict[str, Tensor]:
        return {name: self._unit.get_buffer(name).narrow(dim, start, length) for name, dim, start, length in self._cuts}


def _tensors_of(unit: nn.Module) -> dict[str, Any]:
    return {**dict(unit.named_parameters(remove_duplicate=False)), **dict(unit.named_buffers(remove_duplicate=False))}
