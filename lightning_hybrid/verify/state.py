"""The state of the user's module while one process does the work of several ranks, one after the other."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_hybrid.patching import replaced
from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import ModuleSnapshot, inside, is_state
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.verify.record import local_copies

# By the dict that has it and its name: an attribute or a buffer of some module, and that dict.
_State: TypeAlias = dict[tuple[int, str], tuple[dict[str, Any], Any]]
_COMMON = frozenset({"_parameters", "_modules", "_buffers", "training", "_compiled_call_impl"})
_DEPTH = 4


class ReplicaStates:
    """The state of one module on each replica: attributes and buffers; parameters, metrics and layers are common.

    Hooks run with the state of the first replica, as Lightning calls them once: what they change between two steps is
    set on all. Before a step that follows averaged gradients, all get the buffers of the first, as under DDP.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        self._module, self._trainer = module, trainer
        self._states: dict[int, _State] = {}  # of the replicas that the module does not run now
        self._current = 0
        self._layers: set[nn.Module] = set()
        self._after: dict[tuple[int, str], list[Any]] = {}  # fingerprints of the first replica after the last step
        self._parameters: list[tuple[Tensor, Tensor]] = []
        self._syncs_buffers = True

    def before_step(self, last: int = 0) -> None:
        """Set what hooks have changed since the previous step on all replicas up to ``last``, the last of the step."""
        first, layers = self._state(), set(self._module.modules())
        if layers != self._layers:  # a hook has rebuilt layers: the others begin as the first is
            self._states.clear()
        elif self._states:
            marks = _fingerprints(first)
            changed = {key for key in marks.keys() | self._after.keys() if marks.get(key) != self._after.get(key)}
            for state in self._states.values():
                for key in changed & state.keys():
                    del state[key]
                state.update(self._copied({key: first[key] for key in changed & first.keys()}))
        self._layers = layers
        for replica in range(1, last + 1):
            if replica not in self._states:
                self._states[replica] = self._copied(first)
        written = [p for p in self._module.parameters() if not is_lazy(p)] if last > 0 else []
        self._parameters = [(p, p.detach().clone()) for p in written]

    def share_buffers(self, step: str) -> None:
        """Before a step of a fit, copy the buffers of the first replica to all, if gradients were averaged before."""
        if self._trainer.state.fn != "fit":
            return
        syncs = self._syncs_buffers
        self._syncs_buffers = step == "training_step" and not self._trainer.fit_loop._should_accumulate()
        named = [(id(m._buffers), name, buffer) for m in self._module.modules() for name, buffer in m._buffers.items()]
        for state in self._states.values() if syncs else ():
            for owner, name, buffer in named:
                other = state.get((owner, name), (None, None))[1]
                if buffer is not None and other is not None and _agree(buffer, other):
                    other.detach().copy_(buffer.detach())

    def enter(self, replica: int) -> None:
        """Give the module the state of a replica; the parameters are reset to what they were before the step."""
        if replica > 0:
            for parameter, before in self._parameters:
                parameter.data.copy_(before)  # a step may write, as a momentum teacher does; each replica does it once
        self._exchange(replica)

    def after_step(self) -> None:
        """Give the module the state of the first replica again."""
        self._exchange(0)
        self._after = _fingerprints(self._state()) if self._states else {}

    def buffers(self) -> list[dict[str, Tensor]]:
        """Copies of the buffers of each replica, with their shapes; empty if only one has run."""
        self.before_step()
        found = []
        for replica in sorted({0, *self._states}) if self._states else ():
            self._exchange(replica)
            found.append(local_copies(self._module.named_buffers()))
        self._exchange(0)
        return found

    def _exchange(self, replica: int) -> None:
        if replica == self._current:
            return
        here, there = self._state(), self._states.pop(replica)
        for key, (owner, _) in here.items():
            if key not in there:
                del owner[key[1]]
        for (_, name), (owner, value) in there.items():
            owner[name] = value
        self._states[self._current], self._current = here, replica

    def _state(self) -> _State:
        """The state that the module has now."""
        found: _State = {}
        for layer in self._module.modules():
            if isinstance(layer, Metric):
                continue
            for owner in (layer.__dict__, layer._buffers):
                names = [name for name in owner if owner is layer._buffers or _is_own(name)]
                found.update({(id(owner), name): (owner, owner[name]) for name in names})
        return found

    def _copied(self, state: _State) -> _State:
        memo = {id(each): each for each in (*self._module.modules(), *self._module.parameters(), self._trainer)}
        # torch copies no tensor of a graph, such as the weight that torch's old weight_norm leaves on a layer.
        computed = [value for _, value in state.values() if isinstance(value, Tensor) and not value.is_leaf]
        memo.update({id(value): value.detach().clone() for value in computed})
        values = copy.deepcopy({key: value for key, (_, value) in state.items()}, memo)
        return {key: (owner, values[key]) for key, (owner, _) in state.items()}


