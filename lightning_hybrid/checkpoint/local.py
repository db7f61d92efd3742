"""The state of a run on one rank: its shards, the ranks that write them, and full tensors gathered from them.

If several ranks have a box of a tensor, one rank of each replica may write it, and the replicas balance the writes by
bytes. In full state dicts, names are those of the user's module, and optimizer states have torch's numbers, so the file
that Lightning writes is an ordinary ``.ckpt``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.full import holding, own_state, saved_tensors, state_with
from lightning_hybrid.collectives.objects import gather_on_first
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.boxes import Shape, ShardBoxes, shard_of
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.pipeline.stages.plan import StagePlan, buffer_ranks
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.objects.tensors import on_host, subclasses_as_dicts
from lightning_hybrid.step.standins.tensors import FULL_SHAPE, full_shape, is_absent

# Of the ranks with the same boxes as this one, one writes: a rank of any replica, or of the first, where others have
# other values. Copies of what is sharded over replicas are along another axis of the mesh.
ANY, FIRST = "data", "first"
_COPY_AXIS = {"dp_shard": "dp_replicate", "ep": "ep_replicate", "ep_shard": "ep_outer"}


@dataclass(frozen=True, eq=False)
class Box:
    """One box of a full tensor: its offsets there, and its content, a view of the rank's local tensor."""

    offsets: Shape
    content: Tensor


@dataclass(frozen=True, eq=False)
class OwnedShards:
    """The shards of one tensor that this rank owns, in place of a ``Tensor`` in the state that is saved.

    Attributes:
        shape, dtype: Of the full tensor.
        boxes: The boxes that this rank may have to write: those that it is the first in its replica to have.
        written_by: ``ANY``, ``FIRST``, or an axis along which ranks have equal boxes.
        mesh: Of that axis, if it is another one than the module has now.
    """

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    written_by: str = ANY
    mesh: Mesh | None = None

    def __getattr__(self, name: str) -> Any:
        # Another attribute than those above: a hook treats it as a tensor.
        raise AttributeError(
            f"{name!r} is requested from a rank's shard of a tensor of shape {self.__dict__.get('shape')}, as a"
            " distributed checkpoint has it; on_save_checkpoint may leave out, rename and add entries, and change"
            " tensors only with save_distributed_checkpoint=False"
        )


def unsharded(tensor: Tensor, *, counts: bool = True, written_by: str = FIRST) -> OwnedShards:
    """Describe a dense tensor of any shape that this rank has in full.

    ``counts`` tells whether this rank is the first one of its replica to have it; ``written_by`` is as in
    ``OwnedShards``.
    """
    _check_dense(tensor)
    boxes = (Box((0,) * tensor.dim(), tensor.detach()),) if counts else ()
    return OwnedShards(tuple(tensor.shape), tensor.dtype, boxes, written_by)


def assign_boxes(tensors: Iterable[OwnedShards], mesh: Mesh | None) -> list[tuple[OwnedShards, Box]]:
    """Select the boxes that this rank writes; boxes that several ranks have are balanced over them by bytes.

    ``tensors`` are all to save, in one order on all ranks; ``mesh`` is None for one process.
    """
    positions: dict[tuple[int, str], tuple[int, int]] = {}
    assigned_bytes: dict[tuple[int, str], list[int]] = {}
    assigned = []
    for each in tensors:
        ranks = each.mesh or mesh
        any_, axis = (id(ranks), ANY), (id(ranks), each.written_by)
        for key in {any_, axis} - positions.keys() - {(id(ranks), FIRST)}:
            positions[key] = (1, 0) if ranks is None else _rank_among_copies(ranks, key[1])
            assigned_bytes[key] = [0] * positions[key][0]
        for box in each.boxes:
            if each.written_by == FIRST:
                writes = positions[any_][1] == 0
            else:
                load, here = assigned_bytes[axis], positions[axis][1]
                writer = min(range(len(load)), key=load.__getitem__)
                load[writer] += box.content.nbytes
                writes = writer == here
            if writes:
                assigned.append((each, box))
    return assigned


def _rank_among_copies(mesh: Mesh, axis: str) -> tuple[int, int]:
    """The number of ranks along an axis that have equal boxes, context ranks included, and this rank's index."""
    if not axis.startswith("ep_"):
        return mesh.size(axis) * mesh.size("cp"), mesh.rank_in(axis) * mesh.size("cp") + mesh.rank_in("cp")
    # Context ranks that have other experts are not among them, and the others are. Stages and tensor ranks that hold
    # shards of all else instead have the same experts.
    size, index = mesh.size(axis), mesh.rank_in(axis)
    for shared in (each for each in mesh.sharded_axes if each != "cp"):
        count = mesh.layout.by_axis[shared]
        size, index = size * count, index * count + getattr(mesh.coordinates, shared)
    return size, index


