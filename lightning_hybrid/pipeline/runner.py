"""The step runner for several pipeline stages: record, cut, schedule, execute, share the results.

Recordings are kept per *signature*: which step, the structure and shapes of the batch, train or eval mode and
requires_grad everywhere. A batch of another length, or a parameter unfrozen mid-run, is another signature.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.collectives.rank_agreement import StepBroken
from lightning_hybrid.pipeline.loss_weights.mixed_objectives import Weighing
from lightning_hybrid.pipeline.loss_weights.recorded_means import LossShares, Shares
from lightning_hybrid.pipeline.microbatch_runner import MicrobatchRunner, StepResult, TrainContext
from lightning_hybrid.pipeline.results.log_capture import LogCapture
from lightning_hybrid.pipeline.results.metric_sync import MetricSync
from lightning_hybrid.pipeline.results.result_exchange import StepSharing
from lightning_hybrid.pipeline.results.step_outputs import check_content, detached, handed_back
from lightning_hybrid.pipeline.runtime.executor import Executor, Job, Outcome, fill_placeholders
from lightning_hybrid.pipeline.runtime.programs import Programs
from lightning_hybrid.pipeline.runtime.step_rollback import StepStart
from lightning_hybrid.pipeline.runtime.transport import Transport
from lightning_hybrid.pipeline.side_effects.appended_entries import AppendedEntries
from lightning_hybrid.pipeline.side_effects.side_effect_run import SideEffectRun
from lightning_hybrid.pipeline.side_effects.unsplit_steps import StepsAtOnce
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.pipeline.stages.trace_cache import Call, Chosen, VariantChoice
from lightning_hybrid.pipeline.unpartitioned_steps import UncutSteps
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch.merge_outputs import join
from lightning_hybrid.step.batch.microbatch import BatchSplitter, copied_batch, sizes_of, split
from lightning_hybrid.step.batch_means.batch_metrics import BatchMetrics
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.recording.kept_values import refuse_absent_numbers
from lightning_hybrid.step.replay.stage_replay import StageRun
from lightning_hybrid.step.tracing.metric_nodes import find_sinks


class StepRunner(MicrobatchRunner):
    """Runs any step of one module on this rank's stages of a pipeline.

    Attributes:
        agree_broken: Whether a training step broke on any replica, given whether it did on this one; None where a step
            that does not do what was recorded ends the run.
        weighs_means: Whether the recorded step takes a mean over another number than the samples, which is seen to.
        weighing: By what microbatches weigh where that is not recorded: in means inside of layers.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: StagePlan,
        transport: Transport,
        group: torch.distributed.ProcessGroup,
        randomness: KeyedRandomness,
        *,
        schedule: str,
        num_microbatches: int | None,
        splitter: BatchSplitter | None,
        replica: int,
        metrics: MetricSync,
        uncut: UncutSteps,
        tell_at_once: Callable[[str, str], None],
    ) -> None:
        """Set up for one module.

        Args:
            root: The user's module.
            plan: Who holds what.
            transport: Carries messages between stages.
            group: This pipeline's ranks.
            randomness: Keys what steps draw.
            schedule: Name of the schedule.
            num_microbatches: The user's; None chooses.
            splitter: The user's.
            replica: Data rank.
            metrics: Of the module.
            uncut: Runs steps of evaluation that cannot be cut.
            tell_at_once: Called once with the name of a step whose batches are not split, and the reason.
        """
        super().__init__(plan, num_microbatches=num_microbatches, splitter=splitter, uncut=uncut)
        self._root = root
        self._group = group
        self._randomness = randomness
        self._replica = replica
        self._metrics = metrics
        self._executor = Executor(root, group.rank(), transport, randomness)
        self._executor.around_units = lambda: self.around_units()
        self._executor.around_step = lambda: self.around_step()
        self._executor.around_backward = self.guards.off
        self._executor.after_forward = lambda: self.settle()
        self._choice = VariantChoice(root, plan, randomness)
        self._loss_shares = LossShares(root, plan, self._choice, randomness)
        self._batch_metrics = BatchMetrics(find_sinks(root), metrics.counted.weigh_means)
        self._transport = transport
        self._programs = Programs(plan, transport, schedule)
        self._at_once = StepsAtOnce(self._choice, tell_at_once)
        self._chosen: Chosen | None = None  # for the training batch that comes next
        self.agree_broken: Callable[[bool], bool] | None = None
        self.weighs_means = False
        self.weighing = Weighing()

    @property
    def may_undo(self) -> bool:
        """Whether a training step may turn out to do something else than what was recorded."""
        return self.agree_broken is not None

    def count(self, name: str, batch: Any) -> int:
        """Number of microbatches."""
        return 1 if name in self._at_once.names else super().count(name, batch)

    @property
    def steps_at_once(self) -> frozenset[str]:
        """Names of steps whose batches are not split into microbatches."""
        return frozenset(self._at_once.names)

    def record(
        self,
        name: str,
        step: Callable[..., Any],
        args: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Record a step on an example batch before the run; the first one decides the cut."""
        batch, *rest = args
        train = name == "training_step"
        call = Call(name, step, rest, context, train=train, modes=self.plan.modes())
        chosen = self._choice_for(call, batch, share_output=False)
        microbatches, weights, variants = chosen.microbatches, chosen.weights, chosen.variants
        self.weighs_means = train and self._loss_shares.weighs(call, variants, batch, microbatches, weights)
        if self.watching_units:
            with contextlib.ExitStack() as watching:
                for watch in self.watching_units:
                    watching.enter_context(watch(variants[0]))
                step_once = partial(call.on, microbatches[0])
                self.plan.record_once(name, step_once, variants[0].recording.units, context, train=train)

    def weights_of_terms(
        self, step: Callable[..., Any], args: Sequence[Any], context: Callable[[], AbstractContextManager[Any]]
    ) -> list[list[float]]:
        """How two parts of a batch may weigh in its training loss; arguments as for ``record``."""
        batch, *rest = args
        parts, weights = split(batch, 2, self.splitter)
        call = Call("training_step", step, rest, context, train=True, modes=self.plan.modes())
        variants = self._choice.choose(call, parts)
        return self._loss_shares.weights_of_terms(call, variants, batch, parts, weights)

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
        by_hand: bool = False,
    ) -> StepResult:
        """Run one step of the user's module on a whole batch; see ``MicrobatchRunner``.

        Raises:
            StepBroken: A training step does something else than what was recorded; nothing of it stays.
        """
        assert not by_hand, "such a step is never cut into stages"
        batch, *rest = args
        first = self._replica * self.count(name, batch)
        call = Call(name, step, rest, context, train is not None, step_number, first, self.plan.modes())
        if name in self.uncut.names:
            return self._run_uncut(call, batch)
        is_weighed = train is not None and (train.weigh is not None or bool(self.weighing.counts))
        try:
            chosen = self._choice_for(call, batch, share_output=share_output)
        except Exception as reason:  # what is wrong with the step itself shows when it runs whole
            if train is not None:
                raise
            self.uncut.adopt(name, reason)
            return self._run_uncut(call, batch)
        microbatches, weights, variants = chosen.microbatches, chosen.weights, chosen.variants
        count = len(microbatches)
        first = self._replica * count
        call = dataclasses.replace(call, first=first)
        if train is not None and train.weigh is not None:
            weights = train.weigh(microbatches)
        elif is_weighed:
            weights = self.weighing.of(microbatches, weights)
        if train is None and self._loss_shares.are_incomparable(variants):
            # Such means have no common weights; evaluation needs no backward, so it runs on whole batches from now on.
            self._at_once.names.add(name)
            return self.run(name, step, args, step_number=step_number, context=context, share_output=share_output)
        logs, total = LogCapture(count, self._executor.has_guessed_size), sum(weights) or 1.0

        def around(index: int, run: Callable[[], StageRun]) -> StageRun:
            keyed = self._randomness.microbatch(step_number, first + index)
            weighed = self._metrics.counted.microbatch(weights[index] / total)
            with context(), keyed, logs.microbatch(self._root, index), weighed:
                return run()

        shares: Shares = ()
        if not is_weighed:
            with self._metrics.copied_alone():
                shares = self._loss_shares.of(call, variants, batch, microbatches, weights)
        steps = [self._choice.runs_on(call, microbatch, len(self.plan.stages)) for microbatch in microbatches]
        sharing = StepSharing(
            self._group,
            self._randomness.device,
            variants,
            logs,
            weights,
            batch,
            share_output=share_output,
            train=train is not None,
            metrics=self._batch_metrics,
            by_samples=(self.weighing.keys, chosen.weights),
        )
        self._batch_metrics.begin(len(variants))
        more: dict[str, Any] = {}
        if self._transport.channel == "tags":  # otherwise a collective must not stand between transfers
            more["after_forwards"] = lambda runs, is_broken: sharing.begin(runs, is_broken=is_broken)
        if train is not None:
            more |= {"seeds": [train.seed_factor * weight for weight in weights], "reduce": train.reduce}
            more |= {"before_backward": train.before_backward, "after_backward": train.after_backward}
        start = None
        if train is not None and self.agree_broken is not None:
            start = StepStart(self._root, frozenset[str]().union(*(variant.written for variant in variants)))
        job = Job(
            program=self._programs.of(variants, train=train is not None),
            variants=variants,
            steps=steps,
            around=around,
            parameters=self.plan.names(),
            repeated_buffers=self.plan.repeated_buffers(),
            shares=shares,
            metrics=self._batch_metrics if len(variants) > 1 else None,
            may_break=start is not None and not self._choice.writes_batch(name),
            **more,
        )
        appended = AppendedEntries(self._root) if count > 1 else None
        side_effects = None
        if count == 1 and variants[0].recording.numbers_kept:
            again = copied_batch(batch) if self._choice.writes_batch(name) else batch
            side_effects = SideEffectRun(self._root, self.plan.names(), call, again, variants[0], self._randomness)
        grad = torch.set_grad_enabled(train is not None or torch.is_grad_enabled())
        with self._randomness.isolated(), grad, self._metrics.step():
            outcome = self._executor.run(job)
        self._meet(sharing, outcome, start)
        for variant in dict.fromkeys(variants):
            self._metrics.note_homes(variant.assignment.sinks, self.plan.num_ranks)
        result = self._result(
            chosen, outcome, sharing, weights, train=train is not None, appended=appended, side_effects=side_effects
        )
        self._batch_metrics.begin(0)
        self.plan.share_buffers(variants)
        self.uncut.others_are_old = True
        return result

    def _meet(self, sharing: StepSharing, outcome: Outcome, start: StepStart | None) -> None:
        """Wait for what the other ranks have; if the step broke on one, leave it on all."""
        is_broken = outcome.broken is not None
        try:
            sharing.meet(outcome.runs, is_broken=is_broken)
        except StepBroken:
            is_broken = True
        if start is None or self.agree_broken is None or not self.agree_broken(is_broken):
            return
        start.restore("does something else than what was recorded")
        self._batch_metrics.begin(0)
        raise StepBroken(outcome.broken)

    def _run_uncut(self, call: Call, batch: Any) -> StepResult:
        call = dataclasses.replace(call, first=self._replica)  # one batch, one draw
        if self.uncut.others_are_old:
            self._metrics.share_all()
        with self._metrics.step():
            output, logged = self.uncut.run(call, batch)
        return StepResult(output, None, logged, [])

    def foresee(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        *,
        step_number: int,
        context: Callable[[], AbstractContextManager[Any]],
        share_output: bool,
        around: Callable[[bool], AbstractContextManager[Any]],
    ) -> None:
        """Choose the recorded forms of the training batch that comes next, so that its step can run.

        Args:
            step: The user's bound ``training_step``.
            args: Its arguments, the batch first.
            step_number: As for ``run``.
            context: As for ``run``.
            share_output: As for ``run``.
            around: Entered meanwhile, given whether the forms are known; otherwise code of the user's runs inside.

        Raises:
            StepError: The step cannot be recorded.
            PartitionError: It cannot be cut, or not the way the first step was.
        """
        batch, *rest = args
        first = self._replica * self.count("training_step", batch)
        call = Call("training_step", step, rest, context, True, step_number, first, self.plan.modes())
        self._chosen = None
        self._chosen = self._choice_for(call, batch, share_output=share_output, around=around)

    def _choice_for(
        self,
        call: Call,
        batch: Any,
        *,
        share_output: bool,
        around: Callable[[bool], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Chosen:
        chosen, self._chosen = self._chosen, None
        if chosen is not None and call.train and chosen.batch is batch and chosen.number == call.number:
            return chosen
        microbatches, weights = split(batch, self.count(call.name, batch), self.splitter)
        with self._metrics.copied_alone(), around(self._choice.is_known(call, microbatches)):
            variants = self._choice.choose(call, microbatches)
            is_split = len(variants) > 1
            if is_split and self._at_once.adopts(call, variants, batch, microbatches, is_returned=share_output):
                microbatches, weights = split(batch, 1, self.splitter)
                variants = self._choice.choose(dataclasses.replace(call, first=self._replica), microbatches)
        return Chosen(batch, call.number, microbatches, weights, variants)

    def _result(
        self,
        chosen: Chosen,
        outcome: Outcome,
        sharing: StepSharing,
        weights: Sequence[float],
        *,
        train: bool,
        appended: AppendedEntries | None,
        side_effects: SideEffectRun | None,
    ) -> StepResult:
        """Share what the ranks know, fill what is absent, and join the microbatches."""
        variants, microbatches = chosen.variants, chosen.microbatches
        runs = [outcome.runs[index] for index in range(len(variants))]
        logged, content = sharing.finish(outcome.runs, self.plan.num_ranks)
        outputs = []
        for run, values in zip(runs, content, strict=True):
            fill_placeholders(run, values)
            if not train or not isinstance(run.result, Tensor):  # a bare loss is joined below
                outputs.append(map_leaves(detached, run.result))
        loss = None
        if train:
            parts = [values[variant.loss] for values, variant in zip(content, variants, strict=True)]
            total = sum(float(part) * weight for part, weight in zip(parts, weights, strict=True))
            loss = parts[0].new_tensor(total)
        name = variants[0].recording.graph.step
        sizes = sizes_of(microbatches)
        output = join(outputs, weights, sizes, step=name) if outputs else None
        if side_effects is not None:
            with torch.set_grad_enabled(train or torch.is_grad_enabled()):
                output = map_leaves(detached, side_effects.returned(content[0]))
        if appended is not None:
            appended.put(appended.evenly(len(variants), content), weights, sizes)
        if not outputs:
            output = loss
        check_content(name, output)
        if read_at := next((run.numbers_read for run in runs if run.numbers_read), ""):
            refuse_absent_numbers(self._root, [variant.recording for variant in variants], read_at)
        output = handed_back(chosen.batch, microbatches, [run.result for run in runs], output)
        return StepResult(output, loss, logged, outcome.spans)
