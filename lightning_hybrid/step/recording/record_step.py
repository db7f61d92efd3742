"""Record a step: run the user's own code once with every parameter absent, and build the step graph.

The recording writes nothing (``module_state.snapshot``), needs no parameter's content, and may therefore be repeated at
any time, also while most parameters live on other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.instrument.autograd_functions import refuse_uninterceptable_functions
from lightning_hybrid.step.instrument.intercept_units import intercepted_step
from lightning_hybrid.step.module_state.snapshot import ModuleSnapshot, reachable_leaves
from lightning_hybrid.step.objects.pytree import ContainerClassRegistered
from lightning_hybrid.step.recording.choose_units import buffers_of, owned_members
from lightning_hybrid.step.recording.escaped_values import refuse_number_in_buffer
from lightning_hybrid.step.recording.find_differentiated_nodes import FullGraphNeeded
from lightning_hybrid.step.recording.guards import UnguardedReads, modules_around
from lightning_hybrid.step.recording.kept_values import find_kept_values
from lightning_hybrid.step.recording.recorder import RecordWatch
from lightning_hybrid.step.standins.absent_tensors import absent_members, members_to_replace
from lightning_hybrid.step.standins.cost_counter import CostCounter
from lightning_hybrid.step.standins.fake_kernel_fallback import quiet_fake_kernels
from lightning_hybrid.step.tracing.find_stored_autograd_apply import find_bound_applies
from lightning_hybrid.step.tracing.intercept_step_operations import CurrentRun
from lightning_hybrid.step.tracing.metric_nodes import MetricDryRun, find_sinks
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
    run = _RecordingRun(
        root, step, units, name, randomness, loss_required, set(tracked_buffers), draws_as, guesses, absent_number
    )
    unguarded_reads = UnguardedReads() if unguarded_reads is None else unguarded_reads
    while (recording := run.attempt(unguarded_reads, full_graph=full_graph)) is None:
        full_graph = full_graph or run.needs_full_graph
    return recording


@dataclass
class _RecordingRun:
    """The arguments of ``record``, and one attempt at a recording."""

    root: nn.Module
    step: Callable[[], Any]
    units: Mapping[str, nn.Module]
    name: str
    randomness: KeyedRandomness
    loss_required: bool
    tracked: set[str]
    draws_as: tuple[int, int]
    guesses: Sequence[bool]
    absent_number: float | None
    needs_full_graph: bool = False

    def attempt(self, unguarded_reads: UnguardedReads, *, full_graph: bool) -> Recording | None:
        """Record the step, and restore the modules; None if it is to be recorded again."""
        root, units, randomness = self.root, self.units, self.randomness
        owners = members_to_replace(root, self.tracked)
        state, around_units, bound = ModuleSnapshot(root), modules_around(root, units), find_bound_applies(root)
        old = [leaf for _, leaf in reachable_leaves(root)]
        costs, current = CostCounter(root), CurrentRun()
        watch: RecordWatch | None = None
        try:
            with randomness.isolated(), absent_members(owners) as names:
                owned = {fqn: owned_members(unit, names) for fqn, unit in units.items()}
                sinks, buffers = find_sinks(root), buffers_of(root, units)
                dry_run = MetricDryRun(sinks)
                watch = RecordWatch(
                    names, costs, buffers, dry_run, units, unguarded_reads, randomness, full_graph=full_graph
                )
                watch.absent_number = self.absent_number
                watch.guesses = itertools.cycle(self.guesses) if self.guesses else None
                # An evaluation step decides itself.
                watch.assumed_finite = set() if self.loss_required or self.guesses else None
                current.watch = watch
                with contextlib.ExitStack() as stack:
                    stack.enter_context(randomness.microbatch(*self.draws_as))
                    # Glue draws the numbers of a replay: it may branch on them.
                    stack.enter_context(randomness.modules({n: m for n, m in around_units.items() if n}))
                    stack.enter_context(randomness.watching(True))
                    stack.enter_context(costs.module_stack())
                    stack.enter_context(intercepted_step(current, randomness, units, owned, sinks, bound))
                    stack.enter_context(refuse_uninterceptable_functions(current))
                    stack.enter_context(quiet_fake_kernels())
                    stack.enter_context(unguarded_reads.watching(root, list(around_units.values())))
                    stack.enter_context(costs)
                    stack.enter_context(watch)
                    result = self.step()
                refuse_number_in_buffer(root, state, "" if self.guesses else watch.numbers_read)
                recording = watch.finish(root, self.name, result, units, owned, loss_required=self.loss_required)
                return replace(recording, bound=bound, **find_kept_values(root, state, old, watch, recording)._asdict())
        except (FullGraphNeeded, ContainerClassRegistered) as reason:
            self.needs_full_graph = isinstance(reason, FullGraphNeeded)
            assert not (full_graph and self.needs_full_graph)
            return None
        finally:
            if watch is not None:
                watch.mutated.undo()
            state.restore()
