"""A function mode that gathers parameters of other ranks for each operation that reads them.

Where every rank runs the same code on the same values, each operation needs the whole of the parameters that it reads,
and no other rank's arithmetic. So the ranks that hold a parameter send it when it is read. Layers, caches, loops and
what the code writes into its arguments need no further thought: it all happens on every rank, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.full_params.op_effects import written_of
from lightning_hybrid.full_params.sharded_parameter_mode import IDENTITY
from lightning_hybrid.mesh import as_sent
from lightning_hybrid.parts.local_shards import HeldParts
from lightning_hybrid.step.objects.pytree import flatten_call, memory_of, rebuild_call, tensors_inside
from lightning_hybrid.step.standins.absent_tensors import (
    SHAPE_METHODS,
    SHAPE_PROPERTIES,
    as_whole,
    is_absent,
    whole_shape,
)
from lightning_hybrid.step.tracing.recording import StepError
from lightning_hybrid.step.tracing.step_mode import user_line

OWN_PROPERTIES = frozenset({"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "layout", "grad", "is_cuda"})


class LentParameters(TorchFunctionMode):
    """Inside, an operation that reads a parameter finds all of it; every rank of a replica must run the same ones."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        holders: Callable[[str], Sequence[int]],
        group: dist.ProcessGroup,
        parts: HeldParts | None,
        device: torch.device,
        *,
        meet: Callable[[str], None],
        room: int,
    ) -> None:
        """Begin a step.

        Args:
            parameters: Of the module, by FQN.
            holders: Pipeline ranks that have a parameter, or their tensor ranks' parts of it.
            group: The ranks of this pipeline.
            parts: What tensor ranks cut, if they do.
            device: Where the group communicates.
            meet: Called with what is about to be sent; finds ranks that read something else.
            room: Bytes that what was sent may take until the end; the same on every rank.
        """
        super().__init__()
        self._parameters, self._holders, self._group, self._device = parameters, holders, group, device
        self._meet, self._room = meet, room
        self._cuts = [] if parts is None else [cut for cut in parts.cuts if cut.axis == "tp"]
        cut = {name for axis in self._cuts for name in axis.placements}
        self._lent = {id(p): name for name, p in parameters.items() if name in cut or len(holders(name)) < group.size()}
        others = [] if parts is None else [cut for cut in parts.cuts if cut.axis not in ("tp", "cp")]
        self._of_replicas = {name for axis in others for name in axis.placements}
        self._kept: dict[str, Tensor] = {}
        self._shown: dict[str, Tensor | None] = {}  # what user code may write into; of replicas' parts as it was

    def __exit__(self, *exception: Any) -> None:
        """Free what was sent; what the step has written into a parameter stays."""
        super().__exit__(*exception)
        self.end(failed=bool(exception) and exception[0] is not None)

    def end(self, *, failed: bool) -> None:
        """Free what was sent, and unless the step has failed keep what it has written into parameters."""
        kept, self._kept = self._kept, {}
        shown, self._shown = self._shown, {}
        if failed:
            return
        with torch.no_grad():
            for name, before in shown.items():
                self._write_back(name, kept[name], before)
            for name, whole in kept.items():
                parameter = self._parameters[name]
                if whole.grad is not None and not is_absent(parameter) and whole.shape == parameter.shape:
                    parameter.grad = whole.grad if parameter.grad is None else parameter.grad + whole.grad

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on what this rank has or is sent."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__") and id(args[0]) in self._lent:
            member = func.__self__.__name__
            if name == "__get__" and member in SHAPE_PROPERTIES:
                return func(as_whole(args[0]))
            if member == "grad" and (whole := self._kept.get(self._lent[id(args[0])])) is not None:
                return func(whole, *args[1:])
            if member in OWN_PROPERTIES:
                return func(*args, **kwargs)
        elif name in SHAPE_METHODS and id(args[0]) in self._lent:
            return func(as_whole(args[0]), *args[1:], **kwargs)
        elif name in IDENTITY:
            return func(*args, **kwargs)
        leaves, plain = flatten_call(args, kwargs)
        found = {id(leaf): self._lent[id(leaf)] for leaf in leaves if id(leaf) in self._lent}
        if not found:
            self._refuse_absent(name, leaves)
            return func(*args, **kwargs)
        wholes = {name: self._whole(name) for name in found.values()}
        leaves = [wholes[found[id(leaf)]] if id(leaf) in found else leaf for leaf in leaves]
        args, kwargs = rebuild_call(leaves, args, kwargs, plain)
        written = 0 if name == "__set__" else written_of(name, leaves, kwargs)
        if written is not None:
            self._show({name: whole for name, whole in wholes.items() if whole is leaves[written]})
        out = func(*args, **kwargs)
        memories = {memory_of(leaf) for leaf in tensors_inside(out)}
        self._show({name: whole for name, whole in wholes.items() if memory_of(whole) in memories})
        return out

    def _refuse_absent(self, name: str, leaves: Sequence[Any]) -> None:
        """What a hook, or torch.func, made of parameters of other ranks has no content here."""
        if any(is_absent(leaf) for leaf in leaves):
            raise StepError(
                f"{user_line()}: {name} reads a tensor without content on this rank, such as one that a hook or"
                " torch.func made of parameters of other ranks, in a step of evaluation that every rank runs whole;"
                " keep a copy of the module or a number in the hook, or set pipeline_parallel_size=1"
            )

    def _show(self, wholes: Mapping[str, Tensor]) -> None:
        """User code holds these wholes, or writes into them: they stay until the end of the step."""
        for name, whole in wholes.items():
            if name not in self._shown:
                self._kept[name] = whole
                self._shown[name] = whole.detach().clone() if name in self._of_replicas else None

    def _write_back(self, name: str, whole: Tensor, before: Tensor | None) -> None:
        parameter, whole = self._parameters[name], whole.detach()
        if before is not None and not torch.equal(before, whole):
            raise StepError(
                f"the step writes into {name!r}, which replicas share out, in a step of evaluation that every rank runs"
                " whole; write it in a hook such as on_validation_epoch_start, or set zero_stage=0"
            )
        if before is not None or is_absent(parameter):
            return
        for axis in self._cuts:
            if name in axis.placements:
                whole = axis.part(whole, axis.placements[name])
        if memory_of(whole) != memory_of(parameter):
            parameter.detach().copy_(whole)

    def _whole(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        derived = torch.is_grad_enabled() and parameter.requires_grad
        whole = self._kept.get(name)
        if whole is None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._meet(f"reads {name!r}")
                whole = self._sent(name, parameter)
            size = whole.numel() * whole.element_size()
            if size <= self._room or derived:  # what is derived by must be one tensor
                self._room -= size
                self._kept[name] = whole
        if derived and not whole.requires_grad:
            whole.requires_grad_()
        return whole

    def _sent(self, name: str, parameter: Tensor) -> Tensor:
        """The whole of a parameter; collective over the replica."""
        shape, holders = whole_shape(parameter), self._holders(name)
        if is_absent(parameter):
            content = torch.empty(shape, dtype=parameter.dtype, device=self._device)
        else:
            content = parameter.detach()
            for axis in self._cuts:
                placement = axis.placements.get(name)
                if placement is not None and content.shape[placement.dim] < placement.length:
                    content = axis.joined(content, placement)
            if content.shape != shape:
                raise StepError(
                    f"replicas share out {name!r}: this rank has shape {tuple(content.shape)} of {tuple(shape)}, in a"
                    " step of evaluation that every rank runs whole; set zero_stage=0 and expert_parallel_size=1"
                )
            content = content.to(self._device).contiguous()
        if len(holders) < self._group.size():
            dist.broadcast(as_sent(content), group=self._group, group_src=holders[0])
        return content.to(parameter.device)
