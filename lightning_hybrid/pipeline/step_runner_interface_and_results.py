"""The base class of step runners, with pipeline stages and without."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.pipeline.results.log_entry import Entry
from lightning_hybrid.pipeline.run_evaluation_steps_unpartitioned import UnpartitionedSteps
from lightning_hybrid.pipeline.runtime.record_action_times_and_memory import ActionRecorder
from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.pipeline.stages.stages_of_parameters_and_buffers import StagePlan
from lightning_hybrid.step.batch.split_batch_into_microbatches import BatchSplitter, batch_size_of, choose_count
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.tracing.recording_dataclasses import find_loss
from lightning_hybrid.step.tracing.refuse_backward_functorch_missing_loss import no_loss_error
from lightning_hybrid.techniques.technique import Active


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of one step, the same on every rank of the pipeline.

    Attributes:
        output: The return value of the user's step, joined over the microbatches; detached.
        loss: The mean loss, a scalar weighted by samples; None for steps without a backward, or that returned none.
        logs: Each logged key with its value for the full batch and the arguments of the call.
        was_rolled_back: Whether the step was rolled back, and has to run again.
    """

    output: Any
    loss: Tensor | None
    logs: list[tuple[Entry, float]]
    was_rolled_back: bool = False


@dataclasses.dataclass(frozen=True)
class TrainContext:
    """The options and callbacks of a training step.

    Attributes:
        seed_factor: Gradient of the loss from which the backward starts (loss scale / accumulated batches).
        before_backward: Called before each backward with its stage, and whether it is the last of the stage.
        after_backward: Called after each backward, with the same arguments.
        reduce: Called with a stage after its last backward.
        recorder: Records when this rank's actions ran.
        weigh: Returns the weights of microbatches; if None they weigh by their numbers of samples.
        on_loss: Called with the loss of each microbatch before its backward, in steps without stages.
    """

    seed_factor: float
    before_backward: Callable[[int, bool], None]
    after_backward: Callable[[int, bool], None]
    reduce: Callable[[int], None]
    recorder: ActionRecorder
    weigh: Callable[[Sequence[Any]], list[float]] | None = None
    on_loss: Callable[[Tensor], None] = lambda _: None


class MicrobatchRunner(ABC):
    """Runs any step of one module on this rank's layers or shards.

    Attributes:
        plan: The ranks that own each parameter and unit.
        splitter: Splits batches, where the user has passed one.
        unit_observers: All entered with the trace of the first step while that step is recorded again.
        unpartitioned: Runs evaluation steps that cannot be partitioned, and code outside of steps.
        guards: Track whether user code runs, which reads full parameters, or a backward.
        active: The techniques that run layers.
        gathers_outputs: Whether layers may return sharded outputs, which are gathered at the end of a step.
        is_fatal: Whether an error in a comparison of microbatches is raised; they weigh by samples otherwise.
        batch_bytes: Bytes of the tensors in the first batch, by name of a step.
        is_comparing: Whether a batch is compared with its microbatches now: nothing may be rounded at random.
    """

    def __init__(
        self,
        plan: StagePlan,
        *,
        num_microbatches: int | None,
        splitter: BatchSplitter | None,
        unpartitioned: UnpartitionedSteps,
    ) -> None:
        """Set up for one module; ``num_microbatches`` is the requested number, or None for an automatic choice."""
        self.plan, self.splitter, self.unpartitioned = plan, splitter, unpartitioned
        self.unit_observers: list[Callable[[TraceVariant], AbstractContextManager[Any]]] = []
        self.guards = ReadGuards()
        self.active = Active()
        self.is_fatal: Callable[[Exception], bool] | None = None
        self.gathers_outputs = self.is_comparing = False
        self.batch_bytes: dict[str, int] = {}
        self._num_microbatches = num_microbatches
        self._full: dict[str, tuple[int, int]] = {}  # samples of the largest batch so far, and its microbatches

    @property
    @abstractmethod
    def can_roll_back_step(self) -> bool:
        """Whether a training step may be rolled back, and run again."""

    @property
    @abstractmethod
    def unsplit_step_names(self) -> frozenset[str]:
        """Names of steps whose batches are not split into microbatches, so far."""

    @abstractmethod
    def record(
        self,
        name: str,
        step: Callable[..., Any],
        args: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Record a step on an example batch before the run.

        Args:
            name: Such as "training_step".
            step: The user's bound method.
            args: Its arguments, the batch first.
            context: Entered around the step (autocast).
        """

    @abstractmethod
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
        """Run one step of the user's module on a full batch.

        Args:
            name: Such as "training_step".
            step: The user's bound method.
            args: Its arguments, the batch first.
            step_number: Number of the batch in the run; keys the random numbers.
            context: Entered around each forward (autocast).
            train: Options of a training step; other steps run forward only.
            share_output: Whether tensors that the step returned are needed on every rank.
            manual_optimization: Whether it is a training step with manual optimization.
        """

    def connect(self, active: Active) -> None:
        """Run layers as techniques do, from the next step on."""
        self.active = active
        self.unpartitioned.active = active

    def use_microbatches(self, count: int) -> None:
        """Split full batches into so many microbatches from now on."""
        self._num_microbatches = count
        self._full = {name: (size, max(1, min(count, size))) for name, (size, _) in self._full.items()}

    def forget_batch_sizes(self) -> None:
        """Let the next batch be the first full one: the user has changed the size of batches."""
        self._full.clear()

    def num_backwards(self, batch: Any) -> int:
        """Number of backwards of each stage of this rank in a training step."""
        return self.count("training_step", batch)

    def count(self, name: str, batch: Any) -> int:
        """Number of microbatches; a short batch has fewer, of the usual size, not as many smaller ones."""
        count = choose_count(batch, self._num_microbatches, self.plan.num_stages, self.splitter)
        size = batch_size_of(batch)
        if size is None or self.splitter is not None:
            return count
        if name not in self._full:
            self.batch_bytes[name] = sum(tensor.nbytes for tensor in tensors_inside(batch))
        usual = self._full.setdefault(name, (size, count))
        if size >= usual[0]:
            self._full[name] = size, count
            return count
        return math.ceil(size / math.ceil(usual[0] / usual[1]))


def backward_of(
    output: Any, train: TrainContext, seed: float, weighted: AbstractContextManager[None], *, is_last: bool
) -> Tensor | None:
    """Run the backward of a microbatch in ``weighted``; returns its detached scalar loss, or None if there is none.

    Raises:
        StepError: The output has no loss, or one that depends on no parameter.
    """
    loss = find_loss(output)
    if isinstance(loss, Tensor):
        train.on_loss(loss)
    train.before_backward(0, is_last)
    if output is not None:
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise no_loss_error("training_step", output)
        with weighted:
            torch.autograd.backward([loss], [torch.full_like(loss, train.seed_factor * seed)])
    train.after_backward(0, is_last)
    return None if output is None else loss.detach()
