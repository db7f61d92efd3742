"""What a rank holds of the tensors of a run, and which of it that rank writes.

The one place that knows how parameters are cut over ranks: saving, and loading into another layout, ask here for the
boxes of a whole tensor that lie on this rank.

    whole   q0 q1 q2 q3 | k0 k1        cut in two pieces over two tensor ranks
    rank 0  q0 q1 | k0                 two spans: q0 q1 at 0 of the whole and 0 of the part, k0 at 4 and 2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.folder import CheckpointError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.plan import StagePlan
from lightning_hybrid.step.absent import WHOLE_SHAPE, is_absent
from lightning_hybrid.step.tree import flatten, map_leaves
from lightning_hybrid.tensor.shards import ModelShards

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """A box of a whole tensor that is also a box of a rank's part of it.

    Attributes:
        offsets: In the whole.
        local: Offsets in the part.
        sizes: Of both.
        counts: Whether no rank of the same replica before this one holds it too.
    """

    offsets: Shape
    local: Shape
    sizes: Shape
    counts: bool

    def of(self, part: Tensor) -> Tensor:
        """A view of it in the part."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            if size != part.shape[dim]:
                part = part.narrow(dim, start, size)
        return part


@dataclass(frozen=True)
class Part:
    """What a rank keeps of a tensor.

    Attributes:
        shape: Of the part.
        spans: Of the whole that it consists of.
        is_repeated: Whether all replicas keep the same.
    """

    shape: Shape
    spans: tuple[Span, ...]
    is_repeated: bool = True


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
        written_by: "any" replica, since all hold the same; the "first" one; or "each", since each holds something else.
    """

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    written_by: str = "any"


def whole(tensor: Tensor, *, counts: bool = True, written_by: str = "first") -> Held:
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
    """The boxes that this rank writes: what all replicas hold is dealt to them by bytes.

    Args:
        held: All that there is to save, in the same order on every rank.
        mesh: The ranks; None for one process.
    """
    copies, here = (1, 0) if mesh is None else _copies(mesh)
    loads = [0] * copies
    mine = []
    for each in held:
        for box in each.boxes:
            writer = here if each.written_by == "each" else 0
            if each.written_by == "any":
                writer = min(range(copies), key=loads.__getitem__)
                loads[writer] += box.content.nbytes
            if writer == here:
                mine.append((each, box))
    return mine


def _copies(mesh: Mesh) -> tuple[int, int]:
    """How many ranks hold the same as this one, and which of them it is: replicas, and ranks that share positions."""
    return mesh.size("data") * mesh.size("cp"), mesh.rank_in("data") * mesh.size("cp") + mesh.rank_in("cp")


class Holdings:
    """The module and the optimizers of a run, as one rank holds them."""

    def __init__(self, root: nn.Module, mesh: Mesh, plan: StagePlan | None, shards: ModelShards | None) -> None:
        """Args: root: the user's module. mesh: of the run. plan, shards: what the ranks hold of it."""
        self._root = root
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._plan = plan if plan is not None and plan.first is not None else None
        self._shards = shards
        self._pp, self._tp, self._tp_size = mesh.rank_in("pp"), mesh.rank_in("tp"), mesh.size("tp")

    def part(self, name: str, shape: Sequence[int]) -> Part:
        """What this rank keeps of a parameter, or of what has its shape.

        Args:
            name: FQN of the parameter.
            shape: Of the whole.
        """
        sizes, zeros = list(shape), [0] * len(shape)
        placement = self._shards.placements.get(name) if self._shards is not None else None
        if placement is None:
            return Part(tuple(sizes), (Span(tuple(zeros), tuple(zeros), tuple(sizes), self._tp == 0),))
        spans, dim, end = [], placement.dim, 0
        ranges = placement.ranges(self._tp, self._tp_size)
        for piece, (start, length) in zip(placement.pieces, ranges, strict=True):
            number = piece.part_of(self._tp, self._tp_size)
            first = self._tp == 0 or piece.part_of(self._tp - 1, self._tp_size) != number
            place, local, box = list(zeros), list(zeros), list(sizes)
            place[dim], local[dim], box[dim] = start, end, length
            spans.append(Span(tuple(place), tuple(local), tuple(box), first))
            end += length
        sizes[dim] = end
        return Part(tuple(sizes), tuple(spans))

    def whole_shape(self, parameter: Tensor) -> Shape:
        """The shape of a parameter in one process."""
        return tuple(parameter.__dict__.get(WHOLE_SHAPE, parameter.shape))

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
            return whole(tensor, counts=self._is_home(name) and self._tp == 0, written_by="any")
        return self._held(name, tensor, self.part(name, self.whole_shape(tensor)), self.whole_shape(tensor))

    def _held(self, name: str, tensor: Tensor, part: Part, shape: Shape) -> Held:
        _check_dense(tensor)
        spans = [span for span in part.spans if span.counts] if self._is_home(name) else []
        boxes = tuple(Box(span.offsets, span.of(tensor.detach())) for span in spans)
        return Held(shape, tensor.dtype, boxes, "any" if part.is_repeated else "each")

    def _buffer(self, name: str, tensor: Tensor, home: int) -> Held:
        if is_absent(tensor):
            return Held(tuple(tensor.shape), tensor.dtype, ())
        if self._shards is None or name not in self._shards.placements:
            return whole(tensor, counts=self._pp == home and self._tp == 0)
        _check_dense(tensor)
        # Whole at rest, and each rank has written its own part.
        spans = [s for s in self.part(name, tensor.shape).spans if s.counts] if self._pp == home else []
        boxes = tuple(Box(s.offsets, Span(s.offsets, s.offsets, s.sizes, True).of(tensor.detach())) for s in spans)
        return Held(tuple(tensor.shape), tensor.dtype, boxes, "first")

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
        part = self.part(name, shape)
        if tuple(leaf.shape) == part.shape:
            return self._held(name, leaf, part, shape)
        return whole(leaf, counts=self._is_home(name) and self._tp == 0, written_by="any")


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}{', quantized' if tensor.is_quantized else ''},"
            " and a distributed checkpoint holds dense ones; set save_distributed_checkpoint=False"
        )