class LocalState:
    """The local state of one rank: its shards of the module and of the optimizers."""

    def __init__(self, root: nn.Module, mesh: Mesh, plan: StagePlan | None, shards: LocalShards) -> None:
        self._root = root
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._plan = plan if plan is not None and plan.is_partitioned else None
        self._pipeline = None if plan is None or plan.num_ranks == 1 else plan.group
        self._shards, self._axis_cuts, self._owners = shards, shards.shardings, shards.owners
        self._mesh = mesh
        self._pp, self._tp = mesh.rank_in("pp"), mesh.rank_in("tp")
        self._tp_name = mesh.group("tp").group_name

    def names_of(self, optimizer: Optimizer) -> list[str]:
        """The FQNs of an optimizer's parameters by number; ``#number`` where the module does not have one."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [self._names.get(id(parameter)) or f"#{number}" for number, parameter in enumerate(parameters)]

    def has_states_of(self, parameter: Tensor) -> bool:
        """Whether this rank keeps optimizer states of a parameter of any shape."""
        return not is_absent(parameter) and self._owners.has_states_of(parameter)

    def shard_of_state(self, name: str, parameter: Tensor, shape: Sequence[int]) -> ShardBoxes | None:
        """This rank's shard of a state of full ``shape`` of a parameter; None where it has all of it."""
        is_sharded = FULL_SHAPE in parameter.__dict__ and parameter not in self._owners
        return self._shard(name, shape) if is_sharded and tuple(shape) == full_shape(parameter) else None

    def _shard(self, name: str, shape: Sequence[int]) -> ShardBoxes:
        return shard_of(self._axis_cuts, name, shape)

    def module(self, copy: nn.Module | None = None) -> dict[str, Any]:
        """The state dict of the module, or of a copy that is sharded like it; all keys on every rank.

        It has ``OwnedShards`` in place of tensors. Methods and hooks of the module leave out, rename and add entries.
        """
        root = self._root if copy is None else copy
        returned = state_with(root, self._tensors(root), is_copy=root is not self._root)
        counts = self._pp == self._tp == 0
        return {
            key: unsharded(value, counts=counts) if isinstance(value, Tensor) else value
            for key, value in returned.items()
        }

    def tensors(self) -> dict[str, OwnedShards]:
        """This rank's shards of the module's parameters and persistent buffers, by torch's key."""
        return self._tensors(self._root)

    def _tensors(self, root: nn.Module) -> dict[str, OwnedShards]:
        shards = {
            id(tensor): self._buffer(tensor, owner) if is_buffer else self._parameter(name, tensor)
            for name, tensor, owner, is_buffer in self._saved(root)
        }
        return {key: shards[id(tensor)] for key, tensor in saved_tensors(root).items()}

    def _saved(self, root: nn.Module) -> Iterator[tuple[str, Tensor, int, bool]]:
        """Yield the FQN of each saved tensor, the tensor, the pipeline rank that writes it, and if it is a buffer."""
        parameters = {id(parameter): name for name, parameter in root.named_parameters()}
        buffers = {id(buffer): name for name, buffer in root.named_buffers()}
        owners = {} if self._plan is None else buffer_ranks(self._plan, None if root is self._root else root)
        for tensor in {id(tensor): tensor for tensor in saved_tensors(root).values()}.values():
            if (name := parameters.get(id(tensor))) is not None:
                yield name, tensor, self._owner_stage(name), False
            else:
                yield buffers[id(tensor)], tensor, owners.get(id(tensor), 0), True

    def full_module(self, copy: nn.Module | None = None, *, keep: bool = True) -> dict[str, Any]:
        """Gather the state dict of the module, or of a copy, on pipeline rank 0; collective over one copy's ranks.

        ``keep`` tells that this pipeline needs the state: others with shards of the same model only send them.
        """
        root = self._root if copy is None else copy
        local: dict[str, Tensor] = {}
        for name, tensor, owner, _ in self._saved(root):
            if owner == self._pp:
                value = self._shards.unshard(name, tensor.detach())
                if keep:
                    local[name] = value.detach().cpu()
        full = self._gathered(local) if keep else {}
        if not keep or self._pp:
            return {}
        with holding(root, {id(tensor): full[name] for name, tensor, *_ in self._saved(root) if name in full}):
            return own_state(root, is_copy=root is not self._root)

    def full_optimizer(self, optimizer: Optimizer, *, keep: bool = True) -> dict[str, Any]:
        """Gather the state dict of an optimizer on pipeline rank 0, like `full_module`."""
        state = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        local: dict[Any, Any] = {}
        for key, entry in self._owners.gather_states(state["state"], parameters).items():
            if isinstance(key, int):
                # Optimizers that read full parameters have states of parameters of other stages too.
                if is_absent(parameters[key]):
                    continue
                if parameters[key] not in self._owners:
                    entry = map_leaves(partial(self._full_leaf, parameters[key]), entry)
            if keep:
                # In host memory at once: a device that holds shards has no room for full states of all parameters.
                local[key] = map_leaves(on_host, entry)
        full = self._gathered(local) if keep else {}
        if not keep or self._pp:
            return {}
        # Entries of parameters have numbers; optimizers may keep others under names.
        order = sorted(full, key=lambda key: (not isinstance(key, int), key))
        return {**state, "state": {key: full[key] for key in order}}

    def _full_leaf(self, parameter: Tensor, leaf: Any) -> Any:
        return self._shards.full_state_of(parameter, leaf.detach()) if isinstance(leaf, Tensor) else leaf

    def _gathered(self, local: dict[Any, Any]) -> dict[Any, Any]:
        """Gather the dicts of a pipeline's ranks in one on its first, empty elsewhere."""
        if self._pipeline is None:
            return local
        return {key: value for row in gather_on_first(local, self._pipeline) for key, value in row.items()}

    def shard_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Select this rank's parameters from a full state of an optimizer, and shard their entries."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=False))
        entries = {}
        for number, entry in state["state"].items():
            parameter = by_number.get(number)
            # One rank has the states of parameters that are stepped in full.
            if parameter is None:
                entries[number] = entry
            elif self.has_states_of(parameter):
                entries[number] = map_leaves(partial(self._shards.shard_of_state, parameter), entry)
        return {**state, "state": entries}

    def _parameter(self, name: str, tensor: Tensor) -> OwnedShards:
        if is_absent(tensor):
            return OwnedShards(full_shape(tensor), tensor.dtype, ())
        if FULL_SHAPE not in tensor.__dict__:
            return unsharded(tensor, counts=self._is_owner_stage(name) and self._tp == 0, written_by=ANY)
        return self._sharded(name, tensor, full_shape(tensor))

    def _sharded(self, name: str, tensor: Tensor, shape: Shape) -> OwnedShards:
        """Describe the shard of a parameter, or of a tensor of its shape; also while the full tensor is here."""
        _check_dense(tensor)
        counts, written_by = self._writers(name)
        spans = [span for span in self._shard(name, shape).spans if counts and span.is_first]
        if tuple(tensor.shape) == shape:
            spans = [span.in_full_tensor() for span in spans]
        boxes = tuple(Box(span.offsets, span.of(tensor.detach())) for span in spans)
        return OwnedShards(shape, tensor.dtype, boxes, written_by)

    def _writers(self, name: str) -> tuple[bool, str]:
        """Whether this rank writes what it has of a sharded parameter, and along which axis ranks have the same."""
        axes = [axis for axis in self._axis_cuts if name in axis.placements]
        over_tensor_ranks = any(axis.group.group_name == self._tp_name for axis in axes)
        over_replicas = [axis.axis for axis in axes if axis.axis in _COPY_AXIS]
        counts = self._is_owner_stage(name) and (self._tp == 0 or over_tensor_ranks)
        return counts, _COPY_AXIS[over_replicas[-1]] if over_replicas else ANY

    def _buffer(self, tensor: Tensor, owner_stage: int) -> OwnedShards:
        if is_absent(tensor):
            return OwnedShards(tuple(tensor.shape), tensor.dtype, ())
        return unsharded(tensor, counts=self._pp == owner_stage and self._tp == 0)

    def _is_owner_stage(self, name: str) -> bool:
        """Whether this pipeline rank writes a parameter that several stages may have."""
        return self._pp == self._owner_stage(name)

    def _owner_stage(self, name: str) -> int:
        return 0 if self._plan is None else self._plan.ranks_of(name)[0]

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The ``state`` of this rank's parameters of an optimizer by FQN, with ``OwnedShards`` for all but scalars.

        ``param_groups`` are as torch has them; ``names`` are those of their parameters by number.
        """
        state = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = self.names_of(optimizer)
        entries: dict[Any, Any] = {}
        for key, entry in state["state"].items():
            if isinstance(key, int) and is_absent(parameters[key]):
                continue
            name, parameter = (names[key], parameters[key]) if isinstance(key, int) else ("", None)
            entries[name or key] = map_leaves(partial(self._leaf, name, parameter), subclasses_as_dicts(entry))
        return {"state": entries, "param_groups": state["param_groups"], "names": names}

    def _leaf(self, name: str, parameter: Tensor | None, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 0:
            return leaf.detach().cpu().clone()
        return replace(self._shards_of_state(name, parameter, leaf), mesh=self._mesh)

    def _shards_of_state(self, name: str, parameter: Tensor | None, leaf: Tensor) -> OwnedShards:
        if parameter is None or name.startswith("#"):
            return unsharded(leaf, counts=self._pp == self._tp == 0)
        if parameter in self._owners:
            counts, written_by = self._writers(name)
            return unsharded(leaf, counts=counts, written_by=written_by)
        shape = full_shape(parameter)
        if tuple(leaf.shape) == self._shard(name, shape).shape:
            return self._sharded(name, leaf, shape)
        return unsharded(leaf, counts=self._is_owner_stage(name) and self._tp == 0, written_by=ANY)


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}{', quantized' if tensor.is_quantized else ''},"
            " and a distributed checkpoint stores dense ones; set save_distributed_checkpoint=False",
            entry="save-dense",
        )
