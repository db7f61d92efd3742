"""The step runner for one pipeline stage: plain Python on real values, microbatch by microbatch.

Nothing is recorded or replayed: a step may branch on values, change from batch to batch, and read any value. Sharding
of a layer (parameters, sequence positions, experts) and its recomputation are part of the layer's forward. A batch is
split into microbatches, each of which runs forward and backward before the next one; gradients add up.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.batch.split import batch_size_of, check_count, copied_batch, halves, split, why_unsplit
from lightning_hybrid.collectives.agreement import Digest
from lightning_hybrid.errors import HybridError, StepError
from lightning_hybrid.pipeline.kept import AppendedEntries, ModuleChanges
from lightning_hybrid.pipeline.left import LeftValues
from lightning_hybrid.pipeline.logs import describe_undecided, describe_unexplained
from lightning_hybrid.pipeline.means import LossWeightFinder
from lightning_hybrid.pipeline.measure import Comparison, LossWeighting, agree_on_weighting
from lightning_hybrid.pipeline.runner import MicrobatchRunner, StepResult
from lightning_hybrid.pipeline.runtime.gradients import ParameterGradients
from lightning_hybrid.pipeline.runtime.rollback import StepSnapshot
from lightning_hybrid.pipeline.shares import (
    CHANGES_MODULES,
    RUNS_OTHER_LINES,
    BatchShare,
    BatchSharing,
    MicrobatchLoop,
    MicrobatchResults,
)
from lightning_hybrid.pipeline.stages.plan import TraceVariant
from lightning_hybrid.pipeline.stages.recording import record_variant
from lightning_hybrid.pipeline.stages.traces import Call
from lightning_hybrid.pipeline.stages.training import Backwards, StepUndone
from lightning_hybrid.pipeline.unpartitioned import PlainStepRandomness
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.record import Recipe
from lightning_hybrid.step.recording.units import choose_units
from lightning_hybrid.step.standins.kernels import slow_attention
from lightning_hybrid.step.standins.numbers import GUESSES
from lightning_hybrid.step.tracing.compiled import EagerSwitch, compiled_wrappers, has_compiled_methods
from lightning_hybrid.step.tracing.mode import failed_line

_MAX_SMALL = 3  # after so many batches that cannot be split, shares are given up


class PlainRunner(MicrobatchRunner):
    """Runs any step of one module whose layers are all on this rank, in full or sharded.

    Attributes:
        needs_weighting_check: Whether a training batch must still be compared with its shares.
        recording_error: Why the step could not be recorded before the run, whatever its branches; None if it was.
        shared_last_batch: Whether the last training step ran on shares of its batch.
        stores_rows_of_samples: Whether training steps have stored tensors on modules that may have a row per sample.
    """

    def __init__(
        self,
        *args: Any,
        shares: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        replica_size: int,
        inform: Callable[[str], None],
        **how: Any,
    ) -> None:
        """Prepare to run steps; other arguments as for ``MicrobatchRunner``, with a plan of one stage.

        ``replica_size`` is the number of ranks that receive the same batch.
        """
        super().__init__(*args, **how)
        root = self._root
        self.stores_rows_of_samples = self.shared_last_batch = False
        self.recording_error: Exception | None = None
        layers = find_layers(choose_units(root, 1))
        self._uncompiled, self._compiled_around = EagerSwitch(), bool(compiled_wrappers(root, layers.values()))
        self._compiled_methods = has_compiled_methods(root)
        self._sharing, self._replica_size = BatchSharing(shares, everyone), replica_size
        self._leaves_changes: bool | None = None  # whether steps change modules by their batch; None until compared
        self._first_changes: ModuleChanges | None = None  # by the first training batch
        self._calls = set[int]()  # lines of code that training steps ran when their batches were compared
        self._num_small = 0  # batches that could not be compared with their shares
        self._weighting = LossWeightFinder(self.splitter, inform)
        self._scales_gradients: bool | None = None  # as for ``MicrobatchLoop``
        self._has_backward_code: bool | None = None  # whether code of the user runs in backwards; None if not known
        self._is_stopped = False  # after the first forward of a step
        self.needs_weighting_check = True
        self._draws = PlainStepRandomness(root, self._randomness, self.guards)

    @property
    def mixes_samples(self) -> bool:
        """Whether no weights of microbatches are known to give the loss of the batch, the same on all ranks."""
        return self._weighting.now.mixes

    @property
    def unsplit_step_names(self) -> frozenset[str]:
        """Names of steps whose batches are not split into microbatches, so far."""
        return frozenset({"training_step"} if self.mixes_samples else ())

    def gather_outputs(self, may_be_sharded: bool) -> None:
        """Gather the outputs of layers at the end of a step, if they may be sharded."""
        self.gathers_outputs = may_be_sharded

    @property
    def can_share_batches(self) -> bool:
        """Whether there are ranks to share batches with."""
        return self._sharing.size > 1

    @property
    def runs_shares(self) -> bool:
        """Whether training steps run on shares of a batch: only once a step is known to leave its modules unchanged."""
        return self.can_share_batches and self._leaves_changes is False

    @property
    def can_roll_back_step(self) -> bool:
        """Whether a training step may be rolled back, since it changes modules by its share of the batch."""
        return self.runs_shares

    def record(self, call: Call) -> None:
        """Record the step for the observers of units, with guesses for its branches; errors leave layers unsharded."""
        if isinstance(variant := self._record_with_guesses(call), Exception):
            is_known = isinstance(variant, HybridError) or not call.is_manual
            self.recording_error = variant if is_known else _without_gradients(variant)
            return
        with contextlib.ExitStack() as watching:
            for watch in self._unit_observers:
                watching.enter_context(watch(variant))
            recipe = self._recipe(call)
            for guesses in GUESSES:
                with contextlib.suppress(Exception):
                    again = dataclasses.replace(recipe, units=variant.recording.units, guesses=guesses).record()
                    if not again.has_guesses:
                        break  # others would be equal

    def why_not_recordable(self, call: Call) -> Exception | None:
        """Why the step cannot be recorded, whatever its branches."""
        variant = self._record_with_guesses(call)
        return variant if isinstance(variant, Exception) else None

    def _recipe(self, call: Call) -> Recipe:
        """How to record the step on the first microbatch."""
        first = split(call.batch, self.count(call.name, call.batch), self.splitter)[0][0]

        def once() -> Any:
            return call.on(copied_batch(first))()  # a step may write into its batch

        return self.plan.recipe(call.name, once, context=call.context)

    def _record_with_guesses(self, call: Call) -> TraceVariant | Exception:
        """Record the step with the first guesses that work; the last error if none do."""
        found: TraceVariant | Exception
        recipe = self._recipe(call)
        for guesses in GUESSES:
            try:
                return record_variant(self.plan, dataclasses.replace(recipe, guesses=guesses))
            except Exception as error:
                found = error
        return found

    def count(self, name: str, batch: Any) -> int:
        """Number of microbatches: steps without a backward run on the full batch, as do objectives that mix samples."""
        if name != "training_step" or self.mixes_samples:
            return 1
        if name not in self._full:
            check_count(batch, self._num_microbatches)
            if (self._num_microbatches or 1) > 1 and (reason := why_unsplit(batch, self.splitter)):
                self._full[name] = 1, 1
                self._warn(
                    f"num_microbatches={self._num_microbatches}, but the batch cannot be split: {reason}; it runs"
                    " unsplit. Pass batch_splitter=function(batch, count) -> list of batches"
                )
        return super().count(name, batch)

    def run_full_batches(self) -> None:
        """Let ranks that could share batches run all of them in full."""
        if self._sharing.size > 1:
            self._leaves_changes, self.needs_weighting_check = True, False

    def num_backwards(self, batch: Any) -> int:
        """Backwards of a training step on this rank."""
        if self._sharing.size > 1 and not self.runs_shares:
            return 1
        return self._sharing.count(batch, self.count("training_step", batch), self.splitter) or 1

    def run(self, call: Call) -> StepResult:
        """Run one step of the user's module on a full batch; ``StepUndone`` if it must run in another way."""
        backwards, root = call.backwards, self._root
        share = self._batch_share(call)
        weights, loss_weights, seeds = _weights(share, backwards)
        appended = AppendedEntries(root) if call.trains and share.total > 1 else None
        is_compared = backwards.are_run and self._sharing.size > 1 and not self._leaves_changes
        given = call.batch, share.microbatches  # which have version counters of their own
        changes = ModuleChanges(root, given, by_content=self.needs_weighting_check) if is_compared else None
        runs_share = backwards.are_run and self.runs_shares
        if call.trains:
            self.shared_last_batch = runs_share
        may_stop = backwards.are_run and self._has_backward_code is None and share.is_complete
        snapshot = StepSnapshot(root, batches=given) if runs_share or may_stop else None
        first = self._replica * share.total + share.first
        keyed = partial(self._draws.keyed, call.name, call.number, first)
        with (
            contextlib.closing(ParameterGradients(root, share.is_complete and backwards.are_run)) as gradients,
            contextlib.nullcontext() if call.is_manual else self._randomness.isolated(),
            torch.set_grad_enabled(call.trains or torch.is_grad_enabled()),
            self._metrics.step(),
            self._layers(),
        ):
            loop = MicrobatchLoop(self, call, share, gradients, self._metrics.calls, appended, self._scales_gradients)
            # Now, since the step may write into it.
            batch = Digest(flatten(call.batch)[0] if self._replica_size > 1 else (), loop.logs.reads)
            loop.run(
                seeds, _unkeyed if call.is_manual else keyed, self._learns(share, backwards), traces_calls=is_compared
            )
        self._scales_gradients = loop.scales_gradients
        if self._is_stopped:
            self._is_stopped, self.needs_weighting_check = False, True
            _undo(snapshot, gradients, "has code in its backward, and is compared with its batch")
        has_other_outputs = not all(isinstance(output, Tensor) for output in loop.outputs)
        is_read = call.is_manual or (call.shares_output and has_other_outputs)
        if call.trains and not is_read and self._sharing.size > 1:
            loop.forget_outputs()
        results = loop.results(weights, loss_weights, self._weighting.now.keys)
        results = self._exchange(results, share, changes, loop.calls)
        if runs_share and not self.runs_shares:  # the results are those of a share
            _undo(snapshot, gradients, "does something new, and would run on full batches")
        with call.context():  # metrics see the precision of the step
            self._metrics.finish(results.call_metrics)
        for name in self._weighting.watch(results.entries) if backwards.are_run else ():
            self._warn(describe_undecided(name))
        if appended is not None:
            losses, loss_weights = results.losses, results.loss_weights
            appended.put(results.appended, results.weights, results.sizes, losses, loss_weights, results.batch)
        loss = _as_tensor(results.loss, loop.losses)
        output = results.joined_output(call.name) if loop.outputs else loss
        return StepResult(output, loss, results.logs(), digest=batch.number())

    def _learns(self, share: BatchShare, backwards: Backwards) -> Callable[[bool], bool] | None:
        """A function that learns from the first microbatch whether code of the user runs in backwards; None if known.

        It returns whether the step must stop there: it is compared with its batch before it runs.
        """
        is_known = self._has_backward_code is not None or (self._sharing.size == 1 and not share.is_complete)
        if not backwards.are_run or is_known:
            return None

        def learn(has_code: bool) -> bool:
            self._has_backward_code = bool(self._largest(int(has_code)))
            self._is_stopped = self._has_backward_code and share.is_complete and not backwards.weighs
            return self._is_stopped

        return learn

    def _exchange(
        self, results: MicrobatchResults, share: BatchShare, changes: ModuleChanges | None, calls: set[int]
    ) -> MicrobatchResults:
        """Gather the results of all shares of a batch, and learn what the step has changed on the modules."""
        results = dataclasses.replace(
            results,
            metric_calls=self._metrics.calls.calls,
            reductions=dict((*self._weighting.now.nearest, *self._weighting.now.reductions)),
        )
        if changes is not None:
            news = CHANGES_MODULES if changes.something() else RUNS_OTHER_LINES if calls - self._calls else 0
            results = dataclasses.replace(results, calls=frozenset(calls), news=news)
        if share.ranks > 1:
            results = self._sharing.gather(results)
        if self.needs_weighting_check:
            self._first_changes, self._calls = changes, self._calls | calls
        elif changes is not None:
            is_gathered = share.ranks > 1 and self._sharing.are_all
            self._learn(results.news if is_gathered else self._sharing.max_over_ranks(results.news))
        return results

    def compare_next_batch(self) -> None:
        """Compare the next batch with its microbatches: these have another size now."""
        self.needs_weighting_check = True

    def recheck_weighting(self) -> None:
        """Compare the next batch with its shares again: the weights of loss terms may depend on the step number."""
        if self.runs_shares:
            self._leaves_changes, self.needs_weighting_check = None, True

    def forget_recording(self) -> None:
        """Drop why the step could not be recorded: its frames refer to tensors of the recording."""
        self.recording_error = None

    def _learn(self, news: int) -> None:
        """Adopt the changes that any rank has found after a training batch: the next one may have to run unsplit."""
        if news == CHANGES_MODULES:
            self._leaves_changes = True
        elif news == RUNS_OTHER_LINES:
            self._leaves_changes, self.needs_weighting_check = None, True

    def decide(self, call: Call, *, compares: bool, is_written: bool, has_room: bool = True) -> None:
        """Compare a training batch with its shares, to find their weights in its loss.

        Ranks that could share batches have run it in full. Where its loss is no mean over shares, or the step has
        changed its modules by the batch or has written parameters (``is_written``), each rank runs all batches. With
        microbatches, the batch has not run yet. Without ``compares`` the loss is assumed to be a mean over shares;
        without ``has_room`` there is no memory for the gradients of two microbatches.
        """
        self.needs_weighting_check, changes = False, self._first_changes
        batch = call.batch
        count = self.count("training_step", batch)
        if changes is not None:
            self.stores_rows_of_samples = changes.rows(batch_size_of(batch))
            self._leaves_changes = self._sharing.any_rank(is_written or changes.something())
            count *= self._sharing.size
        elif self.splitter is None and (self._num_microbatches or 1) > 1:
            batch, count = self._weighting.two_parts(batch, count), min(count, 2)  # as much as memory has room for
        else:
            return
        if self._leaves_changes or not compares:
            return
        size = batch_size_of(batch)
        is_small = count < 2 or (self.splitter is None and (size is None or size < count))
        if self._sharing.any_rank(is_small or is_written):  # layers may be gathered from replicas
            if changes is not None:  # another batch may be larger
                self._num_small += 1
                self.needs_weighting_check = self._num_small < _MAX_SMALL
                self._leaves_changes = None if self.needs_weighting_check else True
            return

        self.is_comparing = True
        try:
            measured = self._measured(dataclasses.replace(call, batch=batch), count, has_room=has_room)
        finally:
            self.is_comparing = False
        found = agree_on_weighting(self._sharing.everyone, measured)
        if changes is not None:
            self._leaves_changes = found.mixes
        self._weighting.learn(found, batch, count)
        if found.scales_gradients is not None:
            self._scales_gradients = found.scales_gradients
        self._warn_of(found)

    def _warn_of(self, found: LossWeighting) -> None:
        """Warn that batches are not split, or else of logged numbers that hold for microbatches only."""
        if why := found.why_unsplit():
            self._warn(why)
            return
        for key, full, made, how in found.unexplained:
            if key[0] not in self.declared:
                self.declared[key[0]] = describe_unexplained("training_step", key, full, made, how)
                self._warn(self.declared[key[0]])

    def _measured(self, call: Call, count: int, *, has_room: bool) -> LossWeighting:
        """Measure how the parts of a batch weigh in its loss and gradients; arguments as for ``decide``."""

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with self.active.around_step(), call.context():
                yield

        def once(part: Any) -> Any:
            return call.on(part)()

        batch = call.batch
        # Layers would be compiled for that alone, and autograd functions inside of them would not be seen.
        with self._metrics.step(), self._layers(), torch.compiler.set_stance("force_eager"):
            how = self._largest, self._is_fatal, self.guards.off, self._metrics.calls
            left = LeftValues(self._root, reads_output=call.shares_output)
            comparison = Comparison(self._root, once, self._randomness, around, *how, left)
            found = comparison.measure(batch, count, self.splitter)
            if has_room:
                found = comparison.with_gradients(
                    found,
                    halves(batch, count, self.splitter),
                    is_nonlinear=bool(self._has_backward_code),
                    calls_hooks=self._sharing.size > 1,
                )
            self.active.settle()  # what follows is collective, and other ranks may still gather layers
        return found

    def _largest(self, number: int) -> int:
        """The largest number of all ranks inside of a step; collective."""
        self.active.settle()  # other ranks may still gather layers of their forwards
        return self._sharing.max_over_ranks(number)

    def request_weighting_check(self, batch: Any) -> None:
        """Request a comparison of the next training batch if it can show the weights of its shares; collective."""
        is_alone = self._sharing.size == 1
        if (is_alone and (self.splitter is not None or (self._num_microbatches or 1) < 2)) or self._leaves_changes:
            return
        now = self._weighting.now  # the same on all ranks
        if not now.mixes and (len(now.counts) != 1 or now.undecided) and not self.needs_weighting_check:
            count = self.count("training_step", batch) * self._sharing.size
            if self._sharing.any_rank(self._weighting.is_open(batch, count)):
                self._leaves_changes, self.needs_weighting_check = None, True

    def _batch_share(self, call: Call) -> BatchShare:
        count = 1 if call.is_manual else self.count(call.name, call.batch)
        if not call.trains:
            parts, weights = split(call.batch, count, self.splitter)
            return BatchShare(parts, weights, weights, total=count)
        # With manual optimization, the number of optimizer steps may be that of the samples, and random numbers are
        # those of single-process training.
        if call.is_manual or (self._sharing.size > 1 and not self.runs_shares):
            return BatchShare([call.batch], [1.0], [1.0])
        return self._sharing.of(call.batch, count, self.splitter, self._weighting.now)

    @contextlib.contextmanager
    def _layers(self) -> Iterator[None]:
        """Run layers sharded inside; modules and methods that the user compiled around them run uncompiled."""
        with self.active.running(), slow_attention():
            if not self._compiled_around and not (self.active.replaces_layers and self._compiled_methods):
                yield
                return
            self._uncompiled.on()
            try:
                yield
            finally:
                self._uncompiled.off()


