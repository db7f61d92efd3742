"""Reads of full parameters by code outside of layers, where tensor ranks hold shards.

All tensor ranks of a replica run the same code on the same values, so all of them read it. Each has the gradient of the
full parameter, and keeps that of its shard (``gradients``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.params.guards import GatherCallbacks, OutsideLayerGuard, ReadGuards
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.copies import FullCopies
from lightning_hybrid.params.reads.gradients import FullGradients, joined
from lightning_hybrid.params.shards import AxisSharding, LocalShards
from lightning_hybrid.step.standins.tensors import is_absent


class FullParameterReads:
    """Gathers on read the parameters of one module that are sharded over tensor ranks, while a step runs."""

    def __init__(
        self,
        root: nn.Module,
        cut: AxisSharding,
        without: Collection[str],
        guards: ReadGuards,
        agreement: HookAgreement,
        further: Collection[str] = (),
    ) -> None:
        """Selects the sharded parameters.

        ``without`` are FQNs of parameters that another mode represents in full to code outside of layers, and
        ``further`` those that other ranks share too.
        """
        self._shards = LocalShards(root, [cut])
        self._names = {
            id(p): name
            for name, p in root.named_parameters()
            if name in cut.placements and name not in without and not is_absent(p)
        }
        self._parameters = [p for p in root.parameters() if id(p) in self._names]
        self._copies = FullCopies(self._shards)
        named = {self._names[id(p)]: p for p in self._parameters}
        self._gradients = FullGradients(named, self._shards, agreement, further)
        full = self._gradients
        gather = GatherCallbacks(guards, self._full, self._record_copy, full.get, full.set, self._derivative)
        self._outside = OutsideLayerGuard("tensor", gather)
        guards.before_shard_access.extend([self._write_back, full.settle])
        guards.after_shard_access.append(full.refresh)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """A context around one step."""
        try:
            with self._outside.on(self._parameters):
                yield
        finally:
            self._write_back()
            self._gradients.forget()

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

    def of_full_layer(self, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the forward of a layer that runs in full: views in place of its parameters are gathered too."""
        places = [
            (members, name, parameter)
            for members in (inner._parameters for inner in layer.modules())
            for name, parameter in members.items()
            if parameter is not None and id(parameter) in self._names
        ]

        def forward(*args: Any, **kwargs: Any) -> Any:
            views = [
                (members, name, parameter, members[name])
                for members, name, parameter in places
                if members[name] is not parameter and getattr(members[name], "_base", None) is parameter
            ]
            for members, name, parameter, view in views:
                members[name] = self._derivative(parameter, view)  # type: ignore[arg-type,assignment]
            try:
                return run(*args, **kwargs)
            finally:
                for members, name, _, view in views:
                    members[name] = view

        return forward if places else run

    def _full(self, parameter: nn.Parameter) -> Tensor:
        self._write_back()
        with torch._C.DisableTorchFunctionSubclass():
            return joined(parameter, self._shards, self._names[id(parameter)])

    def _derivative(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """The derivative by a full parameter, from that by this rank's shard."""
        return joined(local, self._shards, self._names[id(parameter)])

    def _record_copy(self, parameter: nn.Parameter, full: Tensor, by_data: bool) -> None:
        """Records a full tensor that user code holds, or has written into."""
        self._copies.record(self._names[id(parameter)], parameter, full, by_data)

    def _write_back(self) -> None:
        """Copies what code has written into full tensors to the shards."""
        self._copies.write_back()
        if not self._outside.is_on:
            self._copies.forget()
