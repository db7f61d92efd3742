"""Parameters of other ranks, lent to all of them for as long as an operation of the user's code reads them.

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

from lightning_hybrid.mesh import as_sent
from lightning_hybrid.parts.held import HeldParts
from lightning_hybrid.parts.reads import IDENTITY, SHAPE_METHODS, SHAPE_PROPERTIES
from lightning_hybrid.step.absent import WHOLE_SHAPE, is_absent
from lightning_hybrid.step.recording import StepError
from lightning_hybrid.step.tree import flatten, flatten_call, rebuild_call
from lightning_hybrid.step.watch import user_line

_OWN_PROPERTIES = frozenset({"requires_grad", "grad_fn", "is_leaf", "device", "dtype", "layout", "grad", "is_cuda"})


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
        self._parts, self._meet, self._room = parts, meet, room
        self._cuts = [] if parts is None else [cut for cut in parts.cuts if cut.axis == "tp"]
        cut = {name for axis in self._cuts for name in axis.placements}
        self._lent = {id(p): name for name, p in parameters.items() if name in cut or len(holders(name)) < group.size()}
        self._kept: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Of all parameters that some rank of a replica has to be sent."""
        lent = (self._parameters[name] for name in self._lent.values())
        return sum(self._shape(parameter).numel() * parameter.element_size() for parameter in lent)

    def __exit__(self, *exception: Any) -> None:
        """Free what was sent."""
        super().__exit__(*exception)
        self._kept = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on what this rank has or is sent."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__") and id(args[0]) in self._lent:
            member = func.__self__.__name__
            if name == "__get__" and member in SHAPE_PROPERTIES:
                return func(self._without_content(args[0]))
            if member in _OWN_PROPERTIES:
                return func(*args, **kwargs)
        elif name in SHAPE_METHODS and id(args[0]) in self._lent:
            return func(self._without_content(args[0]), *args[1:], **kwargs)
        elif name in IDENTITY:
            return func(*args, **kwargs)
        leaves, plain = flatten_call(args, kwargs)
        found = {id(leaf): self._lent[id(leaf)] for leaf in leaves if id(leaf) in self._lent}
        if not found:
            return func(*args, **kwargs)
        if self._writes(name, args, kwargs):
            raise StepError(
                f"{user_line()}: {name} writes {next(iter(found.values()))!r}, a parameter of other ranks, in a step of"
                " evaluation that every rank runs whole; write it in a hook such as on_validation_batch_end"
            )
        wholes = {place: self._whole(name) for place, name in found.items()}
        args, kwargs = rebuild_call([wholes.get(id(leaf), leaf) for leaf in leaves], args, kwargs, plain)
        return func(*args, **kwargs)

    def _writes(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether an operation writes into a parameter that is lent."""
        in_place = name == "__set__" or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        written = [args[0] if in_place and args else None, kwargs.get("out")]
        return any(id(leaf) in self._lent for leaf in flatten(written)[0])

    def _shape(self, parameter: Tensor) -> torch.Size:
        whole = parameter.__dict__.get(WHOLE_SHAPE)
        return parameter.shape if whole is None else torch.Size(whole)

    def _without_content(self, parameter: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return torch.empty(self._shape(parameter), dtype=parameter.dtype, device="meta")

    @torch.no_grad()
    def _whole(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        with torch._C.DisableTorchFunction():
            self._meet(f"reads {name!r}")
            whole = self._sent(name, self._parameters[name])
        size = whole.numel() * whole.element_size()
        if size <= self._room:
            self._room -= size
            self._kept[name] = whole
        return whole

    def _sent(self, name: str, parameter: Tensor) -> Tensor:
        """The whole of a parameter; collective over the replica."""
        shape, holders = self._shape(parameter), self._holders(name)
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
