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

from lightning_hybrid.batch.merge import Argument
from lightning_hybrid.batch.split import BatchSplitter, batch_size_of, choose_count
from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.pipeline.logs import Entry, Key
from lightning_hybrid.pipeline.metrics import MetricSync
from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
from lightning_hybrid.pipeline.stages.traces import Call
from lightning_hybrid.pipeline.unpartitioned import UnpartitionedSteps
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.techniques.technique import Active


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of one step, the same on every rank of the pipeline."""

    output: Any  # the return value of the user's step, joined over the microbatches; detached
    # the mean loss, a scalar weighted by samples; None for steps without a backward, or that returned none
    loss: Tensor | None
    logs: list[tuple[Entry, float]]  # each logged key with its value for the full batch and the arguments of the call
    # what was logged, or given to a metric of this rank, and taken for a mean over microbatches without proof
    guessed: frozenset[Key | Argument] = frozenset()
    digest: int = 0  # of the batch; 0 where all ranks of the replica have compared it


class MicrobatchRunner(ABC):
    """Runs any step of one module on this rank's layers or shards.

    Attributes:
        plan: The ranks that own each parameter and unit.
        splitter: Splits batches, where the user has passed one.
        unpartitioned: Runs evaluation steps that cannot be partitioned, and code outside of steps.
        guards: Track whether user code runs, which reads full parameters, or a backward.
        active: The techniques that run layers.
        gathers_outputs: Whether layers may return sharded outputs, which are gathered at the end of a step.
        batch_bytes: Bytes of the dense tensors in the first batch of full size, by name of a step.
        is_comparing: Whether a batch is compared with its microbatches now: nothing may be rounded at random.
        declared: Warnings about numbers that are not those of the batch, by logged name or metric.
    """

    def __init__(
        self,
        plan: StagePlan,
        metrics: MetricSync,
        unpartitioned: UnpartitionedSteps,
        *,
        num_microbatches: int | None,
        splitter: BatchSplitter | None,
        replica: int,
        warn: Callable[[str], None],
    ) -> None:
        """Set up for one module."""
        self.plan, self.splitter, self.unpartitioned = plan, splitter, unpartitioned
        self._unit_observers: list[Callable[[TraceVariant], AbstractContextManager[Any]]] = []
        self.guards = ReadGuards()
        self.active = Active()
        self._is_fatal: Callable[[Exception], bool] = lambda error: False
        self.gathers_outputs = self.is_comparing = False
        self.batch_bytes: dict[str, int] = {}
        self._root, self._randomness, self._metrics = plan.root, plan.randomness, metrics
        self._replica, self._warn = replica, warn
        self.declared: dict[str, str] = {}
        self._num_microbatches = num_microbatches
        self._full: dict[str, tuple[int, int]] = {}  # samples of the largest batch so far, and its microbatches

    @property
    def metrics(self) -> MetricSync:
        """The metrics of the module."""
        return self._metrics

    @property
    @abstractmethod
    def can_roll_back_step(self) -> bool:
        """Whether a training step may be rolled back, and run again."""

    @property
    @abstractmethod
    def unsplit_step_names(self) -> frozenset[str]:
        """Names of steps whose batches are not split into microbatches, so far."""

    @abstractmethod
    def record(self, call: Call) -> None:
        """Record a step on an example batch before the run."""

    @abstractmethod
    def run(self, call: Call) -> StepResult:
        """Run one step of the user's module on a full batch."""

    def connect(self, active: Active) -> None:
        """Run layers as techniques do, from the next step on."""
        self.active = active
        self.unpartitioned.active = active

    def observe_units(self, observers: Sequence[Callable[[TraceVariant], AbstractContextManager[Any]]]) -> None:
        """Enter these contexts with the trace of the first step, while that step is recorded again."""
        self._unit_observers = list(observers)

    def raise_in_comparisons(self, is_fatal: Callable[[Exception], bool]) -> None:
        """Raise these errors in comparisons of microbatches; after others, microbatches weigh by samples."""
        self._is_fatal = is_fatal

    def use_microbatches(self, count: int) -> None:
        """Split full batches into so many microbatches from now on."""
        self._num_microbatches = count
        self._full = {name: (size, max(1, min(count, size))) for name, (size, _) in self._full.items()}

    def forget_batch_sizes(self) -> None:
        """Let the next batch be the first full one: the user has changed the size of batches."""
        self._full.clear()
        self.batch_bytes.clear()

    def num_backwards(self, batch: Any) -> int:
        """Number of backwards of each stage of this rank in a training step."""
        return self.count("training_step", batch)

    def count(self, name: str, batch: Any) -> int:
        """Number of microbatches; a short batch has fewer, of the usual size, not as many smaller ones."""
        count = choose_count(batch, self._num_microbatches, self.plan.most_stages, self.splitter)
        size = batch_size_of(batch)
        if name not in self.batch_bytes:
            dense = (tensor for tensor in tensors_inside(batch) if tensor.layout is torch.strided)
            self.batch_bytes[name] = sum(tensor.nbytes for tensor in dense)
        if size is None or self.splitter is not None:
            return count
        usual = self._full.setdefault(name, (size, count))
        if size >= usual[0]:
            self._full[name] = size, count
            return count
        return math.ceil(size / math.ceil(usual[0] / usual[1]))
