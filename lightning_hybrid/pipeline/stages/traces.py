"""The trace cache: selects the recorded trace of each microbatch.

A batch of new shapes is recorded, as is one after a mode or ``requires_grad`` of a module has changed. Otherwise the
latest trace is selected, unless the step may diverge from it: its recording has ``guards`` on values that may change,
or an attribute around its units has changed since. Then each microbatch takes a dry run first: the
user's step without the model's arithmetic, whose effects are rolled back. If it diverges from all traces, it is
recorded there and then. Every rank of a replica runs the same Python and so selects the same traces; the ranks check
this with the results of the step.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.batch.split import copied_batch, sizes_of
from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError, StepError
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.params.gradient_hooks import without_registrations
from lightning_hybrid.patching import replaced
from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
from lightning_hybrid.pipeline.stages.recording import record_variant
from lightning_hybrid.pipeline.stages.training import Backwards
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot
from lightning_hybrid.step.objects.cache import BoundedLRUDict
from lightning_hybrid.step.objects.pytree import flatten, tensors_inside
from lightning_hybrid.step.recording.guards import UnguardedReads, modules_around, plain_state
from lightning_hybrid.step.replay.stage import StageReplay, StageRun, instrumented
from lightning_hybrid.step.replay.traces import TraceTree, UnknownTrace
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.mode import CurrentRun

# When a step has so many traces, they are dropped: their number may be unbounded.
_MAX_TRACES = 512
_NOTHING = contextlib.nullcontext()
# Number of batch signatures whose traces are cached.
_MAX_SIGNATURES = 512


@dataclass(frozen=True)
class Call:
    """A call of a step of the user on one batch.

    Attributes:
        name: Name of the step.
        step: The user's bound method.
        batch: The full batch.
        rest: Its arguments after the batch.
        context: Entered around each forward (autocast).
        number: Number of the batch in the run; keys the random numbers.
        backwards: What is done around its backwards; none run in evaluation, and with manual optimization.
        shares_output: Whether tensors that the step returns are needed on every rank.
        is_manual: Whether it is a training step with manual optimization.
        first: Number of the first microbatch, over all replicas.
        modes: ``StagePlan.modes`` at the time of the call.
    """

    name: str
    step: Callable[..., Any]
    batch: Any
    rest: Sequence[Any]
    context: Callable[[], AbstractContextManager[Any]]
    number: int = 0
    backwards: Backwards = field(default_factory=Backwards)
    shares_output: bool = False
    is_manual: bool = False
    first: int = 0
    modes: Hashable = None

    @property
    def trains(self) -> bool:
        """Whether it is a training step."""
        return self.name == "training_step"

    def on(self, part: Any) -> Callable[[], Any]:
        """The step bound to a part of its batch."""
        return partial(self.step, part, *self.rest)  # no frame of ours

    @contextlib.contextmanager
    def dry_run(self, plan: StagePlan, replays: Collection[StageReplay], index: int = 0) -> Iterator[CurrentRun]:
        """Run the step inside by ``replays``, as if on the microbatch of this index, without its logs and prints."""
        randomness = plan.randomness
        with (
            instrumented(replays, randomness) as current,
            randomness.isolated(),
            randomness.microbatch(self.number, self.first + index),
            torch.set_grad_enabled(self.trains or torch.is_grad_enabled()),
            self.context(),
            replaced(plan.root, "log", lambda *_, **__: None, reason="runs without logs"),
            without_registrations(plan.root),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            yield current

    def rerun(
        self,
        plan: StagePlan,
        batch: Any,
        variant: TraceVariant,
        contents: Mapping[int, Tensor],
        around: AbstractContextManager[Any] = _NOTHING,
    ) -> StageRun:
        """Run the step on a batch without the model's arithmetic, ``around`` it; its effects on the modules stay.

        ``contents`` are what reads of values of the model return, by index, in their shapes.
        """
        replay = StageReplay(variant.recording, variant.assignment, plan.root, plan.randomness, contents=contents)
        with self.dry_run(plan, [replay]) as current, around:
            return replay.run(self.on(batch), {}, plan.names(), current)


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of a batch and their traces, selected before the step runs.

    Attributes:
        batch: The full batch.
        number: Number of the batch in the run.
        parts: The batch, split.
        weights: The weight of each microbatch, by samples.
        variants: The trace of each microbatch.
        log_run: Runs the step on the full batch for its logs, if it must.
    """

    batch: Any
    number: int
    parts: Sequence[Any]
    weights: Sequence[float]
    variants: Sequence[TraceVariant]
    log_run: Any = None

    def __len__(self) -> int:
        """Their number."""
        return len(self.variants)

    @property
    def graph(self) -> StepGraph:
        """The step graph of the first one."""
        return self.variants[0].assignment.graph

    @property
    def sizes(self) -> list[int | None]:
        """Their numbers of samples."""
        return sizes_of(self.parts)


