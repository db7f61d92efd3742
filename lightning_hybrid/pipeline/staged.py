"""The step runner for several pipeline stages: record, partition, schedule, execute, exchange the results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_hybrid.collectives.agreement import StepBroken
from lightning_hybrid.errors import StepError
from lightning_hybrid.pipeline.exchange import StepResultExchange, join_results
from lightning_hybrid.pipeline.full_batch import EvaluationTrials, LogRuns, SideEffectRun, UnsplitSteps
from lightning_hybrid.pipeline.kept import AppendedEntries
from lightning_hybrid.pipeline.logs import LogCapture
from lightning_hybrid.pipeline.means import (
    ComparedLoss,
    LossMeanWeights,
    MeanWeights,
)
from lightning_hybrid.pipeline.measure import LossWeighting
from lightning_hybrid.pipeline.metrics import MetricSync
from lightning_hybrid.pipeline.runner import MicrobatchRunner, StepResult, TrainContext
from lightning_hybrid.pipeline.runtime.executor import Executor, Job, Outcome
from lightning_hybrid.pipeline.runtime.gradients import split_weight
from lightning_hybrid.pipeline.runtime.program import Programs
from lightning_hybrid.pipeline.runtime.rollback import StepSnapshot
from lightning_hybrid.pipeline.runtime.transport import Transport
from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant, broadcast_buffers, repeated_buffers
from lightning_hybrid.pipeline.stages.recording import record_once
from lightning_hybrid.pipeline.stages.traces import Call, ChosenTraces, TraceCache
from lightning_hybrid.pipeline.unpartitioned import UnpartitionedSteps
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.batch.split import (
    BatchSplitter,
    copied_batch,
    sizes_of,
    split,
)
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

    def __init__(
        self,
        root: nn.Module,
        plan: StagePlan,
        transport: Transport,
        group: torch.distributed.ProcessGroup,
        randomness: KeyedRandomness,
        *,
        num_microbatches: int | None,
        splitter: BatchSplitter | None,
        replica: int,
        metrics: MetricSync,
        unpartitioned: UnpartitionedSteps,
        warn_unsplit: Callable[[str, str], None],
        warn: Callable[[str], None],
    ) -> None:
        """Set up for one module.

        Args:
            root: The user's module.
            plan: The ranks that own each parameter and unit.
            transport: Carries messages between stages.
            group: The ranks of this pipeline.
            randomness: Keys the random numbers of steps.
            num_microbatches: The number that the user requested; None for an automatic choice.
            splitter: Splits batches, where the user has passed one.
            replica: Data-parallel rank.
            metrics: Synchronizes the metrics of the module.
            unpartitioned: Runs evaluation steps that cannot be partitioned.
            warn_unsplit: Called once with the name of a step whose batches are not split, and the reason.
            warn: Warns the user, on the first rank.
        """
        super().__init__(plan, num_microbatches=num_microbatches, splitter=splitter, unpartitioned=unpartitioned)
        self._root, self._group, self._randomness = root, group, randomness
        self._replica, self._metrics = replica, metrics
        self._executor = Executor(root, group.rank(), transport, randomness)
        self._executor.around_backward = self.guards.off
        self._traces = TraceCache(root, plan, randomness)
        self._loss_shares = LossMeanWeights(root, plan, self._traces, randomness)
        self._log_runs = LogRuns(root, plan, self._traces, randomness)
        self._transport, self._programs = transport, Programs(plan, transport)
        self._unsplit, self._trials = UnsplitSteps(self._traces, warn_unsplit), EvaluationTrials(self._trial)
        self._chosen: ChosenTraces | None = None  # for the training batch that comes next
        self._agree_on_broken_step: Callable[[bool], bool] | None = None  # a step that diverges ends the run if None
        self.has_weighted_means, self.recorded_means = False, frozenset[int]()
        self.weighting, self._uses_recorded_means = LossWeighting(), True
        self._warn_unsplit, self._warn = warn_unsplit, warn

    def connect(self, active: Active) -> None:
        """Run layers as techniques do, from the next step on."""
        super().connect(active)
        self._executor.active = active

    def roll_back_broken_steps(self, agree: Callable[[bool], bool]) -> None:
        """Roll a training step back if it diverges from its recording on any replica, which ``agree`` returns."""
        self._agree_on_broken_step = agree

    def adopt_weighting(self, weighting: LossWeighting, *, has_recorded_means: bool) -> None:
        """Weigh microbatches as measured before the run, by recorded means too only if these gave the same loss."""
        self.weighting = weighting
        self._uses_recorded_means = has_recorded_means
        if not has_recorded_means or weighting.counts or weighting.mixes:
            self.has_weighted_means, self.recorded_means = False, frozenset()
        if weighting.mixes:
            self._unsplit.names |= _OBJECTIVES

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
        self._unsplit.names.add(name)

    def record(
        self,
        name: str,
        step: Callable[..., Any],
        args: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Record a step on an example batch before the run; the first one decides the partition into stages."""
        batch, *rest = args
        train = name == "training_step"
        call = Call(name, step, rest, context, train=train, modes=self.plan.modes())
        chosen = self._select_traces(call, batch, share_output=False)
        microbatches, weights, variants = chosen.microbatches, chosen.weights, chosen.variants
        self.has_weighted_means = train and self._loss_shares.weighs(call, variants, batch, microbatches, weights)
        if train:
            self.recorded_means = self._loss_shares.recorded_terms(call, variants, batch)
        if self.unit_observers:
            with contextlib.ExitStack() as watching:
                for watch in self.unit_observers:
                    watching.enter_context(watch(variants[0]))
                step_once = partial(call.on, microbatches[0])
                record_once(self.plan, name, step_once, variants[0].recording.units, context, train=train)

    def compare_recorded_means(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
        note: Callable[[Exception], object],
    ) -> list[ComparedLoss]:
        """Compare the loss of a batch with that of its halves, of even and uneven sizes, weighted by recorded means.

        Arguments as for ``record``, and ``note`` takes an error that prevents it; this rank has all layers.
        """
        batch, *rest = args
        call = Call("training_step", step, rest, context, train=True, modes=self.plan.modes())
        return self._loss_shares.compare_halves(call, batch, self.splitter, note)

    def run(
        self,
        name: str,
        step: Callable[..., Any],
        args: Sequence[Any],
        *,
        step_number: int,
        context: Callable[[], AbstractContextManager[Any]],
        train: TrainContext | None = None,
        share_output: bool = True,
        manual_optimization: bool = False,
    ) -> StepResult:
        """Run one step of the user's module on a full batch, as ``MicrobatchRunner.run`` describes.

        Raises:
            StepBroken: A training step diverges from its recording; all its effects are rolled back.
        """
        assert not manual_optimization, "a step with manual optimization is never partitioned into stages"
        batch, *rest = args
        first = self._replica * self.count(name, batch)
        call = Call(name, step, rest, context, train is not None, step_number, first, self.plan.modes())
        if name in self.unpartitioned.names:
            return self._run_unpartitioned(call, batch)
        try:
            chosen = self._select_traces(call, batch, share_output=share_output)
        except Exception as reason:  # an error of the step itself shows when it runs unpartitioned
            if train is not None:
                raise
            self.unpartitioned.add_step(name, reason)
            return self._run_unpartitioned(call, batch)
        call = dataclasses.replace(call, first=self._replica * len(chosen.microbatches))
        weights = self._weights(call, chosen, train)
        if train is not None and self._loss_shares.unknown and len(chosen.microbatches) > 1:
            self._warn_unsplit(name, f"{self._loss_shares.unknown}: a mean over entries that a mask or labels select")
            self._unsplit.names |= _OBJECTIVES
        elif train is None and self._loss_shares.are_incomparable(chosen.variants):
            # Such means have no common weights; evaluation needs no backward, so its batches are unsplit from now on.
            self._unsplit.names.add(name)
        elif train is None and (differing := self._trials.differing(call, chosen, self.splitter)):
            self._unsplit.adopt(name, differing)
        if name in self._unsplit.names and len(chosen.microbatches) > 1:
            return self.run(
                name, step, args, step_number=step_number, context=context, train=train, share_output=share_output
            )
        try:
            return self._run_in_stages(call, chosen, weights, train, share_output=share_output)
        except StepBroken as broken:
            if train is not None:
                raise
            return self._evaluate_again(call, batch, broken, share_output=share_output)

    def _trial(self, call: Call, batch: Any, count: int) -> StepResult:
        """Run a step of evaluation on a batch in so many microbatches, and undo it."""
        microbatches, weights = split(copied_batch(batch), count, self.splitter)
        with self._metrics.local_copies():
            variants = self._traces.choose(call, microbatches)
            log_run = self._log_runs.of(call, batch, variants)
        chosen = ChosenTraces(batch, call.number, microbatches, weights, variants, log_run)
        snapshot = self._snapshot(call, chosen)
        try:
            return self._run_in_stages(call, chosen, self._weights(call, chosen, None), None, share_output=True)
        finally:
            snapshot.restore()

    def _evaluate_again(self, call: Call, batch: Any, broken: StepBroken, *, share_output: bool) -> StepResult:
        """Run a step of evaluation that has left its trace, by another one if there is one, or else unpartitioned."""
        reasons = broken.agreed(self._group)
        self._traces.select_by_dry_runs(call.name)
        call = dataclasses.replace(call, first=self._replica * self.count(call.name, batch))
        try:
            chosen = self._select_traces(call, batch, share_output=share_output)
        except Exception as reason:
            self.unpartitioned.add_step(call.name, reason)
            return self._run_unpartitioned(call, batch)
        if chosen.variants != broken.traces:
            call = dataclasses.replace(call, first=self._replica * len(chosen.microbatches))
            weights = self._weights(call, chosen, None)
            try:
                return self._run_in_stages(call, chosen, weights, None, share_output=share_output)
            except StepBroken as again:
                reasons = again.agreed(self._group)
        self.unpartitioned.add_step(call.name, reasons, is_on_all_ranks=True)
        return self._run_unpartitioned(call, batch)

    def _run_in_stages(
        self,
        call: Call,
        chosen: ChosenTraces,
        weighted: tuple[list[float], MeanWeights],
        train: TrainContext | None,
        *,
        share_output: bool,
    ) -> StepResult:
        """Run this rank's stages on all microbatches, then exchange and join the results."""
        variants, count = chosen.variants, len(chosen.microbatches)
        (weights, shares), logs = weighted, LogCapture(count, self._executor.has_guessed_size)
        exchange = StepResultExchange(
            self._group,
            self._randomness.device,
            variants,
            logs,
            weights,
            chosen.batch,
            share_output=share_output,
            train=train is not None,
            metrics=self._metrics.calls,
            sizes=sizes_of(chosen.microbatches),
            weighting=self.weighting if train is not None else LossWeighting(),
            by_samples=chosen.weights,
            log_run=chosen.log_run,
            rank_of=self.plan.rank_of,
        )
        snapshot = self._snapshot(call, chosen) if train is None or self._agree_on_broken_step is not None else None
        job = Job(
            program=self._programs.of(variants, train=train is not None),
            variants=variants,
            steps=[self._traces.bind_microbatch(call, batch, len(self.plan.stages)) for batch in chosen.microbatches],
            around=self._around_forwards(call, logs, count),
            parameters=self.plan.names(),
            repeated_buffers=repeated_buffers(self.plan),
            shares=shares,
            metrics=self._metrics.calls if count > 1 else None,
            may_break=snapshot is not None,
            **self._callbacks(train, exchange, weights, chosen),
        )
        appended = AppendedEntries(self._root) if count > 1 else None
        side_effects = self._side_effects(call, chosen)
        grad = torch.set_grad_enabled(train is not None or torch.is_grad_enabled())
        with self._randomness.isolated(), grad, self._metrics.step():
            outcome = self._executor.run(job)
        self._synchronize(exchange, outcome, snapshot, variants, train=train is not None)
        for variant in dict.fromkeys(variants):
            self._metrics.record_feeding_ranks(variant.assignment.sinks, self.plan.rank_of)
        result = self._result(
            chosen, outcome, exchange, weights, train=train is not None, appended=appended, side_effects=side_effects
        )
        broadcast_buffers(self.plan, variants)
        self.unpartitioned.has_stale_copies = True
        return result

    def _snapshot(self, call: Call, chosen: ChosenTraces) -> StepSnapshot:
        written = frozenset[str]().union(*(variant.written for variant in chosen.variants))
        batches, writes_batch = (chosen.batch, chosen.microbatches), self._traces.writes_batch(call.name)
        return StepSnapshot(self._root, written, batches=batches, writes_batch=writes_batch)

    def _weights(self, call: Call, chosen: ChosenTraces, train: TrainContext | None) -> tuple[list[float], MeanWeights]:
        """The weight of each microbatch, and those of its recorded means that differ from it."""
        microbatches, weights = chosen.microbatches, chosen.weights
        if train is not None and train.weigh is not None:
            return train.weigh(microbatches), ()
        if train is not None and (self.weighting.counts or not self._uses_recorded_means):
            return self.weighting.of(microbatches, weights), ()
        with self._metrics.local_copies():
            return weights, self._loss_shares.of(call, chosen.variants, chosen.batch, microbatches, weights)

    def _around_forwards(
        self, call: Call, logs: LogCapture, count: int
    ) -> Callable[[int, Callable[[], StageRun]], StageRun]:
        """A function that runs the forward of a microbatch in its contexts; they are entered before each forward."""

        def around(index: int, run: Callable[[], StageRun]) -> StageRun:
            keyed = self._randomness.microbatch(call.number, call.first + index)
            metrics = self._metrics.calls.microbatch(index, is_full=count == 1)
            with call.context(), keyed, logs.microbatch(self._root, index), metrics:
                return run()

        return around

    def _callbacks(
        self,
        train: TrainContext | None,
        exchange: StepResultExchange,
        weights: Sequence[float],
        chosen: ChosenTraces,
    ) -> dict[str, Any]:
        """The options of a job that concern its backwards, and what it calls between instructions."""
        options: dict[str, Any] = {}
        if self._transport.channel == "tags":  # otherwise a collective must not stand between transfers
            options["after_forwards"] = lambda runs, is_broken: exchange.begin(runs, is_broken=is_broken)
        if train is not None:
            scales = self.weighting.scales_gradients  # the same on all stages
            scales = any(each.recording.has_functions for each in chosen.variants) if scales is None else scales
            pairs = [split_weight(*each, scales=scales) for each in zip(weights, chosen.weights, strict=True)]
            options |= {"seeds": [train.seed_factor * seed for seed, _ in pairs], "factors": [by for _, by in pairs]}
            options |= {"before_backward": train.before_backward, "after_backward": train.after_backward}
            options |= {"reduce": train.reduce, "recorder": train.recorder}
        return options

    def _side_effects(self, call: Call, chosen: ChosenTraces) -> SideEffectRun | None:
        """The re-run of a step that keeps numbers of the model; made before the step may write into its batch."""
        if len(chosen.variants) > 1 or not chosen.variants[0].recording.numbers_kept:
            return None
        given = self._traces.unwritten(call, chosen.batch)
        return SideEffectRun(self._root, self.plan.names(), call, given, chosen.variants[0], self._randomness)

    def _synchronize(
        self,
        exchange: StepResultExchange,
        outcome: Outcome,
        snapshot: StepSnapshot | None,
        variants: Sequence[TraceVariant],
        *,
        train: bool,
    ) -> None:
        """Wait for the numbers of the other ranks; if the step broke on one, roll it back on all."""
        is_broken = is_broken_here = outcome.broken is not None
        try:
            exchange.wait(outcome.runs, is_broken=is_broken)
        except StepBroken:
            is_broken = is_broken_here = True
        if train and self._agree_on_broken_step is not None:  # replicas evaluate by themselves
            is_broken = self._agree_on_broken_step(is_broken)
        if snapshot is None or not is_broken:
            return
        outcome.registered.remove()
        try:
            snapshot.restore("does something else than what was recorded")
        except StepError as error:
            raise error from outcome.broken
        raise StepBroken(outcome.broken, variants if is_broken_here else ())

    def _run_unpartitioned(self, call: Call, batch: Any) -> StepResult:
        call = dataclasses.replace(call, first=self._replica)  # one batch, one draw
        if self.unpartitioned.has_stale_copies:
            self._metrics.broadcast_all_states()
        with self._metrics.step():
            output, logged = self.unpartitioned.run(call, batch)
        return StepResult(output, None, logged)

    def select_by_dry_runs(self, name: str) -> None:
        """Select each trace of a step by a dry run from now on."""
        self._traces.select_by_dry_runs(name)

    def follows_again(self, broken: StepBroken) -> bool:
        """Whether the next training batch would take the very traces that it did not follow."""
        return self._chosen is not None and self._chosen.variants == broken.traces

    def select_next_traces(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        *,
        step_number: int,
        context: Callable[[], AbstractContextManager[Any]],
        share_output: bool,
        around: Callable[[bool], AbstractContextManager[Any]],
    ) -> None:
        """Select the traces of the next training batch, by a dry run where needed, so that its step can run.

        Args:
            step: The user's bound ``training_step``.
            args: Its arguments, the batch first.
            step_number: As for ``run``.
            context: As for ``run``.
            share_output: As for ``run``.
            around: Entered meanwhile; receives whether the traces are cached. If not, user code runs inside.

        Raises:
            StepError: The step cannot be recorded.
            PartitionError: It cannot be partitioned, or not as the first step was.
        """
        batch, *rest = args
        first = self._replica * self.count("training_step", batch)
        call = Call("training_step", step, rest, context, True, step_number, first, self.plan.modes())
        self._chosen = None
        self._chosen = self._select_traces(call, batch, share_output=share_output, around=around)

    def _select_traces(
        self,
        call: Call,
        batch: Any,
        *,
        share_output: bool,
        around: Callable[[bool], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> ChosenTraces:
        """Split a batch and select the trace of each microbatch, or use the result of ``select_next_traces``."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None and call.train and chosen.batch is batch and chosen.number == call.number:
            return chosen
        microbatches, weights = split(batch, self.count(call.name, batch), self.splitter)
        is_known = self._traces.is_known(call, microbatches)
        with self._metrics.local_copies(), around(is_known):
            variants = self._traces.choose(call, microbatches)
            is_split = len(variants) > 1
            if is_split and self._unsplit.adopts(call, variants, batch, microbatches, is_returned=share_output):
                microbatches, weights = split(batch, 1, self.splitter)
                variants = self._traces.choose(dataclasses.replace(call, first=self._replica), microbatches)
            log_run = self._log_runs.of(call, batch, variants)
        if not is_known:
            self.unpartitioned.has_recorded()
        return ChosenTraces(batch, call.number, microbatches, weights, variants, log_run)

    def _result(
        self,
        chosen: ChosenTraces,
        outcome: Outcome,
        exchange: StepResultExchange,
        weights: Sequence[float],
        *,
        train: bool,
        appended: AppendedEntries | None,
        side_effects: SideEffectRun | None,
    ) -> StepResult:
        """Exchange the results of the ranks, and join the microbatches."""
        logged, content = exchange.finish(outcome.runs)
        if train and len(chosen.variants) > 1:  # once: later batches log the same keys
            for text in exchange.warnings():
                self._warn(text)
            self.weighting = self.weighting._replace(unexplained=())
        output, loss = join_results(
            self._root, chosen, outcome, content, weights, train=train, appended=appended, side_effects=side_effects
        )
        return StepResult(output, loss, logged)