def _is_own(name: str) -> bool:
    """Whether an attribute of this name is a replica's own, and not of torch or Lightning."""
    return is_state(name) and name not in _COMMON and "_hooks" not in name


def _agree(some: Tensor, other: Tensor) -> bool:
    return (some.shape, some.dtype) == (other.shape, other.dtype)


def _fingerprints(state: _State) -> dict[tuple[int, str], list[Any]]:
    return {key: list(_fingerprint(value, 0)) for key, (_, value) in state.items()}


def _fingerprint(value: Any, depth: int) -> Iterator[Any]:
    """Yield what changes if ``value`` or its contents change: plain values, identities, tensor versions."""
    if isinstance(value, int | float | str | bytes) or value is None:
        yield type(value), repr(value)
        return
    yield id(value)
    if isinstance(value, Tensor):
        yield None if value.is_inference() else value._version
    content = value if isinstance(value, tuple) else inside(value)
    if content is None or depth >= _DEPTH:
        return
    for name, item in content.items() if isinstance(content, dict) else enumerate(content):
        yield str(name)
        yield from _fingerprint(item, depth + 1)


class ShareStates:
    """The state of a module whose ranks run shares of a batch: each starts as it was; what the first leaves remains."""

    def __init__(self, module: nn.Module, shares: int) -> None:
        # Metrics accumulate over all shares.
        metrics = [inner for m in module.modules() if isinstance(m, Metric) for inner in m.modules()]
        self._take = partial(ModuleSnapshot, module, without=metrics)
        self._start = [self._take()] if shares > 1 else []
        self._end: list[ModuleSnapshot] = []
        self._share = 0

    def enter(self, share: int) -> None:
        """Before a microbatch of a share."""
        if share != self._share:
            self._end = self._end or [self._take()]
            self._start[0].restore()
            self._share = share

    def finish(self) -> None:
        """After the last microbatch."""
        for state in self._end:
            state.restore()


@contextlib.contextmanager
def without_side_effects(module: nn.Module) -> Iterator[None]:
    """Context that discards what steps log, and restores the states of all modules inside at its end."""
    state = ModuleSnapshot(module, buffers=False)
    metrics = [inner for inner in module.modules() if isinstance(inner, Metric)]
    states = [getattr(metric, name) for metric in metrics for name in metric._defaults]
    # BatchNorm writes its running averages without a trace in their versions.
    written = [*module.buffers(), *(value for value in states if isinstance(value, Tensor))]
    contents = [(value, value.detach().clone()) for value in written if not is_absent(value)]
    bound = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
    for metric in metrics:
        metric.distributed_available_fn = _is_undistributed
    try:
        with replaced(module, "log", lambda *_, **__: None, reason="runs without logs"):
            yield
    finally:
        state.restore()
        for buffers, before in bound:
            buffers.clear()
            buffers.update(before)
        with torch.no_grad():
            for value, content in contents:
                value.detach().copy_(content)


def _is_undistributed() -> bool:
    """Whether a metric may communicate with other processes: never."""
    return False
