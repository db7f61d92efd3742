"""States of an optimizer for code of a training step that calls it: full ones, gathered when they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.params import store
from lightning_hybrid.params.guards import GatherCallbacks, ReadGuards, below_read_guards, guard, unguard
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.copies import FullCopies
from lightning_hybrid.params.shards import LocalShards


class FullStates:
    """Gathers on read the states of one optimizer that are shards, while a step of manual optimization runs."""

    def __init__(self, optimizer: Optimizer, shards: LocalShards, guards: ReadGuards, agreement: HookAgreement) -> None:
        """Take the shards of its parameters, and the ranks that hold them."""
        self._optimizer, self._shards, self._agreement = optimizer, shards, agreement
        self._copies = FullCopies(shards)
        self._gather = GatherCallbacks(guards, self._full, self._record_copy)
        self._guarded: list[nn.Parameter] = []
        self._names: dict[int, str] = {}  # FQN of the parameter, by the id of its state

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """A context around code of the user."""
        self._guard()
        try:
            yield
        finally:
            self._unguard()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """A context in which the optimizer steps shards, within the one around code of the user."""
        self._unguard()
        yield
        self._guard()

    def as_user_code(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a closure that the optimizer calls."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.on():
                return function(*args, **kwargs)

        return run

    @below_read_guards
    def _guard(self) -> None:
        for parameter, entries in self._optimizer.state.items():
            name = self._shards.name_of(parameter)
            for value in entries.values() if isinstance(entries, dict) else ():
                if type(value) is Tensor and self._shards.is_shard_of_state(parameter, value):
                    self._guarded.append(store.guard_state(value, self._shards.full_shape(name, value)))
                    self._names[id(value)] = name
        guard(self._guarded, "tensor", self._gather)

    @below_read_guards
    def _unguard(self) -> None:
        self._copies.write_back()
        self._copies.forget()
        unguard(self._guarded, "tensor")
        for value in self._guarded:
            store.release_state(value)
        self._guarded, self._names = [], {}
        for parameter, entries in self._optimizer.state.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                if isinstance(value, Tensor) and not self._shards.is_shard_of_state(parameter, value):
                    entries[key] = self._shards.shard_of_state(parameter, value)  # a full one that the step has set

    @torch.no_grad()
    def _full(self, state: nn.Parameter) -> Tensor:
        self._copies.write_back()
        name = self._names[id(state)]
        self._agreement.agree_on("training_step", f"reads a state of {name!r}")
        with torch._C.DisableTorchFunctionSubclass():
            return self._shards.unshard(name, state)

    def _record_copy(self, state: nn.Parameter, full: Tensor, by_data: bool) -> None:
        self._copies.record(self._names[id(state)], state, full, by_data)
