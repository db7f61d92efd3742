"""What a rank holds of the state of a run, and which of it that rank writes.

Which boxes of a parameter lie here, ``shard_boxes`` says. Of what several ranks hold, one rank of each replica may
write it, and the replicas share the work out among them by bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.checkpoint_folder import CheckpointError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.local_shards import HeldParts
from lightning_hybrid.parts.shard_boxes import Part, Shape, part_of
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.step.objects.pytree import flatten, map_leaves
from lightning_hybrid.step.standins.absent_tensors import WHOLE_SHAPE, is_absent, whole_shape

# Who has the same boxes as this rank, among whom one is to write: all replicas, or only the first replica, where others
# have something else. What is cut over replicas is there again along another axis of the mesh.
ANY, FIRST = "data", "first"
_COPIES = {"dp_shard": "dp_replicate", "ep": "ep_replicate", "ep_shard": "ep_outer"}


@dataclass(frozen=True, eq=False)
class Box:
    """One box of a whole tensor with its content.

    Attributes:
        offsets: In the whole.
        content: A view of what the rank holds.
    """

    offsets: Shape
    content: Tensor


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor of the run in the state that is to be saved, in place of a ``Tensor``.

    Attributes:
        shape: Of the whole.
        dtype: Of its elements.
        boxes: What this rank may have to write: what it holds first in its replica.
        written_by: ``ANY``, ``FIRST``, or an axis along which ranks hold the same.
    """

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    written_by: str = ANY

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not above: a hook takes it for a tensor.
        raise AttributeError(
            f"{name!r} is asked of what a rank holds of a tensor of shape {self.__dict__.get('shape')}, as a"
            " distributed checkpoint has it; on_save_checkpoint may leave out, rename and add entries, and change"
            " what is in them only with save_distributed_checkpoint=False"
        )


def whole(tensor: Tensor, *, counts: bool = True, written_by: str = FIRST) -> Held:
    """A tensor of which this rank has all.

    Args:
        tensor: Dense.
        counts: Whether this rank is the first one of its replica to have it.
        written_by: As in ``Held``.
    """
    _check_dense(tensor)
    boxes = (Box((0,) * tensor.dim(), tensor.detach()),) if counts else ()
    return Held(tuple(tensor.shape), tensor.dtype, boxes, written_by)


def deal(held: Iterable[Held], mesh: Mesh | None) -> list[tuple[Held, Box]]:
    """The boxes that this rank writes: what several have is dealt to them by bytes.

    Args:
        held: All that there is to save, in the same order on every rank.
        mesh: The ranks; None for one process.
    """
    places: dict[str, tuple[int, int]] = {}
    loads: dict[str, list[int]] = {}
    mine = []
    for each in held:
        for axis in {ANY, each.written_by} - places.keys() - {FIRST}:
            places[axis] = (1, 0) if mesh is None else _place(mesh, axis)
            loads[axis] = [0] * places[axis][0]
        for box in each.boxes:
            if each.written_by == FIRST:
                writes = places[ANY][1] == 0
            else:
                load, here = loads[each.written_by], places[each.written_by][1]
                writer = min(range(len(load)), key=load.__getitem__)
                load[writer] += box.content.nbytes
                writes = writer == here
            if writes:
                mine.append((each, box))
    return mine


def _place(mesh: Mesh, axis: str) -> tuple[int, int]:
    """How many ranks along an axis have the same, context ranks among them, and which of them this one is."""
    if axis.startswith("ep_"):  # context ranks that have other experts are not among them, and the others are
        return mesh.size(axis), mesh.rank_in(axis)
    return mesh.size(axis) * mesh.size("cp"), mesh.rank_in(axis) * mesh.size("cp") + mesh.rank_in("cp")


