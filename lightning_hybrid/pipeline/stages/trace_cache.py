"""A cache of recorded traces: which of them each microbatch takes.

A batch of new shapes is recorded. Of a known one the form is known too, unless the step may do something else this
time: it looks at what may change (``guards``), or an attribute around its units has changed since. Then each
microbatch is tried in a dry run (``trace_tree``) before anything runs: the user's step without the model's arithmetic,
after which all is as it was. What it does that no recording has shown is recorded there and then. Every rank of a
replica runs the same Python and so finds the same; that it did is checked with the results of the step.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.patching import replaced
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.pipeline.stages.trace_variant import Variant
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.microbatch import copied_batch
from lightning_hybrid.step.instrument.instrument import installed
from lightning_hybrid.step.module_state.snapshot import ModuleState
from lightning_hybrid.step.objects.lru_cache import Recent
from lightning_hybrid.step.objects.pytree import flatten, tensors_inside
from lightning_hybrid.step.recording.guards import Looks, modules_around, plain_state
from lightning_hybrid.step.replay.trace_tree import NotKnown, Ways
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.recording import StepError

# When a step has taken so many ways, those known are forgotten: their number may have no end.
_MOST_WAYS = 512
# The forms are kept of so many signatures of batches.
_MOST_SIGNATURES = 512


@dataclass(frozen=True)
class Call:
    """A call of a step on one batch.

    Attributes:
        name: Name of the step.
        step: The user's, of a batch and the rest.
        rest: Further arguments.
        context: Entered around each forward.
        train: Whether it is a training step.
        number: Of the batch in the run.
        first: Number of the first microbatch, over all replicas.
        modes: ``StagePlan.modes`` now.
    """

    name: str
    step: Callable[..., Any]
    rest: Sequence[Any]
    context: Callable[[], AbstractContextManager[Any]]
    train: bool
    number: int = 0
    first: int = 0
    modes: Hashable = None

    def on(self, batch: Any) -> Any:
        """Run the step."""
        return self.step(batch, *self.rest)


@dataclass(frozen=True)
class Chosen:
    """What is known of the step on a batch before it runs.

    Attributes:
        batch: The whole batch.
        number: Of the batch in the run.
        microbatches: Its parts.
        weights: Of the parts.
        variants: The recorded form of each part.
    """

    batch: Any
    number: int
    microbatches: Sequence[Any]
    weights: list[float]
    variants: list[Variant]


@dataclass(eq=False)
class _Known:
    """Batches of one signature.

    Attributes:
        latest: The form that was chosen last.
        state: The plain attributes with which it was; None where microbatches of one batch took several.
        around: The modules that have these attributes.
        ways: All forms, with the units that they know; made when first needed.
    """

    latest: Variant
    around: list[nn.Module]
    state: list[Any] | None
    forms: list[Variant] = field(default_factory=list)
    ways: Ways[Variant] | None = None


class VariantChoice:
    """Knows the recorded forms of the steps of one module."""

    def __init__(self, root: nn.Module, plan: StagePlan, randomness: KeyedRandomness) -> None:
        """Args: root: the user's module. plan: who holds what. randomness: keys what the steps draw."""
        self._root = root
        self._plan = plan
        self._randomness = randomness
        self._known: Recent[Hashable, _Known] = Recent(_MOST_SIGNATURES)
        self._writes_batch: set[str] = set()

    def choose(self, call: Call, microbatches: Sequence[Any]) -> list[Variant]:
        """The form of each microbatch; what is new is recorded.

        Args:
            call: The call.
            microbatches: What the step runs on, one after the other.

        Raises:
            StepError: The step cannot be recorded.
            PartitionError: It cannot be cut, or not the way the first step was.
        """
        keys = [(signature_of(call.name, microbatch), call.modes) for microbatch in microbatches]
        known: dict[Hashable, _Known] = {}
        for place, key in enumerate(keys):
            if key not in known:
                if key not in self._known:
                    variant = self._record(call, microbatches[place], place)
                    around = list(modules_around(self._root, variant.recording.units).values())
                    self._known[key] = _Known(variant, around, plain_state(around), [variant])
                known[key] = self._known[key]
        of_each = [known[key] for key in keys]
        if all(self._does_the_same(each) for each in known.values()):
            return [each.latest for each in of_each]
        return self._rehearse(call, microbatches, of_each)

    def is_known(self, call: Call, microbatches: Sequence[Any]) -> bool:
        """Whether the forms that these take are known without a look at the step."""
        keys = dict.fromkeys((signature_of(call.name, microbatch), call.modes) for microbatch in microbatches)
        return all(key in self._known and self._does_the_same(self._known[key]) for key in keys)

    def writes_batch(self, name: str) -> bool:
        """Whether a step has been seen to write into its batch."""
        return name in self._writes_batch

    def state_around(self, variant: Variant) -> list[Any]:
        """The plain attributes of the modules around the units, by which a step may decide."""
        return plain_state(list(modules_around(self._root, variant.recording.units).values()))

    def runs_on(self, call: Call, microbatch: Any, times: int) -> Callable[[], Any]:
        """Runs the step on a microbatch, which each of so many runs finds as it came; the last one writes into it."""
        if times == 1 or call.name not in self._writes_batch:
            return partial(call.on, microbatch)
        found = [microbatch, *(copied_batch(microbatch) for _ in range(times - 1))]
        return lambda: call.on(found.pop())

    def _does_the_same(self, known: _Known) -> bool:
        return not known.latest.recording.looks_at and plain_state(known.around) == known.state

    def _record(self, call: Call, microbatch: Any, place: int) -> Variant:
        looks = Looks()
        rest = looks.given(microbatch, call.rest)
        batch = copied_batch(microbatch)
        versions = _versions(batch)
        variant = self._plan.variant(
            call.name,
            lambda: call.step(batch, *rest),
            call.context,
            train=call.train,
            looks=looks,
            draws_as=(call.number, call.first + place),
        )
        if _is_written(versions):
            self._writes_batch.add(call.name)
        return variant

    @contextlib.contextmanager
    def copy_for_rehearsal(self, call: Call, batch: Any) -> Iterator[Any]:
        """A copy of a batch: a step may write into it, and do so in some batches only (CutMix)."""
        copied = copied_batch(batch)
        versions = _versions(copied)
        yield copied
        if _is_written(versions):
            self._writes_batch.add(call.name)

    def _rehearse(self, call: Call, microbatches: Sequence[Any], of_each: Sequence[_Known]) -> list[Variant]:
        """Which ways they take, one after the other; everything is as before afterwards."""
        units = self._plan.units()
        inside = {part for unit in units.values() for part in unit.modules()}
        start = ModuleState(self._root, without=inside, unhooked=inside)
        states = {known: plain_state(known.around) for known in dict.fromkeys(of_each)}
        names = self._plan.names()
        chosen: list[Variant] = []
        try:
            for place, (microbatch, known) in enumerate(zip(microbatches, of_each, strict=True)):
                before = ModuleState(self._root, without=inside, unhooked=inside) if place else start
                try:
                    variant = self._way(call, microbatch, place, known, units, names, before)
                except NotKnown:
                    before.restore()
                    known.forms.append(self._record(call, microbatch, place))
                    units, names = self._plan.units(), self._plan.names()
                    try:
                        variant = self._way(call, microbatch, place, known, units, names, before)
                    except NotKnown as left:
                        raise StepError(
                            f"{call.name} does something else each time it runs on the same batch, so that no recording"
                            f" tells what it will do: {left}; make it the same each time, or set"
                            " pipeline_parallel_size=1 and num_microbatches=1"
                        ) from None
                chosen.append(variant)
        finally:
            start.restore()
        for known, state in states.items():
            taken = [variant for each, variant in zip(of_each, chosen, strict=True) if each is known]
            known.latest = taken[-1]
            known.state = state if all(variant is taken[0] for variant in taken) else None
        return chosen

    def _way(
        self,
        call: Call,
        microbatch: Any,
        place: int,
        known: _Known,
        units: Mapping[str, nn.Module],
        names: Mapping[int, str],
        before: ModuleState,
    ) -> Variant:
        """The known way that a microbatch takes.

        Raises:
            NotKnown: It takes another.
        """
        if known.ways is None or known.ways.units.keys() != units.keys() or known.ways.count > _MOST_WAYS:
            known.ways = Ways(units, [part for unit in units.values() for part in unit.modules()])
            known.forms = known.forms[-1:]
        ways, randomness = known.ways, self._randomness
        while known.forms:
            form = known.forms.pop()
            if form.recording.units.keys() == units.keys():
                ways.add(self._root, form.recording, form)
        known.forms = []
        grad = torch.set_grad_enabled(call.train or torch.is_grad_enabled())
        with (
            self.copy_for_rehearsal(call, microbatch) as batch,
            installed(known.latest.replays.values(), randomness) as current,
            randomness.isolated(),
            randomness.microbatch(call.number, call.first + place),
            grad,
            call.context(),
            replaced(self._root, "log", lambda *_, **__: None),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                return ways.rehearse(self._root, lambda: call.on(batch), names, current, randomness, before)
            except Exception:  # what is wrong with the step is told where it runs
                return known.latest


def signature_of(name: str, microbatch: Any) -> Hashable:
    """What a recording depends on beside ``StagePlan.modes``: which step, and kinds and shapes of what it is given."""
    leaves, _ = flatten(microbatch)
    shapes = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, bool)
        else (type(leaf), *((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_inside(leaf)))
        for leaf in leaves
    )
    keys = tuple(microbatch.keys()) if isinstance(microbatch, Mapping) else None
    return name, type(microbatch), keys, shapes, torch.is_grad_enabled()


def _versions(batch: Any) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors_inside(batch)]


def _is_written(versions: list[tuple[Tensor, int]]) -> bool:
    """Whether any of these tensors of a batch is another one now; one that a value of the model was written into is."""
    return any(is_absent(tensor) or tensor._version != version for tensor, version in versions)
