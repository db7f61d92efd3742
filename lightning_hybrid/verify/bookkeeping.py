"""What the reference's step keeps of the model, where it runs once per microbatch: once per batch, as in one process.

The strategies promise that a step which keeps something of the model (``self.total += loss.item()``) leaves on the
LightningModule, and on the modules in it whose code all ranks run, what one process has after the batch. Here each
microbatch sees these attributes as the batch found them, and afterwards the step runs once more on the whole batch for
them alone. Where the whole batch gives other numbers than its microbatches (BatchNorm, dropout), numbers are
joined instead. Steps that keep nothing of the model, such as one that counts, count once per microbatch, as the
strategies say.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.step.transaction import ModuleState, Place, inside, is_state, reachable
from lightning_hybrid.verify.undone import equal, perturbed, undone

# Large enough to change what a step makes of its results, whatever that is.
_OTHER_WEIGHTS = 0.5
# The whole batch's loss and the mean over its parts differ by no more where samples do not mix.
_SAME_LOSS = 1e-6

Leaves = dict[Place, Any]


class BatchBookkeeping:
    """That of one module in one batch of one replica."""

    def __init__(self, module: nn.Module, run: Callable[[Any], Any], batch: Any, around: Collection[str] = ()) -> None:
        """Take down what the batch finds.

        Args:
            module: Of the replica.
            run: The user's step, on a batch or a part.
            batch: All of the replica's.
            around: FQNs of modules in the module that keep things as it does itself.
        """
        self._module, self._run, self._batch = module, run, batch
        self._own = {inner for name, inner in module.named_modules() if not name or name in around}
        self._others = {inner for inner in module.modules() if inner not in self._own}
        self._start = self._state()
        self._before = self._leaves()
        self._parts: list[Leaves] = []
        self._whole: tuple[ModuleState, Any] | None = None  # what the whole batch leaves behind, and its loss

    def before_part(self) -> None:
        """Each sees the module's own attributes as the batch found them, if the step keeps something of the model."""
        if self._whole is not None:
            self._restore(self._start)

    def after_part(self, part: Any) -> None:
        """Note what a part has left behind; after the first, find out whether that is of the model."""
        self._parts.append(self._leaves())
        if len(self._parts) == 1 and not _same(self._parts[0], self._before):
            after = self._state()
            if self._changes_with_weights(part):
                self._whole = self._run_whole(part)
            self._restore(after)

    def finish(self, losses: Sequence[float], weights: Sequence[float]) -> None:
        """After the last part.

        Args:
            losses: Of the parts; empty if the step has none.
            weights: Shares of the parts in the batch.
        """
        if self._whole is None:
            return
        state, loss = self._whole
        self._restore(state)
        mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) if losses else math.nan
        if losses and loss is not None and not math.isclose(float(loss), mean, rel_tol=_SAME_LOSS, abs_tol=1e-12):
            self._join(weights)

    def _changes_with_weights(self, part: Any) -> bool:
        """Whether other weights leave something else behind."""
        self._restore(self._start)
        try:
            with undone(self._module, without=self._own), perturbed(self._module, _OTHER_WEIGHTS):
                self._run(part)
            return not _same(self._leaves(), self._parts[0])
        except Exception:  # such weights are of nobody's making
            return False

    def _run_whole(self, part: Any) -> tuple[ModuleState, Any] | None:
        """None where no part can go on with what the whole batch leaves, such as hidden states of all its samples."""
        self._restore(self._start)
        try:
            with undone(self._module, without=self._own):
                loss = self._run(self._batch)
                state = self._state()
                self._run(part)
            return state, loss
        except Exception:  # it need not take a whole batch; then it keeps things once per microbatch
            return None

    def _join(self, weights: Sequence[float]) -> None:
        """Put in place of each number that the parts left what they come to together."""
        for place, whole in self._leaves().items():
            parts = [leaves[place] for leaves in self._parts if place in leaves]
            if len(parts) == len(self._parts) and not equal(whole, self._before.get(place)):
                _put(self._module, place, _joined(parts, weights, whole, self._before.get(place)))

    def _restore(self, state: ModuleState) -> None:
        """All but what belongs to the machinery around the module, such as a `log` that is caught."""
        members = self._module.__dict__
        machinery = {name: value for name, value in members.items() if not is_state(name)}
        state.restore()
        for name in [name for name in members if not is_state(name)]:
            del members[name]
        members.update(machinery)

    def _state(self) -> ModuleState:
        return ModuleState(self._module, buffers=False, without=self._others)

    def _leaves(self) -> Leaves:
        return {place: _held(leaf) for place, leaf in reachable(self._module, self._others)}


def _same(some: Leaves, others: Leaves) -> bool:
    return some.keys() == others.keys() and all(equal(leaf, others[place]) for place, leaf in some.items())


def _held(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _joined(parts: Sequence[Any], weights: Sequence[float], whole: Any, before: Any) -> Any:
    """The mean of the parts or their sum, whichever is nearer to what the whole batch gives, or all in a row."""
    if isinstance(whole, Tensor) and all(isinstance(part, Tensor) for part in parts):
        if any(part.shape != whole.shape for part in parts):
            dims = [d for d, size in enumerate(whole.shape) if sum(p.shape[d] for p in parts) == size]
            return torch.cat(list(parts), dims[0]) if dims else whole
        if not whole.is_floating_point():
            return whole
    elif type(whole) not in (int, float) or any(type(part) not in (int, float) for part in parts):
        return whole
    mean = sum(part * weight for part, weight in zip(parts, weights, strict=True))
    if isinstance(whole, int):
        mean = round(mean)
    start = before if type(before) in (int, float) or isinstance(before, Tensor) else 0
    if isinstance(start, Tensor) and start.shape != getattr(whole, "shape", None):
        start = 0
    total = start + sum(part - start for part in parts)
    return total if _apart(total, whole) < _apart(mean, whole) else mean


def _apart(one: Any, other: Any) -> float:
    return float(torch.as_tensor(one - other).abs().max()) if torch.as_tensor(one).numel() else 0.0


def _put(module: nn.Module, place: Place, value: Any) -> None:
    """Set what is at a place; inside of tuples nothing can be."""
    container: Any = module.get_submodule(place.module).__dict__
    key: Any = place.attribute
    for step in place.path:
        held = container[key]
        container, key = (held if isinstance(held, tuple) else inside(held)), step
        if not isinstance(container, dict) and (container is None or key >= len(container)):
            return
    if isinstance(container, list | dict | deque):
        container[key] = value
