"""Reads of full parameters by code outside of layers, where tensor ranks hold shards.

All tensor ranks of a replica run the same code on the same values, so all of them read it. Each has the gradient of the
full parameter, and keeps that of its shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.params.guards import GatherCallbacks, OutsideLayerGuard, ReadGuards
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.functions import NotIntercepted


class FullParameterReads:
    """Gathers on read the parameters of one module that are sharded over tensor ranks, while a step runs."""

    def __init__(self, root: nn.Module, cut: AxisSharding, without: Collection[str], guards: ReadGuards) -> None:
        """Selects the sharded parameters.

        ``without`` are FQNs of parameters that another mode represents in full to code outside of layers.
        """
        self._cut = cut
        self._names = {
            id(p): name
            for name, p in root.named_parameters()
            if name in cut.placements and name not in without and not is_absent(p)
        }
        self._parameters = [p for p in root.parameters() if id(p) in self._names]
        self._copies: list[_FullCopy] = []
        gather = GatherCallbacks(guards, self._full, self._record_copy, self._gradient, self._set_gradient)
        self._outside = OutsideLayerGuard("tensor", gather)
        guards.before_shard_access.append(self._write_back)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """A context around one step."""
        try:
            with self._outside.on(self._parameters):
                yield
        finally:
            self._write_back()

    def of_layer(self, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the forward of a layer, in which parameters are shards."""
        sharded = [parameter for parameter in layer.parameters() if id(parameter) in self._names]
        if not sharded:
            return run

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._write_back()
            with self._outside.inside(sharded):
                return run(*args, **kwargs)

        return forward

    def _placement(self, parameter: nn.Parameter) -> Shard:
        return self._cut.placements[self._names[id(parameter)]]

    def _full(self, parameter: nn.Parameter) -> Tensor:
        self._write_back()
        with torch._C.DisableTorchFunctionSubclass():
            full: Tensor = _Joined.apply(parameter, self._cut, self._placement(parameter))
        return full

    def _record_copy(self, parameter: nn.Parameter, full: Tensor, by_data: bool) -> None:
        """Records a full tensor that user code holds, or has written into."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            before = parameter.detach().clone() if by_data else None
            self._copies.append(_FullCopy(parameter, parameter.detach(), full.detach(), -1, before))
        self._write_back()

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The full gradient; the same tensor as long as the shard's is the same."""
        self._write_back()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            local = parameter.grad
            if local is None:
                return None
            for copy in self._copies:
                if copy.local is local and copy.local_version == local._version:
                    return copy.full
            full = self._cut.unshard(local, self._placement(parameter))
        self._copies.append(_FullCopy(parameter, local, full, full._version, None))
        return full

    def _set_gradient(self, parameter: nn.Parameter, full: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if full is None:
                parameter.grad = None
                return
            if any(copy.full is full and copy.local is parameter.grad for copy in self._copies):
                return
            parameter.grad = self._cut.shard(full.detach(), self._placement(parameter)).contiguous()

    @torch.no_grad()
    def _write_back(self) -> None:
        """Copies what code has written into full tensors to the shards."""
        for copy in self._copies:
            full = copy.full
            if copy.before is None and full._version == copy.version:
                continue
            copy.version = full._version
            with torch._C.DisableTorchFunctionSubclass():
                now = self._cut.shard(full, self._placement(copy.parameter))
                if copy.before is not None:
                    if torch.equal(now, copy.before):
                        continue
                    copy.before = now.clone()
                copy.local.copy_(now)
                copy.local_version = copy.local._version
        if not self._outside.is_on:
            self._copies = []


@dataclass
class _FullCopy:
    """A full tensor that user code holds."""

    parameter: nn.Parameter  # the sharded parameter
    local: Tensor  # this rank's shard, or its gradient
    full: Tensor  # the full tensor
    version: int  # its version when it was last written back
    before: Tensor | None  # the content of the shard at that time, where autograd does not count writes
    local_version: int = field(init=False)  # the version of ``local`` at that time

    def __post_init__(self) -> None:
        self.local_version = self.local._version


class _Joined(NotIntercepted, torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cut: AxisSharding, placement: Shard) -> Tensor:
        """The full tensor, of the shape that the shards join to."""
        ctx.cut, ctx.placement = cut, placement
        return cut.unshard(local, placement)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """This rank's shard of the gradient, which has the full shape."""
        return ctx.cut.shard(gradients[0], ctx.placement).contiguous(), None, None
