"""Microbatches of training steps: how they weigh in the loss, and how many fit into memory.

Microbatches of steps without a recording are compared with their batch, until their weights are known. A step that runs
out of memory runs again with twice as many of them, where the run can repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.batch.split import batch_size_of
from lightning_hybrid.errors import RankOutOfMemory, StepError, add_error_note, is_out_of_memory
from lightning_hybrid.pipeline.plain import PlainRunner
from lightning_hybrid.pipeline.runner import MicrobatchRunner, StepResult
from lightning_hybrid.pipeline.runtime.rollback import StepSnapshot
from lightning_hybrid.run.execution.guard import MemoryGuard, searches_batch_size
from lightning_hybrid.run.execution.steps import Attempt, StepExecution, StepPolicy
from lightning_hybrid.run.setting import Setting
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.strategies.start.callbacks import why_ranks_cannot_stop_together


class WeightedMicrobatches(StepPolicy):
    """Compares full batches with their microbatches, or with shares of them, in the batches that can show weights."""

    def __init__(self, execution: StepExecution, fit: FittingMicrobatches | None) -> None:
        """Set up on the execution of steps; a comparison that does not fit into memory is retried by ``fit``."""
        self._execution, self._fit = execution, fit
        self._before: list[float] | None = None  # sums of the parameters before the step; None: all are in files
        self._compares_after = False

    def before(self, attempt: Attempt) -> None:
        """Compare microbatches, or let the step run on the full batch to be compared with shares of it."""
        run, setting = self._execution.run, self._execution.setting
        runner, self._compares_after = run.plain_runner, False
        if runner is None:
            return
        if setting.checks_objective:
            runner.request_weighting_check(attempt.args[0])
        if not runner.needs_weighting_check:
            return
        if not runner.can_share_batches:
            self._decide(runner, attempt, is_written=False)
            return
        in_files = bool(run.active.regions)  # of which little may be in memory
        self._compares_after, self._before = True, None if in_files else _parameter_sums(setting.module)

    def after(self, attempt: Attempt) -> None:
        """Compare the full batch that has run with shares of it."""
        if self._compares_after and (runner := self._execution.run.plain_runner) is not None:
            before = self._before
            is_written = before is None or _parameter_sums(self._execution.setting.module) != before
            self._decide(runner, attempt, is_written=is_written)

    def _decide(self, runner: PlainRunner, attempt: Attempt, *, is_written: bool) -> None:
        setting, run, fit = self._execution.setting, self._execution.run, self._fit

        def decide(*, has_room: bool = True) -> None:
            with setting.contexts.training_step_hook(), run.gathered():
                compares = setting.checks_objective
                runner.decide(attempt.call, compares=compares, is_written=is_written, has_room=has_room)

        if fit is None:
            decide()
            return
        try:
            fit.guard(decide)
        except RankOutOfMemory:
            if runner.can_share_batches or fit.can_double(runner, attempt.args[0]):
                raise
            from lightning_hybrid.pipeline.measure import describe_uncompared

            self._execution.abandon()
            fit.guard(partial(decide, has_room=False))  # a microbatch of one sample may fit where two samples do not
            rank_zero_warn(describe_uncompared())


class FittingMicrobatches(StepPolicy):
    """Runs training steps, and doubles the number of microbatches where a step does not fit into memory.

    Attributes:
        is_guarding: Whether the present step is undone on all ranks if one runs out of memory.
    """

    def __init__(self, setting: Setting, guard: MemoryGuard) -> None:
        """Prepare for one run; all ranks do so together."""
        self._setting, self._guard = setting, guard
        self.is_guarding = False
        self._largest = 0.0  # elements of the largest microbatch that has fit on all ranks
        self._left = 0  # guarded steps that microbatches of this size must still pass
        self._size = 0.0  # of the present step, on the rank where it is largest
        self._has_doubled = self._has_written = False

    def guards(self, runner: MicrobatchRunner, batch: Any) -> bool:
        """Decide whether the step on ``batch`` is guarded, and return it; collective, on the host."""
        tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]
        local = sum(tensor.numel() for tensor in tensors) / runner.count("training_step", batch)
        self._size = self._guard.largest(local)
        if self._size > self._largest:
            self._largest, self._left = self._size, self._setting.trainer.accumulate_grad_batches + 1
        self.is_guarding = self._left > 0
        runner.raise_in_comparisons(is_out_of_memory)
        return self.is_guarding

    def explain(self, error: BaseException) -> None:
        """Note on an error that ends the fit why no training step has run again."""
        if isinstance(error, RankOutOfMemory) or not is_out_of_memory(error):
            return
        note = (
            'microbatch="auto" fits forwards and backwards of training steps into memory, and memory has run out in the'
            " optimizer's step, in a hook, or in a step of a size that has fit before: use less memory"
            f' ({_EXPLAINED}): zero_stage=1 or more, offload="cpu", or a larger num_microbatches'
        )
        if self._setting.trainer.evaluating:
            note = (
                'microbatch="auto" fits training steps into memory, and memory has run out in evaluation: set a smaller'
                f" batch_size in its loader ({_EXPLAINED})"
            )
        add_error_note(error, note)

    def around(self, attempt: Attempt, run: Callable[[], StepResult]) -> Callable[[], StepResult]:
        """The function that runs the step, guarded if it is to be."""
        return partial(self._run, attempt.runner, run) if self.is_guarding or self._has_doubled else run

    def _run(self, runner: MicrobatchRunner, run: Callable[[], StepResult]) -> StepResult:
        """Run the step, guarded if it is to be.

        Raises:
            RankOutOfMemory: It ran out of memory on some rank; on all of them its effects on modules are undone.
            StepError: Microbatches would train another objective than the full batch.
        """
        if self._has_doubled and isinstance(runner, PlainRunner) and runner.mixes_samples:
            raise StepError(
                'microbatch="auto": a training step does not fit into memory, and the loss of its batch is not the mean'
                " over microbatches, which would train another objective; set a smaller batch_size, or pass"
                " microbatch_weight=function(microbatch) -> its weight, which accepts that objective",
                entry="microbatch-mixes",
            )
        if not self.is_guarding:
            return run()
        module = self._setting.module
        snapshot, before = StepSnapshot(module), _parameter_sums(module)
        try:
            result = self._guard.run(run)
        except RankOutOfMemory:
            snapshot.restore("does not fit into memory")
            self._has_written = _parameter_sums(module) != before
            raise
        if self._size >= self._largest and self._setting.trainer.global_step > 0:
            self._left -= 1
        return result

    def guard(self, compare: Callable[[], None]) -> None:
        """Compare microbatches before a step, to find their weights: two of them, without their activations.

        Raises:
            RankOutOfMemory: That ran out of memory on some rank.
        """
        self._has_written = False
        self._guard.run(compare)

    def before_effects(self) -> None:
        """Wait in a guarded step for all ranks, before effects that cannot be undone."""
        self._guard.meet()

    def can_double(self, runner: MicrobatchRunner, batch: Any) -> bool:
        """Return whether a microbatch has several samples on any rank; collective, on the host."""
        return self._largest_microbatch(runner, batch) > 1

    def _largest_microbatch(self, runner: MicrobatchRunner, batch: Any) -> int:
        """Samples of the largest microbatch on any rank; 1 where its batch has no known size."""
        count, size = runner.count("training_step", batch), batch_size_of(batch)
        return int(self._guard.largest(1 if size is None else ceil(size / count)))

    def recovers(self, attempt: Attempt, error: Exception) -> bool:
        """Double the number of microbatches after a step that did not fit; collective, on the host.

        Raises:
            RankOutOfMemory: The batch cannot be split further, or the step cannot run again.
        """
        if not isinstance(error, RankOutOfMemory):
            return False
        runner, batch, reason, guard = attempt.runner, attempt.args[0], str(error), self._guard
        if guard.any_rank(self._has_written):
            raise RankOutOfMemory(
                f"{reason}; the step cannot run again in smaller microbatches, as training_step writes parameters; set"
                " num_microbatches, or a smaller batch_size",
                entry="rank-out-of-memory",
            )
        if isinstance(runner, PlainRunner) and runner.can_share_batches and not runner.runs_shares:
            raise RankOutOfMemory(
                f"{reason}; ranks that hold shards instead of stages or cut layers run their first batch unsplit, on"
                " each rank, to see whether it changes modules; set a smaller batch_size, or leave the parallel sizes"
                " out: replicas with zero_stage=3 split it",
                entry="rank-out-of-memory",
            )
        now, largest = int(guard.largest(runner.count("training_step", batch))), self._largest_microbatch(runner, batch)
        if largest > 1:
            runner.use_microbatches(2 * now)
            self._largest = 0.0  # halves may not fit either
        if int(guard.largest(runner.count("training_step", batch))) <= now:
            is_split = largest == 1 and batch_size_of(batch) is not None
            why = "a microbatch is one sample" if is_split else "the batch cannot be split"
            raise RankOutOfMemory(
                f"{reason}; {why}, with {now} microbatches: use less memory"
                ': recompute="full", zero_stage=3, offload="cpu"',
                entry="rank-out-of-memory",
            )
        self._has_doubled = True
        if isinstance(runner, PlainRunner):
            runner.compare_next_batch()  # counts of tokens by which microbatches weigh
        rank_zero_warn(
            f'microbatch="auto": {reason}. The step runs again with {2 * now} microbatches of at most'
            f" {ceil(largest / 2)} samples, as later ones will; num_microbatches={2 * now} begins with that number"
        )
        return True


def _parameter_sums(module: nn.Module) -> list[float]:
    """Return sums that show whether this rank's shards of parameters have changed."""
    with torch.no_grad():
        local = [parameter.detach() for parameter in module.parameters() if not is_absent(parameter)]
        return [float(torch.nan_to_num(tensor.double()).sum()) for tensor in local if not tensor.is_complex()]


