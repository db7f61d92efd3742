"""The modules of several replicas in one process: they share the parameters; all other state is per replica.

Before a step that follows averaged gradients, all replicas get the buffers of the first one, as under DDP.

Hooks run on the first module only, as Lightning calls them once. Their changes between two steps (a phase of training,
a list that is emptied, a buffer) are applied to the other modules before the next step.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import inside, is_state, reachable_leaves

_LISTS = (list, set, deque)
_NOTHING = object()


class ReplicaModules:
    """The user's module, and a copy of it for each further replica."""

    def __init__(self, module: Any, trainer: Any) -> None:
        self.modules: list[Any] = [module]
        self._trainer = trainer
        self._snapshot: _Snapshot | None = None
        self._parameters: list[tuple[Tensor, Tensor]] = []
        self._sync_buffers_next = True

    def __getitem__(self, replica: int) -> Any:
        """The module of a replica, made at the first access."""
        original = self.modules[0]
        while len(self.modules) <= replica:
            self.modules.append(self._copied())
        module = self.modules[replica]
        if module is not original:
            for source, target in zip(original.modules(), module.modules(), strict=True):
                target.training = source.training
            module._current_fx_name = original._current_fx_name
        return module

    def _copied(self) -> Any:
        original = self.modules[0]
        memo = self._common_objects()
        # torch copies no tensor of a graph, such as the weight that torch's old weight_norm leaves on a layer.
        computed = (leaf for _, leaf in reachable_leaves(original) if isinstance(leaf, Tensor) and not leaf.is_leaf)
        memo.update((id(leaf), leaf.detach().clone()) for leaf in computed)
        module = copy.deepcopy(original, memo)
        module.trainer = self._trainer  # copies of a LightningModule forget it
        return module

    def _common_objects(self) -> dict[int, Any]:
        """The objects that all copies share (parameters, metrics, Trainer), by identity."""
        original = self.modules[0]
        metrics = [module for module in original.modules() if isinstance(module, Metric)]
        return {id(value): value for value in (*original.parameters(), *metrics, self._trainer)}

    def before_step(self, last: int = 0) -> None:
        """Copy the changes by hooks since the previous step to all replicas up to ``last``, the last of the step."""
        self._apply_hook_changes()
        self._parameters = []
        if last > 0:
            self[last]  # copied before any of them has run
            parameters = [p for p in self.modules[0].parameters() if not is_lazy(p)]
            self._parameters = [(p, p.detach().clone()) for p in parameters]

    def share_buffers(self, step: str) -> None:
        """Before a step of a fit, copy the buffers of the first replica to all, if gradients were averaged before."""
        if self._trainer.state.fn != "fit":
            return
        sync = self._sync_buffers_next
        self._sync_buffers_next = step == "training_step" and not self._trainer.fit_loop._should_accumulate()
        for module in self.modules[1:] if sync else ():
            others = dict(module.named_buffers())
            for name, buffer in self.modules[0].named_buffers():
                other = others.get(name)
                if other is not None and (other.shape, other.dtype) == (buffer.shape, buffer.dtype):
                    other.detach().copy_(buffer.detach())

    def begin_replica(self, replica: int) -> Any:
        """The module of the replica whose step runs next; the parameters are reset to their state before the step."""
        if replica > 0:
            for parameter, before in self._parameters:
                parameter.data.copy_(before)  # a step may write, as a momentum teacher does; each replica does it once
        return self[replica]

    def _apply_hook_changes(self) -> None:
        if len(self.modules) == 1 or self._snapshot is None:
            return
        original = self.modules[0]
        if set(original.modules()) != set(self._snapshot.modules):
            del self.modules[1:]  # a hook has rebuilt layers: new copies are made of the module as it is
            return
        for module in self.modules[1:]:
            pairs = list(zip(self._snapshot.modules, module.modules(), strict=True))
            memo = {**self._common_objects(), **{id(source): target for source, target in pairs}}
            for source, target in pairs:
                if source is not target:
                    self._apply(source.__dict__, target.__dict__, memo, top=True)
                    # A hook may have given a module another name too, or taken one.
                    named = source._modules.items()
                    target._modules = {name: None if inner is None else memo[id(inner)] for name, inner in named}

    def after_step(self) -> None:
        """Take a snapshot of the first replica's state."""
        if len(self.modules) > 1:
            self._snapshot = _Snapshot(self.modules[0])

    def _apply(
        self, source: dict[Any, Any], target: dict[Any, Any], memo: dict[int, Any], *, top: bool = False
    ) -> None:
        assert self._snapshot is not None
        for name in {**target, **source}:
            if top and (not is_state(name) or name == "_modules"):
                continue
            value, other = source.get(name, _NOTHING), target.get(name, _NOTHING)
            if not self._snapshot.has_changed(source, name):
                continue
            if value is _NOTHING:
                del target[name]
                continue
            new, old = inside(value), inside(other)
            if isinstance(new, dict) and isinstance(old, dict) and self._snapshot.value_of(source, name) is value:
                self._apply(new, old, memo)
            elif _is_copyable(value, other):
                with torch.no_grad():
                    other.copy_(value)
            elif isinstance(value, Tensor) and id(value) not in memo:
                target[name] = value.detach().clone()
            else:
                target[name] = copy.deepcopy(value, memo)


class _Snapshot:
    """A snapshot of a module's state, down to the contents of containers and tensors, that detects changes."""

    def __init__(self, root: nn.Module) -> None:
        self.modules = list(root.modules())
        self._members: dict[int, dict[Any, Any]] = {}
        self._fingerprints: dict[int, dict[Any, Any]] = {}
        for module in root.modules():
            self._record(module.__dict__)

    def _record(self, container: dict[Any, Any]) -> None:
        if id(container) in self._members:
            return
        self._members[id(container)] = dict(container)
        self._fingerprints[id(container)] = {name: list(_fingerprint(value, 0)) for name, value in container.items()}
        for value in container.values():
            content = inside(value)
            if isinstance(content, dict):
                self._record(content)

    def value_of(self, container: dict[Any, Any], name: Any) -> Any:
        """The object that the snapshot has."""
        return self._members.get(id(container), {}).get(name, _NOTHING)

    def has_changed(self, container: dict[Any, Any], name: Any) -> bool:
        """Whether a member was added, removed or changed since the snapshot."""
        if name not in container:
            return self.value_of(container, name) is not _NOTHING
        before = self._fingerprints.get(id(container), {}).get(name)
        return before is None or before != list(_fingerprint(container[name], 0))


def _fingerprint(value: Any, depth: int) -> Iterator[Any]:
    """Yield values that change if ``value`` or its contents change: plain values, identities, tensor versions."""
    if isinstance(value, int | float | str | bytes) or value is None:
        yield type(value), repr(value)
        return
    yield id(value)
    if isinstance(value, Tensor):
        yield None if value.is_inference() else value._version
    content = value if isinstance(value, tuple) else inside(value)
    if content is not None and depth < 4:
        if isinstance(content, dict):
            for name, item in content.items():
                yield str(name)
                yield from _fingerprint(item, depth + 1)
        elif isinstance(content, (*_LISTS, tuple)):
            yield len(content)
            for item in content:
                yield from _fingerprint(item, depth + 1)


def _is_copyable(value: Any, other: Any) -> bool:
    """Whether the content of one tensor can be copied into another."""
    both = isinstance(value, Tensor) and isinstance(other, Tensor) and value is not other
    return both and value.shape == other.shape and value.dtype == other.dtype and other.is_leaf