@dataclass(eq=False)
class _Traces:
    """The cached traces of one signature."""

    latest: TraceVariant  # the trace that was selected last
    around: list[nn.Module]  # the modules that have these attributes
    # the plain attributes at that time; None where microbatches of one batch had several traces
    state: list[Any] | None
    pending: list[TraceVariant] = field(default_factory=list)  # traces that are not in ``tree`` yet
    tree: TraceTree[TraceVariant] | None = None  # the tree of all traces; made when first needed


class TraceCache:
    """Caches the recorded traces of the steps of one module, and selects from them.

    Attributes:
        reads_batch: Names of the steps that read the content of a batch, by which they may branch.
    """

    def __init__(self, plan: StagePlan) -> None:
        """Set up for the stages of a module."""
        self._root, self._plan = plan.root, plan
        self._cache: BoundedLRUDict[Hashable, _Traces] = BoundedLRUDict(_MAX_SIGNATURES)
        self.reads_batch: set[str] = set()
        self._writes_batch: set[str] = set()
        self._is_unpredicted: set[str] = set()  # steps that have left a trace which was selected without a dry run

    def select_by_dry_runs(self, name: str) -> None:
        """Select each trace of a step by a dry run from now on: it depends on something that no guard has seen."""
        self._is_unpredicted.add(name)

    def choose(self, call: Call, microbatches: Sequence[Any]) -> list[TraceVariant]:
        """Select the trace of each microbatch; new ones are recorded."""
        keys = [_key(call, microbatch) for microbatch in microbatches]
        cached: dict[Hashable, _Traces] = {}
        for index, key in enumerate(keys):
            if key not in cached:
                if key not in self._cache:
                    variant = self._record(call, microbatches[index], index)
                    around = list(modules_around(self._root, variant.recording.units).values())
                    self._cache[key] = _Traces(variant, around, plain_state(around), [variant])
                cached[key] = self._cache[key]
        by_microbatch = [cached[key] for key in keys]
        if all(self._is_unchanged(each) for each in cached.values()):
            return [each.latest for each in by_microbatch]
        return self._dry_run(call, microbatches, by_microbatch)

    def trace_of_full_batch(self, call: Call, batch: Any) -> TraceVariant | None:
        """The trace of a full batch; None if the step cannot run on one."""
        try:
            return self.choose(call, [batch])[0]
        except Exception:
            return None

    def is_known(self, call: Call, microbatches: Sequence[Any]) -> bool:
        """Whether these microbatches have cached traces that need no dry run."""
        keys = dict.fromkeys(_key(call, microbatch) for microbatch in microbatches)
        return all(key in self._cache and self._is_unchanged(self._cache[key]) for key in keys)

    def writes_batch(self, name: str) -> bool:
        """Whether a step has written into its batch."""
        return name in self._writes_batch

    def unwritten(self, call: Call, batch: Any) -> Any:
        """The batch for a later run of a step; a copy if it writes into it."""
        return copied_batch(batch) if self.writes_batch(call.name) else batch

    def attributes_around_units(self, variant: TraceVariant) -> list[Any]:
        """The plain attributes of the modules around the units, on which a step may branch."""
        return plain_state(list(modules_around(self._root, variant.recording.units).values()))

    def bind_microbatch(self, call: Call, microbatch: Any, times: int) -> Callable[[], Any]:
        """The step bound to a microbatch; where it writes into the batch, all runs but the last get a copy."""
        if times == 1 or call.name not in self._writes_batch:
            return call.on(microbatch)
        copies = [microbatch, *(copied_batch(microbatch) for _ in range(times - 1))]
        return lambda: call.on(copies.pop())()

    def _is_unchanged(self, traces: _Traces) -> bool:
        if traces.latest.recording.graph.step in self._is_unpredicted:
            return False
        return not traces.latest.recording.unguarded_state and plain_state(traces.around) == traces.state

    def _record(self, call: Call, microbatch: Any, index: int) -> TraceVariant:
        unguarded_reads = UnguardedReads()
        rest = unguarded_reads.track_arguments(microbatch, call.rest)
        batch = copied_batch(microbatch)
        versions = _versions(batch)
        recipe = self._plan.recipe(
            call.name,
            lambda: call.step(batch, *rest),
            context=call.context,
            trains=call.trains,
            unguarded_reads=unguarded_reads,
            draws_as=(call.number, call.first + index),
        )
        variant = record_variant(self._plan, recipe)
        if _is_written(versions):
            self._writes_batch.add(call.name)
        if unguarded_reads.of_batch:
            self.reads_batch.add(call.name)
        return variant

    @contextlib.contextmanager
    def copy_for_dry_run(self, call: Call, batch: Any) -> Iterator[Any]:
        """A copy of a batch: a step may write into it, and in some batches only (CutMix)."""
        copied = copied_batch(batch)
        versions = _versions(copied)
        yield copied
        if _is_written(versions):
            self._writes_batch.add(call.name)

    def _dry_run(self, call: Call, microbatches: Sequence[Any], by_microbatch: Sequence[_Traces]) -> list[TraceVariant]:
        """Select traces by dry runs, one microbatch after the other; module state is restored afterwards."""
        units = self._plan.units
        inside = {module for unit in units.values() for module in unit.modules()}
        start = ModuleSnapshot(self._root, without=inside, unhooked=inside)
        states = {traces: plain_state(traces.around) for traces in dict.fromkeys(by_microbatch)}
        names = self._plan.names()
        chosen: list[TraceVariant] = []
        try:
            for index, (microbatch, traces) in enumerate(zip(microbatches, by_microbatch, strict=True)):
                before = ModuleSnapshot(self._root, without=inside, unhooked=inside) if index else start
                try:
                    variant = self._find_trace(call, microbatch, index, traces, units, names, before)
                except UnknownTrace:
                    before.restore()
                    variant = self._record(call, microbatch, index)
                    traces.pending.append(variant)
                    units, names = self._plan.units, self._plan.names()
                    try:
                        variant = self._find_trace(call, microbatch, index, traces, units, names, before)
                    except UnknownTrace as reason:
                        if reason.__cause__ is not None:  # a recording knows more than a dry run
                            chosen.append(variant)
                            continue
                        raise StepError(
                            f"{call.name} behaves differently each time it runs on the same batch, so that no"
                            f" recording predicts its operations: {reason}; make it the same each time, or"
                            f" {WITHOUT_STAGES}",
                            entry="unrepeatable",
                        ) from None
                chosen.append(variant)
        finally:
            start.restore()
        for traces, state in states.items():
            selected = [variant for each, variant in zip(by_microbatch, chosen, strict=True) if each is traces]
            traces.latest = selected[-1]
            traces.state = state if all(variant is selected[0] for variant in selected) else None
        return chosen

    def _find_trace(
        self,
        call: Call,
        microbatch: Any,
        index: int,
        traces: _Traces,
        units: Mapping[str, nn.Module],
        names: Mapping[int, str],
        before: ModuleSnapshot,
    ) -> TraceVariant:
        """Select the trace of a microbatch by a dry run; ``UnknownTrace`` if it diverges from all."""
        if traces.tree is None or traces.tree.units.keys() != units.keys() or traces.tree.count > _MAX_TRACES:
            traces.tree = TraceTree(units, [module for unit in units.values() for module in unit.modules()])
            traces.pending = traces.pending[-1:]
        tree, randomness = traces.tree, self._plan.randomness
        instrumented_as = traces.pending[-1] if traces.pending else traces.latest  # has the units of the tree
        while traces.pending:
            trace = traces.pending.pop()
            if trace.recording.units.keys() == units.keys():
                tree.add(self._root, trace.recording, trace)
        traces.pending = []
        replays = instrumented_as.replays.values()
        with (
            self.copy_for_dry_run(call, microbatch) as batch,
            call.dry_run(self._plan, replays, index) as current,
        ):
            try:
                return tree.dry_run(self._root, call.on(batch), names, current, randomness, before)
            except (StepError, ControlFlowError) as error:
                raise UnknownTrace(str(error)) from error
            except Exception:  # an error of the step is raised where it runs
                return traces.latest
            finally:
                if tree.reads_batch:
                    self.reads_batch.add(call.name)


def _key(call: Call, microbatch: Any) -> Hashable:
    """The key of the cached traces of a call: what they depend on, and is compared before each batch."""
    # The number of the loader; that of the batch comes first, and is another one each time.
    loader = tuple(argument for argument in call.rest[1:] if type(argument) is int)
    return signature_of(call.name, microbatch), call.modes, loader


def signature_of(name: str, microbatch: Any) -> Hashable:
    """The part of the cache key that depends on the step, and on types and shapes of its inputs."""
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
    """Whether any of these tensors of a batch was written; one that a value of the model was written into is absent."""
    return any(is_absent(tensor) or tensor._version != version for tensor, version in versions)
