"""Record a step: run the user's own code once with every parameter absent, and build the step graph.

The recording writes nothing (``module_state.snapshot``), needs no parameter's content, and may therefore be repeated at
any time, also while most parameters live on other ranks.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError, StepError
from lightning_hybrid.patching import replaced
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot, reachable_leaves
from lightning_hybrid.step.objects.pytree import ContainerClassRegistered
from lightning_hybrid.step.recording.gradients import FullGraphNeeded
from lightning_hybrid.step.recording.guards import UnguardedReads, modules_around
from lightning_hybrid.step.recording.kept import with_kept_values
from lightning_hybrid.step.recording.mutated import buffers_of
from lightning_hybrid.step.recording.reads import refuse_number_in_buffer
from lightning_hybrid.step.recording.recorder import Recorder
from lightning_hybrid.step.standins.counts import CostCounter
from lightning_hybrid.step.standins.kernels import quiet_fake_kernels
from lightning_hybrid.step.standins.marks import mark_in_any_run
from lightning_hybrid.step.standins.numbers import AbsentArray, content_message, is_absent_number
from lightning_hybrid.step.standins.tensors import absent_members
from lightning_hybrid.step.tracing.functions import BackwardCode, refuse_uninterceptable_functions
from lightning_hybrid.step.tracing.instrument import intercepted_step
from lightning_hybrid.step.tracing.metrics import MetricDryRun, find_sinks
from lightning_hybrid.step.tracing.mode import CurrentRun, user_line
from lightning_hybrid.step.tracing.recording import Recording

_COLLECTIVE = ("barrier", "broadcast", "reduce_boolean_decision")  # methods of a strategy, over all ranks


@dataclass(frozen=True)
class Recipe:
    """How to record one run of a step."""

    root: nn.Module  # the user's LightningModule
    step: Callable[[], Any]  # runs the step on one microbatch
    units: Mapping[str, nn.Module]  # modules that are one node each, by FQN
    name: str  # name of the step, for messages
    randomness: KeyedRandomness  # its generators are left as they were
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # entered around it, such as autocast
    trains: bool = False  # whether gradients are on, and it must return a loss
    tracked: Collection[str] = ()  # FQNs of buffers that have an owner stage like parameters
    # collects reads of state that may differ in the next batch and that no guard covers
    unguarded_reads: UnguardedReads = field(default_factory=UnguardedReads)
    draws_as: tuple[int, int] = (0, 0)  # number of the step and microbatch that key the random numbers of glue
    # results, in turn, of reads by which the step branches on values of the model, in a recording that is only
    # inspected; empty where it will be replayed and such reads are refused
    guesses: Sequence[bool] = ()
    absent_number: float | None = None  # the result of reads of absent values, in the search for branches on them

    def record(self, *, full_graph: bool = False) -> Recording:
        """Record the step, and again if the full graph is needed or a container class was found.

        ``full_graph`` tells that the step takes derivatives, so that no unit may reuse the results of an equal one.

        Raises:
            StepError: No loss, or a value that reached the glue in a way that cannot be traced.
            ControlFlowError: The step branches on a value of the model.
        """
        while True:
            try:
                return self._once(full_graph=full_graph)
            except FullGraphNeeded:
                assert not full_graph
                full_graph = True
            except ContainerClassRegistered:
                pass  # its objects are containers in the next attempt

    def _once(self, *, full_graph: bool) -> Recording:
        """Record in the contexts of the step, with the numbers that it logs in place of its logs."""
        logs: list[tuple[str, float | None]] = []

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            if isinstance(value, AbsentArray):
                raise ControlFlowError(content_message(value.line, "numpy"), entry="content")
            if not isinstance(value, Metric) and mark_in_any_run(value) is None:
                number = math.nan if isinstance(value, Tensor) or is_absent_number(value) else value
                logs.append((name, float(number) if isinstance(number, bool | int | float) else None))

        grad = torch.set_grad_enabled(self.trains or torch.is_grad_enabled())
        with grad, self.context(), self._alone(), replaced(self.root, "log", log, reason="records what a step logs"):
            return replace(self._recorded(full_graph=full_graph), logged=tuple(logs))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Write no checkpoint inside, as ranks hold stand-ins; let a step that is to be replayed wait for no rank.

        Numbers that are made up, to visit branches, are not printed.
        """
        with contextlib.ExitStack() as stack:
            if self.guesses or self.absent_number is not None:
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if trainer := getattr(self.root, "_trainer", None):
                ignored = replaced(trainer, "save_checkpoint", lambda *_, **__: None, reason="none of a recording")
                stack.enter_context(ignored)
                for name in () if self.guesses else _COLLECTIVE:
                    refuse, why = partial(_refuse_to_wait, name), "stages come at different times"
                    stack.enter_context(replaced(trainer.strategy, name, refuse, reason=why))
            yield

    def _recorded(self, *, full_graph: bool) -> Recording:
        root, units, randomness, unguarded_reads = self.root, self.units, self.randomness, self.unguarded_reads
        state, around_units = ModuleSnapshot(root), modules_around(root, units)
        old = [leaf for _, leaf in reachable_leaves(root)]
        current, in_backward = CurrentRun(), BackwardCode()
        recorder: Recorder | None = None
        try:
            with randomness.isolated(), absent_members(root, self.tracked) as names:
                owned = {fqn: _owned_members(unit, names) for fqn, unit in units.items()}
                costs = CostCounter(root)
                sinks, buffers = find_sinks(root), buffers_of(root, units)
                dry_run = MetricDryRun(sinks)
                recorder = Recorder(
                    *(names, costs, buffers, dry_run, units, unguarded_reads, randomness),
                    full_graph=full_graph,
                    absent_number=self.absent_number,
                    guesses=itertools.cycle(self.guesses) if self.guesses else None,
                )
                with contextlib.ExitStack() as stack:
                    stack.enter_context(current.watched_by(recorder))
                    stack.enter_context(randomness.microbatch(*self.draws_as))
                    # Glue draws the numbers of a replay: it may branch on them.
                    stack.enter_context(randomness.modules({n: m for n, m in around_units.items() if n}))
                    stack.enter_context(randomness.watching(True))
                    stack.enter_context(costs.module_stack())
                    stack.enter_context(intercepted_step(current, randomness, units, owned, sinks))
                    stack.enter_context(refuse_uninterceptable_functions(current))
                    stack.enter_context(in_backward)
                    stack.enter_context(quiet_fake_kernels())
                    stack.enter_context(unguarded_reads.watching(root, list(around_units.values())))
                    stack.enter_context(costs)
                    stack.enter_context(recorder)
                    result = self.step()
                refuse_number_in_buffer(root, state, "" if self.guesses else recorder.numbers_read)
                recording = recorder.finish(root, self.name, result, owned, loss_required=self.trains)
                recording = replace(recording, written=state.written_buffers(root))
                return replace(
                    with_kept_values(root, state, old, recorder, recording),
                    has_functions=in_backward.has_functions,
                    has_hooks=in_backward.has_hooks,
                    has_guesses=recorder.has_guessed,
                )
        finally:
            if recorder is not None:
                recorder.mutated.undo()
            state.restore()


def _owned_members(unit: nn.Module, names: Mapping[int, str]) -> tuple[str, ...]:
    """FQNs of the parameters and tracked buffers of a unit; ``names`` has the model's FQNs by id."""
    tensors = [*unit.parameters(), *unit.buffers()]
    return tuple(dict.fromkeys(names[id(tensor)] for tensor in tensors if id(tensor) in names))


def _refuse_to_wait(name: str, *_: Any, **__: Any) -> NoReturn:
    raise StepError(
        f"{user_line()}: the step calls trainer.strategy.{name}, where all ranks wait for each other, but stages run"
        f" the step at different times; call it in a hook, such as on_train_batch_end, or {WITHOUT_STAGES}",
        entry="waits-in-step",
    )