class Holdings:
    """The module and the optimizers of a run, as one rank holds them."""

    def __init__(self, root: nn.Module, mesh: Mesh, plan: StagePlan | None, parts: HeldParts | None) -> None:
        """Args: root: the user's module. mesh: of the run. plan, parts: what the ranks hold of it."""
        self._root = root
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._plan = plan if plan is not None and plan.is_cut else None
        self._cuts = [] if parts is None else list(parts.cuts)
        self._pp, self._tp = mesh.rank_in("pp"), mesh.rank_in("tp")
        self._tp_name = mesh.group("tp").group_name

    def part(self, name: str, shape: Sequence[int]) -> Part:
        """What this rank keeps of a parameter, or of what has its shape.

        Args:
            name: FQN of the parameter.
            shape: Of the whole.
        """
        return part_of(self._cuts, name, shape)

    def _is_cut_over(self, name: str, group_name: str) -> bool:
        return any(name in axis.placements and axis.group.group_name == group_name for axis in self._cuts)

    def whole_shape(self, parameter: Tensor) -> Shape:
        """The shape of a parameter in one process."""
        return whole_shape(parameter)

    def name_of(self, parameter: Tensor) -> str | None:
        """The FQN of a parameter of the module."""
        return self._names.get(id(parameter))

    def is_cut(self, parameter: Tensor) -> bool:
        """Whether this rank keeps a part of a parameter now."""
        return WHOLE_SHAPE in parameter.__dict__

    def module(self, copy: nn.Module | None = None) -> dict[str, Any]:
        """The state dict of the module with ``Held`` for tensors; all keys on every rank.

        Args:
            copy: Of the module, in parts as it is; the module itself if None.

        Raises:
            CheckpointError: A tensor is not dense.
        """
        root = self._root if copy is None else copy
        parameters = {id(parameter): name for name, parameter in root.named_parameters()}
        buffers = {id(buffer): name for name, buffer in root.named_buffers()}
        homes = {} if self._plan is None else self._plan.buffer_ranks(copy)
        tensors = dict([*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)])
        state: dict[str, Any] = {}
        known: dict[int, Held] = {}
        for key, value in nn.Module.state_dict(root).items():
            tensor = tensors.get(key)
            if tensor is None:  # made up by the module as it is saved
                state[key] = whole(value, counts=self._pp == self._tp == 0) if isinstance(value, Tensor) else value
                continue
            if id(tensor) not in known:
                name = parameters.get(id(tensor))
                if name is not None:
                    known[id(tensor)] = self._parameter(name, tensor)
                else:
                    known[id(tensor)] = self._buffer(buffers[id(tensor)], tensor, homes.get(id(tensor), 0))
            state[key] = known[id(tensor)]
        return state

    def _parameter(self, name: str, tensor: Tensor) -> Held:
        if is_absent(tensor):
            return Held(self.whole_shape(tensor), tensor.dtype, ())
        if not self.is_cut(tensor):
            return whole(tensor, counts=self._is_home(name) and self._tp == 0, written_by=ANY)
        return self._held(name, tensor, self.whole_shape(tensor))

    def _held(self, name: str, tensor: Tensor, shape: Shape) -> Held:
        """Of what a parameter, or something of its shape, is cut into; also while the whole is here."""
        _check_dense(tensor)
        counts = self._is_home(name) and (self._tp == 0 or self._is_cut_over(name, self._tp_name))
        spans = [span for span in self.part(name, shape).spans if counts and span.is_first]
        if tuple(tensor.shape) == shape:
            spans = [span.in_whole() for span in spans]
        boxes = tuple(Box(span.offsets, span.of(tensor.detach())) for span in spans)
        over_replicas = [axis.axis for axis in self._cuts if name in axis.placements and axis.axis in _COPIES]
        return Held(shape, tensor.dtype, boxes, _COPIES[over_replicas[-1]] if over_replicas else ANY)

    def _buffer(self, name: str, tensor: Tensor, home: int) -> Held:
        if is_absent(tensor):
            return Held(tuple(tensor.shape), tensor.dtype, ())
        axes = [replace(axis, placements=axis.buffers) for axis in self._cuts if name in axis.buffers]
        if not axes:
            return whole(tensor, counts=self._pp == home and self._tp == 0)
        _check_dense(tensor)
        # Whole at rest, and each rank has written its own part.
        spans = part_of(axes, name, tensor.shape).spans if self._pp == home else ()
        boxes = tuple(Box(s.offsets, s.in_whole().of(tensor.detach())) for s in spans if s.is_first)
        return Held(tuple(tensor.shape), tensor.dtype, boxes, FIRST)

    def _is_home(self, name: str) -> bool:
        """Whether this pipeline rank writes what several may hold."""
        return self._pp == (0 if self._plan is None else self._plan.ranks_of(name)[0])

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer by FQN, with ``Held`` for all tensors but bare numbers.

        Args:
            optimizer: Of the run.

        Returns:
            ``state`` of the parameters of this rank, ``param_groups`` as torch has them, and the ``names`` of their
            parameters by number.
        """
        state = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = [self.name_of(parameter) or f"#{number}" for number, parameter in enumerate(parameters)]
        entries: dict[Any, Any] = {}
        for key, entry in state["state"].items():
            if any(is_absent(leaf) for leaf in flatten(entry)[0]):  # followed, for a parameter of another rank
                continue
            if isinstance(key, int):
                name, parameter = names[key], parameters[key]
                entries[name] = map_leaves(partial(self._leaf, name, parameter), entry)
            else:
                entries[key] = map_leaves(partial(self._leaf, "", None), entry)
        return {"state": entries, "param_groups": state["param_groups"], "names": names}

    def _leaf(self, name: str, parameter: Tensor | None, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 0:
            return leaf.detach().cpu().clone()
        if parameter is None or name.startswith("#"):
            return whole(leaf, counts=self._pp == self._tp == 0)
        shape = self.whole_shape(parameter)
        if tuple(leaf.shape) == self.part(name, shape).shape:
            return self._held(name, leaf, shape)
        return whole(leaf, counts=self._is_home(name) and self._tp == 0, written_by=ANY)


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}{', quantized' if tensor.is_quantized else ''},"
            " and a distributed checkpoint holds dense ones; set save_distributed_checkpoint=False"
        )