_EXPLAINED = "lightning-hybrid explain-error rank-out-of-memory"


def batch_norms_in_training(module: nn.Module) -> list[str]:
    """Return the FQNs of BatchNorm layers that take statistics of what they are given, a microbatch."""
    return [name for name, each in module.named_modules() if isinstance(each, _BatchNorm) and each.training]


def check_microbatch_option(setting: Setting) -> None:
    """Refuse options and modules with which a training step cannot run again in more microbatches."""
    reason = _why_not(setting) or why_ranks_cannot_stop_together(setting.trainer, setting.world.mesh)
    if reason:
        raise ValueError(
            'microbatch="auto" runs a training step again in more microbatches if it does not fit into memory, and'
            f" {reason}; leave microbatch out, and set num_microbatches"
        )


def _why_not(setting: Setting) -> str:
    options, module = setting.options, setting.module
    norms = batch_norms_in_training(module)
    if setting.is_manual:
        return "with manual optimization training_step may have stepped an optimizer by then"
    if norms:
        return f"{norms[0]} and {len(norms) - 1} other BatchNorm layers take statistics of each microbatch"
    if options.batch_splitter is not None:
        return "batch_splitter makes microbatches whose sizes are not known"
    if options.optimizer_in_backward:
        return "optimizer_in_backward=True steps parameters in its backward"
    if options.verify_first_step:
        return "verify_first_step=True compares a first step of which the full batch fits"
    if searches_batch_size(setting.trainer):
        return "BatchSizeFinder tries batches that do not fit in one microbatch: use one of the two"
    return ""
