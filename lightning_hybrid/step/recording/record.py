"""Record a step: run the user's own code once with every parameter absent, and build the step graph.

The recording writes nothing (``module_state.snapshot``), needs no parameter's content, and may therefore be repeated at
any time, also while most parameters live on other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot, reachable_leaves
from lightning_hybrid.step.objects.pytree import ContainerClassRegistered
from lightning_hybrid.step.recording.gradients import FullGraphNeeded
from lightning_hybrid.step.recording.guards import UnguardedReads, modules_around
from lightning_hybrid.step.recording.kept import find_kept_values
from lightning_hybrid.step.recording.mutated import buffers_of
from lightning_hybrid.step.recording.reads import refuse_number_in_buffer
from lightning_hybrid.step.recording.recorder import Recorder
from lightning_hybrid.step.standins.counts import CostCounter
from lightning_hybrid.step.standins.kernels import quiet_fake_kernels
from lightning_hybrid.step.standins.tensors import absent_members
from lightning_hybrid.step.tracing.functions import BackwardCode, refuse_uninterceptable_functions
from lightning_hybrid.step.tracing.instrument import intercepted_step
from lightning_hybrid.step.tracing.metrics import MetricDryRun, find_sinks
from lightning_hybrid.step.tracing.mode import CurrentRun
from lightning_hybrid.step.tracing.recording import Recording


def record(
    root: nn.Module,
    step: Callable[[], Any],
    units: Mapping[str, nn.Module],
    *,
    name: str,
    randomness: KeyedRandomness,
    loss_required: bool = False,
    tracked_buffers: Iterable[str] = (),
    full_graph: bool = False,
    unguarded_reads: UnguardedReads | None = None,
    draws_as: tuple[int, int] = (0, 0),
    guesses: Sequence[bool] = (),
    absent_number: float | None = None,
) -> Recording:
    """Record one run of ``step``, and again if the full graph is needed or a container class was found.

    Args:
        root: The user's LightningModule.
        step: Runs the step on one microbatch, in the contexts (autocast, grad mode) of training.
        units: Modules that are one node each, by FQN.
        name: Name of the step, for messages.
        randomness: Its generators are left as they were.
        loss_required: Whether the step must return a loss.
        tracked_buffers: FQNs of buffers that have an owner stage like parameters.
        full_graph: Whether the step takes derivatives, so that no unit may reuse the results of an equal one.
        unguarded_reads: Collects reads of state that may differ in the next batch and that no guard covers.
        draws_as: Number of the step and microbatch that key the random numbers of glue.
        guesses: Results, in turn, of reads by which the step branches on values of the model, in a recording that is
            only inspected; empty where it will be replayed and such reads are refused.
        absent_number: The result of reads of absent values, in the search for branches on them.

    Raises:
        StepError: No loss, or a value that reached the glue in a way that cannot be traced.
        ControlFlowError: The step branches on a value of the model.
    """
    tracked = frozenset(tracked_buffers)
    unguarded_reads = UnguardedReads() if unguarded_reads is None else unguarded_reads
    attempt = partial(_record_once, root, step, units, name, randomness, loss_required, tracked, unguarded_reads)
    while True:
        try:
            return attempt(draws_as, guesses, absent_number, full_graph=full_graph)
        except FullGraphNeeded:
            assert not full_graph
            full_graph = True
        except ContainerClassRegistered:
            pass  # its objects are containers in the next attempt


def _record_once(
    root: nn.Module,
    step: Callable[[], Any],
    units: Mapping[str, nn.Module],
    name: str,
    randomness: KeyedRandomness,
    loss_required: bool,
    tracked: frozenset[str],
    unguarded_reads: UnguardedReads,
    draws_as: tuple[int, int],
    guesses: Sequence[bool],
    absent_number: float | None,
    *,
    full_graph: bool,
) -> Recording:
    state, around_units = ModuleSnapshot(root), modules_around(root, units)
    old = [leaf for _, leaf in reachable_leaves(root)]
    current, in_backward = CurrentRun(), BackwardCode()
    recorder: Recorder | None = None
    try:
        with randomness.isolated(), absent_members(root, tracked) as names:
            owned = {fqn: _owned_members(unit, names) for fqn, unit in units.items()}
            costs = CostCounter(root)
            sinks, buffers = find_sinks(root), buffers_of(root, units)
            dry_run = MetricDryRun(sinks)
            recorder = Recorder(
                *(names, costs, buffers, dry_run, units, unguarded_reads, randomness),
                full_graph=full_graph,
                absent_number=absent_number,
                guesses=itertools.cycle(guesses) if guesses else None,
            )
            with contextlib.ExitStack() as stack:
                stack.enter_context(current.watched_by(recorder))
                stack.enter_context(randomness.microbatch(*draws_as))
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
                result = step()
            refuse_number_in_buffer(root, state, "" if guesses else recorder.numbers_read)
            recording = recorder.finish(root, name, result, owned, loss_required=loss_required)
            kept = find_kept_values(root, state, old, recorder, recording)
            return replace(
                recording,
                has_functions=in_backward.has_functions,
                has_hooks=in_backward.has_hooks,
                has_guesses=recorder.has_guessed,
                **kept._asdict(),
            )
    finally:
        if recorder is not None:
            recorder.mutated.undo()
        state.restore()


def _owned_members(unit: nn.Module, names: Mapping[int, str]) -> tuple[str, ...]:
    """FQNs of the parameters and tracked buffers of a unit; ``names`` has the model's FQNs by id."""
    tensors = [*unit.parameters(), *unit.buffers()]
    return tuple(dict.fromkeys(names[id(tensor)] for tensor in tensors if id(tensor) in names))