def _without_gradients(error: Exception) -> StepError:
    """The error of a step that calls backwards and optimizers itself, where it was recorded."""
    found = StepError(
        f"{failed_line(error)}: {type(error).__name__}: {error}. The step of manual optimization is recorded once,"
        " without gradients and without states of optimizers, to find its layers; there, where p.grad is None, leave"
        " out what reads them",
        entry="manual-recording",
    )
    found.__cause__ = error
    return found


def _unkeyed(index: int) -> AbstractContextManager[None]:
    """The context in which a microbatch draws from the generators as they are."""
    return contextlib.nullcontext()


def _undo(snapshot: StepSnapshot | None, gradients: ParameterGradients, why: str) -> NoReturn:
    """Roll a step back."""
    assert snapshot is not None
    gradients.registered.remove()
    snapshot.restore(why)
    raise StepUndone(why)


def _weights(share: BatchShare, backwards: Backwards) -> tuple[list[float], list[float], list[float]]:
    """The weights of microbatches by samples, in the loss, and with which backwards start."""
    if not backwards.weighs:
        return list(share.weights), list(share.loss_weights), [share.ranks * weight for weight in share.loss_weights]
    seeds = backwards.weights(share.microbatches)
    weights = [seed / share.ranks for seed in seeds]
    return weights, weights, seeds


def _as_tensor(loss: float | None, losses: Sequence[Tensor | None]) -> Tensor | None:
    """The loss of the full batch as a scalar tensor, with dtype and device of the local losses."""
    local = next((one for one in losses if one is not None), None)
    return None if loss is None else torch.tensor(loss) if local is None else local.new_tensor(loss)
