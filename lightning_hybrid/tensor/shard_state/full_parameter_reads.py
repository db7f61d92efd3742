"""Reads of full parameters by code outside of layers, where tensor ranks hold shards.

All tensor ranks of a replica run the same code on the same values, so all of them read it. Each has the gradient of the
full parameter, and keeps that of its own shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.parts.gather_on_read import Gather, Guards, OutsideLayers
from lightning_hybrid.parts.local_shards import AxisCut
from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.step.instrument.autograd_functions import Unwatched
from lightning_hybrid.step.standins.absent_tensors import is_absent


class FullReads:
    """Guards the parameters of one module that tensor ranks cut, while a step runs."""

    def __init__(self, root: nn.Module, cut: AxisCut, without: Collection[str], guards: Guards) -> None:
        """Be ready.

        Args:
            root: The user's module; each parameter holds this rank's shard.
            cut: Over tensor ranks.
            without: FQNs of parameters that others show to code outside of layers.
            guards: Of the run.
        """
        self._cut = cut
        self._names = {
            id(p): name
            for name, p in root.named_parameters()
            if name in cut.placements and name not in without and not is_absent(p)
        }
        self._parameters = [p for p in root.parameters() if id(p) in self._names]
        self._handed: list[_Handed] = []
        gather = Gather(guards, self._full, self._note, self._gradient, self._set_gradient)
        self._outside = OutsideLayers("tensor", gather)
        guards.before_shards.append(self._write_back)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """A step runs inside."""
        try:
            with self._outside.on(self._parameters):
                yield
        finally:
            self._write_back()

    def of_layer(self, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a layer, which itself works on shards."""
        own = [parameter for parameter in layer.parameters() if id(parameter) in self._names]
        if not own:
            return run

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._write_back()
            with self._outside.inside(own):
                return run(*args, **kwargs)

        return forward

    def _placement(self, parameter: nn.Parameter) -> Shard:
        return self._cut.placements[self._names[id(parameter)]]

    def _full(self, parameter: nn.Parameter) -> Tensor:
        self._write_back()
        with torch._C.DisableTorchFunctionSubclass():
            full: Tensor = _Joined.apply(parameter, self._cut, self._placement(parameter))
        return full

    def _note(self, parameter: nn.Parameter, full: Tensor, by_data: bool) -> None:
        """User code holds a full tensor, or has written into it."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            before = parameter.detach().clone() if by_data else None
            self._handed.append(_Handed(parameter, parameter.detach(), full.detach(), -1, before))
        self._write_back()

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The full gradient; the same tensor as long as the shard's is the same."""
        self._write_back()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            local = parameter.grad
            if local is None:
                return None
            for handed in self._handed:
                if handed.local is local and handed.local_version == local._version:
                    return handed.full
            full = self._cut.joined(local, self._placement(parameter))
        self._handed.append(_Handed(parameter, local, full, full._version, None))
        return full

    def _set_gradient(self, parameter: nn.Parameter, full: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if any(handed.full is full and handed.local is parameter.grad for handed in self._handed):
                return
            parameter.grad = self._cut.part(full.detach(), self._placement(parameter)).contiguous()

    @torch.no_grad()
    def _write_back(self) -> None:
        """What code has written into full tensors becomes the content of shards."""
        for handed in self._handed:
            full = handed.full
            if handed.before is None and full._version == handed.version:
                continue
            handed.version = full._version
            with torch._C.DisableTorchFunctionSubclass():
                now = self._cut.part(full, self._placement(handed.parameter))
                if handed.before is not None:
                    if torch.equal(now, handed.before):
                        continue
                    handed.before = now.clone()
                handed.local.copy_(now)
                handed.local_version = handed.local._version
        if not self._outside.is_on:
            self._handed = []


@dataclass
class _Handed:
    """A full tensor that user code holds.

    Attributes:
        parameter: Of which this rank has a shard.
        local: The shard, or its gradient.
        full: The tensor.
        version: Its version when it was last written back.
        before: The shard as it was then, where autograd does not count writes.
        local_version: Of the shard's tensor then.
    """

    parameter: nn.Parameter
    local: Tensor
    full: Tensor
    version: int
    before: Tensor | None
    local_version: int = field(init=False)

    def __post_init__(self) -> None:
        self.local_version = self.local._version


class _Joined(Unwatched, torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cut: AxisCut, placement: Shard) -> Tensor:
        ctx.cut, ctx.placement = cut, placement
        return cut.joined(local, placement)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.cut.part(gradients[0], ctx.placement).contiguous(), None, None
