"""The modules of replicas in one process: parameters are one and the same, everything else is each replica's own.

Buffers are those of the first replica again before a step that follows averaged gradients, as under DDP.

Hooks run on the first module alone, as Lightning calls them once. What they set there between two steps (a phase of
training, a list that is emptied, a buffer) is set on the others too, before the next step.
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

from lightning_hybrid.step.module_state.snapshot import inside, is_state, reachable

_LISTS = (list, set, deque)
_NOTHING = object()


class Replicas:
    """The user's module, and a copy of it for each further replica."""

    def __init__(self, module: Any, trainer: Any) -> None:
        """Args: module: the user's, which is the first replica's. trainer: of all of them."""
        self.modules: list[Any] = [module]
        self._trainer = trainer
        self._seen: _Seen | None = None
        self._parameters: list[tuple[Tensor, Tensor]] = []
        self._buffers_are_due = True

    def __getitem__(self, replica: int) -> Any:
        """The module of a replica, made when it is first asked for."""
        original = self.modules[0]
        while len(self.modules) <= replica:
            self.modules.append(self._copied())
        module = self.modules[replica]
        if module is not original:
            for ours, theirs in zip(original.modules(), module.modules(), strict=True):
                theirs.training = ours.training
            module._current_fx_name = original._current_fx_name
        return module

    def _copied(self) -> Any:
        original = self.modules[0]
        memo = self._shared()
        # torch copies no tensor of a graph, such as the weight that its old weight_norm leaves on a layer.
        computed = (leaf for _, leaf in reachable(original) if isinstance(leaf, Tensor) and not leaf.is_leaf)
        memo.update((id(leaf), leaf.detach().clone()) for leaf in computed)
        module = copy.deepcopy(original, memo)
        module.trainer = self._trainer  # copies of a LightningModule forget it
        return module

    def _shared(self) -> dict[int, Any]:
        """What copies have in common, by identity."""
        original = self.modules[0]
        metrics = [module for module in original.modules() if isinstance(module, Metric)]
        return {id(value): value for value in (*original.parameters(), *metrics, self._trainer)}

    def before_step(self, last: int = 0) -> None:
        """Set on all replicas what hooks have set on the first since the step before.

        Args:
            last: Of the replicas that take part in the step.
        """
        self._follow_hooks()
        self._parameters = []
        if last > 0:
            self[last]  # copied before any of them has run
            parameters = [p for p in self.modules[0].parameters() if not is_lazy(p)]
            self._parameters = [(p, p.detach().clone()) for p in parameters]

    def share_buffers(self, step: str) -> None:
        """Before a step of a fit: all replicas have the buffers of the first, if gradients were averaged before."""
        if self._trainer.state.fn != "fit":
            return
        is_due = self._buffers_are_due
        self._buffers_are_due = step == "training_step" and not self._trainer.fit_loop._should_accumulate()
        for module in self.modules[1:] if is_due else ():
            others = dict(module.named_buffers())
            for name, buffer in self.modules[0].named_buffers():
                other = others.get(name)
                if other is not None and (other.shape, other.dtype) == (buffer.shape, buffer.dtype):
                    other.detach().copy_(buffer.detach())

    def in_step(self, replica: int) -> Any:
        """The module of a replica whose step comes now: it finds the parameters as that of the first has found them."""
        if replica > 0:
            for parameter, found in self._parameters:
                parameter.data.copy_(found)  # a step may write, as a momentum teacher does; each replica does it once
        return self[replica]

    def _follow_hooks(self) -> None:
        if len(self.modules) == 1 or self._seen is None:
            return
        original = self.modules[0]
        if set(original.modules()) != set(self._seen.modules):
            del self.modules[1:]  # a hook has built layers anew: copies start from what is there
            return
        for module in self.modules[1:]:
            pairs = list(zip(self._seen.modules, module.modules(), strict=True))
            memo = {**self._shared(), **{id(ours): theirs for ours, theirs in pairs}}
            for ours, theirs in pairs:
                if ours is not theirs:
                    self._follow(ours.__dict__, theirs.__dict__, memo, top=True)
                    # A hook may have given a module another name too, or taken one.
                    named = ours._modules.items()
                    theirs._modules = {name: None if inner is None else memo[id(inner)] for name, inner in named}

    def after_step(self) -> None:
        """Note what the first replica holds."""
        if len(self.modules) > 1:
            self._seen = _Seen(self.modules[0])

    def _follow(self, ours: dict[Any, Any], theirs: dict[Any, Any], memo: dict[int, Any], *, top: bool = False) -> None:
        assert self._seen is not None
        for name in {**theirs, **ours}:
            if top and (not is_state(name) or name == "_modules"):
                continue
            value, other = ours.get(name, _NOTHING), theirs.get(name, _NOTHING)
            if not self._seen.has_changed(ours, name):
                continue
            if value is _NOTHING:
                del theirs[name]
                continue
            within, its = inside(value), inside(other)
            if isinstance(within, dict) and isinstance(its, dict) and self._seen.held(ours, name) is value:
                self._follow(within, its, memo)
            elif _alike(value, other):
                with torch.no_grad():
                    other.copy_(value)
            elif isinstance(value, Tensor) and id(value) not in memo:
                theirs[name] = value.detach().clone()
            else:
                theirs[name] = copy.deepcopy(value, memo)


class _Seen:
    """What a module held at one moment, down to the contents of containers and tensors."""

    def __init__(self, root: nn.Module) -> None:
        self.modules = list(root.modules())
        self._members: dict[int, dict[Any, Any]] = {}
        self._prints: dict[int, dict[Any, Any]] = {}
        for module in root.modules():
            self._note(module.__dict__)

    def _note(self, container: dict[Any, Any]) -> None:
        if id(container) in self._members:
            return
        self._members[id(container)] = dict(container)
        self._prints[id(container)] = {name: list(_prints(value, 0)) for name, value in container.items()}
        for value in container.values():
            within = inside(value)
            if isinstance(within, dict):
                self._note(within)

    def held(self, container: dict[Any, Any], name: Any) -> Any:
        """The object that was there."""
        return self._members.get(id(container), {}).get(name, _NOTHING)

    def has_changed(self, container: dict[Any, Any], name: Any) -> bool:
        """Whether a member has come, gone or changed since."""
        if name not in container:
            return self.held(container, name) is not _NOTHING
        before = self._prints.get(id(container), {}).get(name)
        return before is None or before != list(_prints(container[name], 0))


def _prints(value: Any, depth: int) -> Iterator[Any]:
    """What tells that a value, or something in it, has changed: plain values, identities and versions of tensors."""
    if isinstance(value, int | float | str | bytes) or value is None:
        yield type(value), repr(value)
        return
    yield id(value)
    if isinstance(value, Tensor):
        yield None if value.is_inference() else value._version
    within = value if isinstance(value, tuple) else inside(value)
    if within is not None and depth < 4:
        if isinstance(within, dict):
            for name, item in within.items():
                yield str(name)
                yield from _prints(item, depth + 1)
        elif isinstance(within, (*_LISTS, tuple)):
            yield len(within)
            for item in within:
                yield from _prints(item, depth + 1)


def _alike(value: Any, other: Any) -> bool:
    """Whether content can be copied from one tensor into another."""
    both = isinstance(value, Tensor) and isinstance(other, Tensor) and value is not other
    return both and value.shape == other.shape and value.dtype == other.dtype and other.is_leaf
