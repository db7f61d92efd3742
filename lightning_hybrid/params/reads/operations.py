"""A function mode that gathers parameters of other ranks for each operation that reads them.

Where every rank runs the same code on the same values, each operation needs the full parameters that it reads, but no
result of other ranks. So the ranks that hold a parameter send it when it is read. Layers, caches, loops and what the
code writes into its arguments need no special handling: it all happens on every rank, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.collectives.tensors import as_sendable
from lightning_hybrid.errors import StepError
from lightning_hybrid.params.reads.effects import written_of
from lightning_hybrid.params.reads.shards import IDENTITY
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.step.objects.pytree import flatten_call, rebuild_call, tensors_inside
from lightning_hybrid.step.objects.tensor_storage_and_subclasses import storage_id
from lightning_hybrid.step.standins.absent_tensors import (
    SHAPE_METHODS,
    SHAPE_PROPERTIES,
    full_shape,
    full_shape_meta,
    is_absent,
)
from lightning_hybrid.step.tracing.intercept_step_operations import user_line

OWN_PROPERTIES = frozenset({"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "layout", "grad", "is_cuda"})


class GatheredParameters(TorchFunctionMode):
    """Gathers the parameters that an operation reads; the ranks of a replica must run the same operations."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        holders: Callable[[str], Sequence[int]],
        group: dist.ProcessGroup,
        parts: LocalShards | None,
        device: torch.device,
        *,
        agree_on: Callable[[str], None],
        room: int,
    ) -> None:
        """Begin a step.

        Args:
            parameters: Of the module, by FQN.
            holders: Returns the pipeline ranks that hold a parameter, or its shards over their tensor ranks.
            group: The ranks of this pipeline.
            parts: Local shards; None if no parameter is sharded.
            device: Where the group communicates.
            agree_on: Called with what is about to be sent; raises on ranks that read something else.
            room: Bytes of gathered tensors to keep until the end; the same on every rank.
        """
        super().__init__()
        self._parameters, self._holders, self._group, self._device = parameters, holders, group, device
        self._agree_on, self._room = agree_on, room
        self._tensor_axes = [] if parts is None else [axis for axis in parts.shardings if axis.axis == "tp"]
        sharded = {name for axis in self._tensor_axes for name in axis.placements}
        partial = [name for name in parameters if name in sharded or len(holders(name)) < group.size()]
        self._to_gather = {id(parameters[name]): name for name in partial}
        replica_axes = [] if parts is None else [axis for axis in parts.shardings if axis.axis not in ("tp", "cp")]
        self._sharded_over_replicas = {name for axis in replica_axes for name in axis.placements}
        self._full: dict[str, Tensor] = {}
        self._user_visible: dict[str, Tensor | None] = {}  # user code may write into these; a copy if replicas shard

    def __exit__(self, *exception: Any) -> None:
        """Free gathered tensors; what the step has written into them is written back."""
        super().__exit__(*exception)
        self.end(failed=bool(exception) and exception[0] is not None)

    def end(self, *, failed: bool) -> None:
        """Free gathered tensors, and unless the step has failed write back what it has written into them."""
        gathered, shared, self._full, self._user_visible = self._full, self._user_visible, {}, {}
        if failed:
            return
        with torch.no_grad():
            for name, before in shared.items():
                self._write_back(name, gathered[name], before)
            for name, full in gathered.items():
                parameter = self._parameters[name]
                if full.grad is not None and not is_absent(parameter) and full.shape == parameter.shape:
                    parameter.grad = full.grad if parameter.grad is None else parameter.grad + full.grad

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on full parameters."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__") and id(args[0]) in self._to_gather:
            member = func.__self__.__name__
            if name == "__get__" and member in SHAPE_PROPERTIES:
                return func(full_shape_meta(args[0]))
            if member == "grad" and (full := self._full.get(self._to_gather[id(args[0])])) is not None:
                return func(full, *args[1:])
            if member in OWN_PROPERTIES:
                return func(*args, **kwargs)
        elif name in SHAPE_METHODS and id(args[0]) in self._to_gather:
            return func(full_shape_meta(args[0]), *args[1:], **kwargs)
        elif name in IDENTITY:
            return func(*args, **kwargs)
        leaves, plain = flatten_call(args, kwargs)
        found = {id(leaf): self._to_gather[id(leaf)] for leaf in leaves if id(leaf) in self._to_gather}
        if not found:
            if any(is_absent(leaf) for leaf in leaves):
                raise StepError(
                    f"{user_line()}: {name} reads a tensor without content on this rank, such as one that a hook or"
                    " torch.func made of parameters of other ranks, in a step of evaluation that every rank runs"
                    " unsplit; keep a copy of the module, or a number, in the hook",
                    entry="eval-content",
                )
            return func(*args, **kwargs)
        full_tensors = {name: self._full_tensor(name) for name in found.values()}
        leaves = [full_tensors[found[id(leaf)]] if id(leaf) in found else leaf for leaf in leaves]
        args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        written = 0 if name == "__set__" else written_of(name, leaves, kwargs)
        if written is not None:
            self._share_with_user({name: full for name, full in full_tensors.items() if full is leaves[written]})
        out = func(*args, **kwargs)
        memories = {storage_id(leaf) for leaf in tensors_inside(out)}
        self._share_with_user({name: full for name, full in full_tensors.items() if storage_id(full) in memories})
        return out

    def _share_with_user(self, full_tensors: Mapping[str, Tensor]) -> None:
        """Keep full tensors, which user code references or writes into, until the end of the step."""
        for name, full in full_tensors.items():
            if name not in self._user_visible:
                self._full[name] = full
                self._user_visible[name] = full.detach().clone() if name in self._sharded_over_replicas else None

    def _write_back(self, name: str, full: Tensor, before: Tensor | None) -> None:
        parameter, full = self._parameters[name], full.detach()
        if before is not None and not torch.equal(before, full):
            raise StepError(
                f"the step writes into {name!r}, which is sharded over replicas, in a step of evaluation that every"
                " rank runs unsplit; write it in a hook such as on_validation_epoch_start, or set zero_stage=0",
                entry="eval-write",
            )
        if before is not None or is_absent(parameter):
            return
        for axis in self._tensor_axes:
            if name in axis.placements:
                full = axis.shard(full, axis.placements[name])
        if storage_id(full) != storage_id(parameter):
            parameter.detach().copy_(full)

    def _full_tensor(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        needs_grad = torch.is_grad_enabled() and parameter.requires_grad
        full = self._full.get(name)
        if full is None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._agree_on(f"reads {name!r}")
                full = self._gather(name, parameter)
            if full.nbytes <= self._room or needs_grad:  # gradients need one tensor for all its uses
                self._room -= full.nbytes
                self._full[name] = full
        if needs_grad and not full.requires_grad:
            full.requires_grad_()
        return full

    def _gather(self, name: str, parameter: Tensor) -> Tensor:
        """Gather the full tensor of a parameter; collective over the replica."""
        shape, holders = full_shape(parameter), self._holders(name)
        if is_absent(parameter):
            content = torch.empty(shape, dtype=parameter.dtype, device=self._device)
        else:
            content = parameter.detach()
            for axis in self._tensor_axes:
                placement = axis.placements.get(name)
                if placement is not None and content.shape[placement.dim] < placement.length:
                    content = axis.unshard(content, placement)
            if content.shape != shape:
                raise StepError(
                    f"{name!r} is sharded over replicas: this rank has shape {tuple(content.shape)} of {tuple(shape)},"
                    " in a step of evaluation that every rank runs unsplit; set zero_stage=0 and"
                    " expert_parallel_size=1",
                    entry="eval-shard",
                )
            content = content.to(self._device).contiguous()
        if len(holders) < self._group.size():
            dist.broadcast(as_sendable(content), group=self._group, group_src=holders[0])
        return content.to(parameter.device)
