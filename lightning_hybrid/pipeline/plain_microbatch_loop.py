"""The loop over the microbatches of a step that runs as plain Python: forward and backward of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.pipeline.microbatch_results import MicrobatchResults
from lightning_hybrid.pipeline.results.log_capture import LogCapture
from lightning_hybrid.pipeline.results.log_entry import Key
from lightning_hybrid.pipeline.results.prepare_step_outputs_for_hooks import detached
from lightning_hybrid.pipeline.runtime.parameter_gradients import ParameterGradients, split_weight
from lightning_hybrid.pipeline.runtime.record_action_times_and_memory import ActionRecorder
from lightning_hybrid.pipeline.side_effects.join_appended_entries import AppendedEntries, Rows
from lightning_hybrid.pipeline.split_batch_over_ranks_and_gather_results import BatchShare
from lightning_hybrid.pipeline.step_runner_interface_and_results import MicrobatchRunner, TrainContext, backward_of
from lightning_hybrid.schedule import Action, Kind
from lightning_hybrid.step.batch.metrics import FullBatchMetrics
from lightning_hybrid.step.batch.split import sizes_of
from lightning_hybrid.step.module_state.attributes import put
from lightning_hybrid.step.module_state.snapshots import reachable_leaves
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.standins.tensors import ShardedTensorBase, materialize
from lightning_hybrid.step.tracing.functions import BackwardCode
from lightning_hybrid.step.tracing.lines import TorchCallSites, user_call_sites


class MicrobatchLoop:
    """Runs the microbatches of one step one after the other, and collects their results.

    Attributes:
        logs: Captured calls of ``self.log``.
        outputs: Return values of the step, by microbatch; detached in training.
        losses: By microbatch; None where the step returned none. Empty without backwards.
        calls: Lines of code that have run, where they are traced.
        scales_gradients: As in ``__init__``; no longer None once a function was applied.
    """

    def __init__(
        self,
        runner: MicrobatchRunner,
        share: BatchShare,
        gradients: ParameterGradients,
        traces_calls: bool,
        stops: Callable[[bool], bool] | None,
        scales_gradients: bool | None,
    ) -> None:
        """Set up for the share of a batch.

        Args:
            runner: Of the step.
            share: What this rank runs of the batch.
            gradients: Weighs what arrives at parameters.
            traces_calls: Whether lines of code are traced.
            stops: Called after the first forward with whether it has left code of the user for its backward; if it
                returns true, nothing else is run. None if that is known.
            scales_gradients: Whether microbatches weigh where their gradients reach a parameter; None if they do once
                the step has applied an autograd function of the user.
        """
        self._runner, self._root, self._share, self._gradients = runner, gradients.root, share, gradients
        self.scales_gradients, self._traces_calls, self._stops = scales_gradients, traces_calls, stops
        self.logs = LogCapture(len(share.microbatches))
        self.outputs: list[Any] = []
        self.losses: list[Tensor | None] = []
        self.calls: set[int] = set()

    def run(
        self,
        step: Callable[[Any], Any],
        context: Callable[[], AbstractContextManager[Any]],
        keyed: Callable[[int], AbstractContextManager[None]] | None,
        metrics: FullBatchMetrics,
        train: TrainContext | None,
        seeds: Sequence[float],
        appended: AppendedEntries | None,
    ) -> None:
        """Run all microbatches.

        Args:
            step: The user's step, of one microbatch.
            context: Entered around each forward (autocast).
            keyed: Keys the random numbers of a microbatch, by its index; None with manual optimization.
            metrics: Of the module.
            train: Callbacks of a training step with automatic optimization; None runs forwards only.
            seeds: By microbatch, the weight of its loss, with which the backward starts.
            appended: Records the entries that each microbatch appends to lists.
        """
        runner, trains = self._runner, train is not None or keyed is None
        recorder = ActionRecorder() if train is None else train.recorder
        for index, microbatch in enumerate(self._share.microbatches):
            draws = keyed(index) if keyed is not None else contextlib.nullcontext()
            start = recorder.mark()
            path = TorchCallSites() if self._traces_calls else None
            code = BackwardCode() if train is not None and self.scales_gradients is None else None
            with (
                runner.active.around_step(),
                context(),
                draws,
                self.logs.microbatch(self._root, index, metrics.origin),
                metrics.microbatch(index, is_full=self._share.total == 1),
                self._gradients.registered.run(),
            ):
                # Compiled code shows neither lines nor autograd functions; a mode would be compiled with it.
                eager = path is not None or (index == 0 and self._stops is not None)
                stance = torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()
                with path or contextlib.nullcontext(), stance, code or contextlib.nullcontext():
                    output = step(microbatch)
                if runner.gathers_outputs:
                    output = _gathered(self._root, output)
            if path is not None:
                self.calls |= user_call_sites(set(path.calls)).keys()
            recorder.add(Action(Kind.F, 0, index), start)
            if train is not None:
                self.scales_gradients = True if code is not None and code.has_functions else self.scales_gradients
                if index == 0 and self._stops is not None and self._stops(code is not None and not code.is_empty):
                    return
                with runner.guards.off():
                    self.losses.append(self._backward(output, train, seeds[index], index))
                recorder.add_since_last(Action(Kind.B, 0, index))
            self.outputs.append(map_leaves(detached, output) if trains else output)
            if appended is not None:
                appended.after_microbatch()
            del output, microbatch
        if train is not None:
            with runner.guards.off():  # a reducer that read full gradients would average those
                train.reduce(0)

    def results(
        self,
        weights: list[float],
        loss_weights: list[float],
        by_samples: frozenset[Key],
        outputs: list[Any],
        appended: Rows,
    ) -> MicrobatchResults:
        """The results of this rank; arguments as the attributes of ``MicrobatchResults``."""
        losses = [None if loss is None else float(loss) for loss in self.losses] or [None] * len(weights)
        sizes = sizes_of(self._share.microbatches)
        found = MicrobatchResults(weights, loss_weights, by_samples, self.logs.entries(), losses, sizes, outputs)
        found.appended = appended
        return found

    def _backward(self, output: Any, train: TrainContext, seed: float, index: int) -> Tensor | None:
        """Run the backward of a microbatch, which weighs its loss by ``seed`` in all; returns its loss."""
        seed, factor = split_weight(seed, self._share.ranks * self._share.weights[index], scales=self.scales_gradients)
        is_last = index == len(self._share.microbatches) - 1
        return backward_of(output, train, seed, self._gradients.by(factor, is_last=is_last), is_last=is_last)


def _gathered(root: nn.Module, output: Any) -> Any:
    """Gather the sharded tensors in the output of a step, and those that it has stored on modules."""
    stored = [(path, leaf) for path, leaf in reachable_leaves(root, plain=False) if isinstance(leaf, ShardedTensorBase)]
    put(root, [path for path, _ in stored], [materialize(leaf).detach() for _, leaf in stored])
    return map_leaves(materialize, output)
