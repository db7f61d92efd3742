"""The step runner for several pipeline stages: record, partition, schedule, execute, exchange the results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.batch.merge import Argument
from lightning_hybrid.batch.split import copied_batch, split
from lightning_hybrid.collectives.agreement import StepBroken
from lightning_hybrid.errors import StepError
from lightning_hybrid.pipeline.exchange import StepResultExchange
from lightning_hybrid.pipeline.full_batch import LogRuns, SideEffectRun, UnsplitSteps
from lightning_hybrid.pipeline.kept import AppendedEntries
from lightning_hybrid.pipeline.logs import LogCapture
from lightning_hybrid.pipeline.means import ComparedLoss, LossMeanWeights, MeanWeights
from lightning_hybrid.pipeline.measure import LossWeighting
from lightning_hybrid.pipeline.runner import MicrobatchRunner, StepResult
from lightning_hybrid.pipeline.runtime.executor import Executor, Job, Outcome
from lightning_hybrid.pipeline.runtime.gradients import split_weight
from lightning_hybrid.pipeline.runtime.program import Programs
from lightning_hybrid.pipeline.runtime.rollback import StepSnapshot
from lightning_hybrid.pipeline.runtime.transport import Transport
from lightning_hybrid.pipeline.stages.plan import TraceVariant, broadcast_buffers, repeated_buffers
from lightning_hybrid.pipeline.stages.traces import Call, Microbatches, TraceCache
from lightning_hybrid.pipeline.stored import StoredValues
from lightning_hybrid.pipeline.trials import EvaluationTrials, Trial
from lightning_hybrid.step.replay.stage import StageRun
from lightning_hybrid.techniques.technique import Active

_OBJECTIVES = frozenset({"training_step", "validation_step", "test_step"})


class StepRunner(MicrobatchRunner):
    """Runs any step of one module on this rank's stages of a pipeline.

    Attributes:
        has_weighted_means: Whether microbatches may weigh by recorded means over another count than samples.
        recorded_means: The nodes of the step that average over such a count.
        weighting: The weights of microbatches as measured before the run.
    """

    def __init__(self, *args: Any, transport: Transport, warn_unsplit: Callable[[str, str], None], **how: Any) -> None:
        """Set up for one module; other arguments as for ``MicrobatchRunner``."""
        super().__init__(*args, **how)
        self._executor = Executor(self.plan, transport, self.guards)
        self._traces = TraceCache(self.plan)
        self._loss_shares = LossMeanWeights(self.plan, self._traces)
        self._log_runs = LogRuns(self.plan, self._traces)
        self._transport, self._programs = transport, Programs(self.plan, transport)
        self._unsplit = UnsplitSteps(self._traces, warn_unsplit)
        self._trials = EvaluationTrials(self._metrics.metrics, self._trial, self.plan.group)
        self._next: Microbatches | None = None  # of the training batch that comes next
        # A step that diverges ends the run if None.
        self._agree_on_broken_step: Callable[[Tensor], Tensor] | None = None
        self._news = ""  # where the last step that broke has stored something, and its trial has not
        self.has_weighted_means, self.recorded_means = False, frozenset[int]()
        self.weighting, self._uses_recorded_means = LossWeighting(), True

    def connect(self, active: Active) -> None:
        """Run layers as techniques do, from the next step on."""
        super().connect(active)
        self._executor.connect(active)

    def roll_back_broken_steps(self, agree: Callable[[Tensor], Tensor]) -> None:
        """Roll a training step back if it diverges from its recording on any replica.

        ``agree`` sums a tensor of shape (1,) over the replicas.
        """
        self._agree_on_broken_step = agree

    def adopt_weighting(self, weighting: LossWeighting, *, has_recorded_means: bool) -> None:
        """Weigh microbatches as measured before the run, by recorded means too only if these gave the same loss."""
        self.weighting = weighting
        self._uses_recorded_means = has_recorded_means
        if not has_recorded_means or weighting.counts or weighting.mixes:
            self.has_weighted_means, self.recorded_means = False, frozenset()
        if weighting.mixes:
            self._unsplit.add(*_OBJECTIVES)

    @property
    def can_roll_back_step(self) -> bool:
        """Whether a training step that diverges from its recording is rolled back."""
        return self._agree_on_broken_step is not None

    def count(self, name: str, batch: Any) -> int:
        """Number of microbatches."""
        return 1 if name in self._unsplit.names else super().count(name, batch)

    @property
    def unsplit_step_names(self) -> frozenset[str]:
        """Names of steps whose batches are not split into microbatches, so far."""
        return frozenset(self._unsplit.names)

    def run_unsplit(self, name: str) -> None:
        """Split no batch of a step from now on."""
        self._unsplit.add(name)

    def record(self, call: Call) -> None:
        """Record a step on an example batch before the run; the first one decides the partition into stages."""
        call = dataclasses.replace(call, modes=self.plan.modes())
        given = self._select_traces(call)
        self.has_weighted_means = call.trains and self._loss_shares.weighs(call, given)
        if call.trains:
            self.recorded_means = self._loss_shares.recorded_terms(call, given)
        if self._unit_observers:
            with contextlib.ExitStack() as watching:
                for watch in self._unit_observers:
                    watching.enter_context(watch(given.variants[0]))
                step, units = call.on(given.parts[0]), given.variants[0].recording.units
                recipe = self.plan.recipe(call.name, step, context=call.context, trains=call.trains)
                dataclasses.replace(recipe, units=units).record()

    def compare_recorded_means(self, call: Call, note: Callable[[Exception], object]) -> list[ComparedLoss]:
        """Compare the loss of a batch with its halves' loss, of even and uneven sizes, weighted by recorded means.

        ``note`` takes an error that prevents it; this rank has all layers.
        """
        call = dataclasses.replace(call, modes=self.plan.modes())
        return self._loss_shares.compare_halves(call, self.splitter, note)

    def run(self, call: Call) -> StepResult:
        """Run one step of the user's module on a full batch.

        ``StepBroken`` is raised where a training step diverges from its recording; all its effects are rolled back.
        """
        assert not call.is_manual, "a step with manual optimization is never partitioned into stages"
        if call.name in self.unpartitioned.names:
            return self._run_unpartitioned(call)
        first = self._replica * self.count(call.name, call.batch)
        call = dataclasses.replace(call, first=first, modes=self.plan.modes())
        try:
            given = self._select_traces(call)
        except Exception as reason:  # an error of the step itself shows when it runs unpartitioned
            if call.trains:
                raise
            self.unpartitioned.add_step(call.name, reason)
            return self._run_unpartitioned(call)
        call = dataclasses.replace(call, first=self._replica * len(given))
        weights = self._weights(call, given)
        if call.trains and self._loss_shares.unknown and len(given) > 1:
            why = f"{self._loss_shares.unknown}: a mean over entries that a mask or labels select"
            self._unsplit.adopt(call.name, why)
            self._unsplit.add(*_OBJECTIVES)
        elif not call.trains and self._loss_shares.are_incomparable(given.variants):
            # Such means have no common weights; evaluation needs no backward, so its batches are unsplit from now on.
            self.run_unsplit(call.name)
        elif not call.trains and (found := self._why_unsplit(call, given)):
            self._unsplit.adopt(call.name, found)
        if call.name in self._unsplit.names and len(given) > 1:
            return self.run(call)
        try:
            return self._run_in_stages(call, given, weights)
        except StepBroken as broken:
            if call.trains:
                raise
            return self._evaluate_again(call, broken)

    def _why_unsplit(self, call: Call, given: Microbatches) -> str:
        """Why a trial of evaluation shows that batches of its step must not be split; "" if it does not."""
        reads_content = call.name in self._traces.reads_batch or any(v.recording.numbers_read for v in given.variants)
        return self._trials.why_unsplit(call, given, self.splitter, reads_content=reads_content)

    def _trial(self, call: Call, count: int) -> Trial:
        """Run a step of evaluation in so many microbatches, and undo it."""
        parts, weights = split(copied_batch(call.batch), count, self.splitter)
        with self._metrics.local_copies():
            variants = self._traces.choose(call, parts)
            given = self._with_logs(call, Microbatches(call.batch, call.number, parts, weights, variants))
        snapshot, stored = self._snapshot(call, given, copied=math.inf), StoredValues(self._root)
        self.is_comparing = True
        try:
            result = self._run_in_stages(call, given, self._weights(call, given))
            return Trial(result, self._metrics.calls.numbers(), stored.written())
        finally:
            self.is_comparing = False
            snapshot.restore()

    def _evaluate_again(self, call: Call, broken: StepBroken) -> StepResult:
        """Run a step of evaluation that has left its trace, by another one if there is one, or else unpartitioned."""
        if news := self._trials.first(self._news):
            self._unsplit.adopt(call.name, f"it stores {news} for some batches only")
            return self.run(call)
        reasons = broken.agreed(self.plan.group)
        self._traces.select_by_dry_runs(call.name)
        call = dataclasses.replace(call, first=self._replica * self.count(call.name, call.batch))
        try:
            given = self._select_traces(call)
        except Exception as reason:
            self.unpartitioned.add_step(call.name, reason)
            return self._run_unpartitioned(call)
        if given.variants != broken.traces:
            call = dataclasses.replace(call, first=self._replica * len(given))
            try:
                return self._run_in_stages(call, given, self._weights(call, given))
            except StepBroken as again:
                reasons = again.agreed(self.plan.group)
        self.unpartitioned.add_step(call.name, reasons, is_on_all_ranks=True)
        return self._run_unpartitioned(call)

    def _run_in_stages(self, call: Call, given: Microbatches, weighted: tuple[list[float], MeanWeights]) -> StepResult:
        """Run this rank's stages on all microbatches, then exchange and join the results."""
        weights, shares = weighted
        logs, metrics = LogCapture(len(given), self._executor.has_guessed_size), self._metrics.calls
        joins_calls = len(given) > 1 or self.is_comparing
        exchange = self._exchange(call, given, logs, weights, shares)
        snapshot = self._snapshot(call, given) if not call.trains or self.can_roll_back_step else None
        seeds, factors = self._seeds(call, given, weights)
        job = Job(
            program=self._programs.of(given.variants, train=call.trains),
            variants=given.variants,
            steps=[self._traces.bind_microbatch(call, part, len(self.plan.stages)) for part in given.parts],
            around=partial(self._around_forward, call, logs, not joins_calls),
            backwards=call.backwards,
            seeds=seeds,
            factors=factors,
            repeated_buffers=repeated_buffers(self.plan),
            shares=shares,
            metrics=metrics if joins_calls else None,
            # Where the channel has one order, a collective must not stand between transfers.
            # Nor may the ranks of one stage wait for each other while others wait for them.
            after_forwards=exchange.begin
            if self._transport.channel == "tags" and not self.plan.widths
            else _wait_for_end,
            may_break=snapshot is not None,
        )
        appended = AppendedEntries(self._root) if len(given) > 1 else None
        side_effects = self._side_effects(call, given)
        grad = torch.set_grad_enabled(call.trains or torch.is_grad_enabled())
        with self._randomness.isolated(), grad, self._metrics.step():
            outcome = self._executor.run(job)
            averages = outcome.averages if self.plan.widths else None
            # Here too: it calls metrics as the step would.
            exchange.begin(outcome.runs, outcome.broken is not None, averages)
        self._synchronize(call, exchange, outcome, snapshot, given.variants)
        for variant in dict.fromkeys(given.variants):
            self._metrics.record_feeding_ranks(variant.assignment.sinks, self.plan.rank_of)
        logged, content = exchange.finish(outcome.runs)
        if call.trains and len(given) > 1:  # once: later batches log the same keys
            for key, text in exchange.warnings():
                self.declared[key[0]] = text
                if not isinstance(key, Argument):
                    self._warn(text)
                elif not self._replica:  # no other rank of this pipeline knows
                    warnings.warn(text, stacklevel=2)
            self.weighting = self.weighting._replace(unexplained=())
        runs = [outcome.runs[index] for index in range(len(given))]
        output, loss = exchange.join(runs, content, appended, side_effects)
        broadcast_buffers(self.plan, given.variants)
        self.unpartitioned.mark_stale()
        return StepResult(output, loss, logged, exchange.guessed, exchange.digest)

    def _exchange(
        self, call: Call, given: Microbatches, logs: LogCapture, weights: Sequence[float], shares: MeanWeights
    ) -> StepResultExchange:
        weighting, stored = self.weighting, StoredValues()
        if not call.trains:
            weighting = LossWeighting(reductions=tuple(self._trials.reductions(call.name).items()))
            if len(given) > 1 and not self.is_comparing:
                stored = StoredValues(self._root, self._trials.stored(call.name))
        metrics = self._metrics.calls
        return StepResultExchange(self.plan, call, given, logs, weights, metrics, weighting, shares, stored)

    def _snapshot(self, call: Call, given: Microbatches, **how: Any) -> StepSnapshot:
        written = frozenset[str]().union(*(variant.written for variant in given.variants))
        batches, writes_batch = (given.batch, given.parts), self._traces.writes_batch(call.name)
        return StepSnapshot(self._root, written, batches=batches, writes_batch=writes_batch, **how)

    def _weights(self, call: Call, given: Microbatches) -> tuple[list[float], MeanWeights]:
        """The weight of each microbatch, and the weights of its recorded means that differ from it."""
        if call.backwards.weighs:
            return call.backwards.weights(given.parts), ()
        if call.trains and (self.weighting.counts or not self._uses_recorded_means):
            return self.weighting.of(given.parts, given.weights), ()
        with self._metrics.local_copies():
            return list(given.weights), self._loss_shares.of(call, given)

    def _seeds(
        self, call: Call, given: Microbatches, weights: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """The gradients from which backwards start, and the factors of what arrives at parameters."""
        if not call.trains:
            return (), ()
        scales = self.weighting.scales_gradients  # the same on all stages
        scales = any(each.recording.has_functions for each in given.variants) if scales is None else scales
        pairs = [split_weight(*each, scales=scales) for each in zip(weights, given.weights, strict=True)]
        return [call.backwards.seed_factor * seed for seed, _ in pairs], [factor for _, factor in pairs]

    def _side_effects(self, call: Call, given: Microbatches) -> SideEffectRun | None:
        """The re-run of a step that keeps numbers of the model; made before the step may write into its batch."""
        if len(given) > 1 or not given.variants[0].recording.numbers_kept:
            return None
        return SideEffectRun(self.plan, call, self._traces.unwritten(call, given.batch), given.variants[0])

    def _synchronize(
        self,
        call: Call,
        exchange: StepResultExchange,
        outcome: Outcome,
        snapshot: StepSnapshot | None,
        variants: Sequence[TraceVariant],
    ) -> None:
        """Wait for the numbers of the other ranks; if the step broke on one, roll it back on all."""
        # Replicas evaluate by themselves.
        agree = self._agree_on_broken_step if call.trains and self._agree_on_broken_step is not None else torch.clone
        is_broken_here, is_broken = exchange.wait(agree, outcome.broken is not None)
        if snapshot is None or not is_broken:
            return
        self._news = exchange.news
        outcome.registered.remove()
        try:
            snapshot.restore("does something else than what was recorded")
        except StepError as error:
            raise error from outcome.broken
        raise StepBroken(outcome.broken, variants if is_broken_here else ())

    def _run_unpartitioned(self, call: Call) -> StepResult:
        call = dataclasses.replace(call, first=self._replica)  # one batch, one draw
        if self.unpartitioned.has_stale_copies:
            self._metrics.broadcast_all_states()
        with self._metrics.step():
            output, logged = self.unpartitioned.run(call)
        return StepResult(output, None, logged)

    def select_by_dry_runs(self, name: str) -> None:
        """Select each trace of a step by a dry run from now on."""
        self._traces.select_by_dry_runs(name)

    def follows_again(self, broken: StepBroken) -> bool:
        """Whether the next training batch would take the very traces that it did not follow."""
        return self._next is not None and self._next.variants == broken.traces

    def select_next_traces(self, call: Call, around: Callable[[bool], AbstractContextManager[Any]]) -> None:
        """Select the traces of the next training batch, by a dry run where needed, so that its step can run.

        ``around`` is entered meanwhile, and receives whether the traces are cached; if not, user code runs inside.
        """
        first = self._replica * self.count(call.name, call.batch)
        self._next = None
        self._next = self._select_traces(dataclasses.replace(call, first=first, modes=self.plan.modes()), around)

    def _select_traces(
        self, call: Call, around: Callable[[bool], AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> Microbatches:
        """Split a batch and select the trace of each microbatch, or use the result of ``select_next_traces``."""
        given, self._next = self._next, None
        batch = call.batch
        if given is not None and call.trains and given.batch is batch and given.number == call.number:
            return given
        parts, weights = split(batch, self.count(call.name, batch), self.splitter)
        is_known = self._traces.is_known(call, parts)
        with self._metrics.local_copies(), around(is_known):
            given = Microbatches(batch, call.number, parts, weights, self._traces.choose(call, parts))
            if len(given) > 1 and self._unsplit.adopts(call, given):
                parts, weights = split(batch, 1, self.splitter)
                variants = self._traces.choose(dataclasses.replace(call, first=self._replica), parts)
                given = Microbatches(batch, call.number, parts, weights, variants)
            given = self._with_logs(call, given)
        if not is_known:
            self.unpartitioned.has_recorded()
        return given

    def _with_logs(self, call: Call, given: Microbatches) -> Microbatches:
        """The microbatches with what is known about numbers that they log from outside of the step graph."""
        log_run = self._log_runs.of(call, given.batch, given.variants)
        return dataclasses.replace(given, log_run=log_run, repeats_logs=self._log_runs.repeat(given.variants))

    @contextlib.contextmanager
    def _around_forward(self, call: Call, logs: LogCapture, is_full: bool, index: int) -> Iterator[None]:
        """The contexts of the forward of a microbatch."""
        keyed = self._randomness.microbatch(call.number, call.first + index)
        metrics = self._metrics.calls.microbatch(index, is_full=is_full)
        with call.context(), keyed, logs.microbatch(self._root, index), metrics:
            yield


def _wait_for_end(runs: Mapping[int, StageRun], is_broken: bool) -> None:
    """Let the exchange of results begin once all transfers have ended."""
