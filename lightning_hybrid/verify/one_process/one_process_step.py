"""One training step in one process: the user's method on a full copy of the parameters, one microbatch after another.

It uses no pipeline code. The side effects of the step (buffers, counters, metrics, lists) are undone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.without_dropout_mode import WithoutDropoutMode
from lightning_hybrid.errors import BatchError
from lightning_hybrid.randomness.generator_snapshot import GeneratorStates
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.replicate.forbid_communication import collectives_forbidden
from lightning_hybrid.step.batch.split_batch_into_microbatches import join_batches, split
from lightning_hybrid.step.instrument.instrument_step import draw_as_stages
from lightning_hybrid.step.tracing.recording_dataclasses import find_loss
from lightning_hybrid.verify.one_process.batch_norm_per_microbatch import batch_norm_per_microbatch, known_sizes
from lightning_hybrid.verify.one_process.undo_side_effects import without_side_effects
from lightning_hybrid.verify.records.perturb_weights import perturbed

# Seeds of the two runs that show whether a module draws random numbers; -1 and -2 have one hash.
_SEEDS = (-3, -4)
# If the loss of the full batch and the mean over its microbatches differ by more, the objective mixes samples.
_MIXES = 1e-9


@dataclass(frozen=True)
class ReplicaInput:
    """The input of one replica in a step.

    Attributes:
        batch: The replica's batch.
        count: Number of microbatches.
        generators: States of the random generators before the step.
        sizes: Samples of the microbatches that are joined to one; empty if they run one after the other. BatchNorm's
            statistics and random numbers of their rows are theirs.
    """

    batch: Any
    count: int
    generators: GeneratorStates
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepCall:
    """The call of the user's step.

    Attributes:
        step: The user's bound method.
        rest: Its arguments after the batch.
        number: Number of the batch in the run.
        seed_factor: Initial gradient of the backward (loss scale / accumulated batches).
        context: Makes the context manager entered around each forward.
    """

    step: Callable[..., Any]
    rest: Sequence[Any]
    number: int
    seed_factor: float
    context: Callable[[], AbstractContextManager[Any]]


@dataclass
class OneProcessResult:
    """Losses and gradients of one process, over all batches of one optimizer step.

    Attributes:
        losses: By batch, then by replica.
        noisy_losses: The same with perturbed weights.
        gradients: Full gradients averaged over the replicas, by FQN; on the CPU.
        noisy_gradients: The same with perturbed weights.
        mixes: Loss of the first full batch, mean over its microbatches, and their number by replica, of a module that
            draws with dropout off; None where the two cannot be compared.
        not_comparable: The reason why they cannot be compared.
        unsplit: The same with each replica's batch as one microbatch, if the full loss is or may be no mean over
            microbatches; BatchNorm takes its statistics, and dropout its numbers, per microbatch there too.
    """

    losses: list[list[float]] = field(default_factory=list)
    noisy_losses: list[list[float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    noisy_gradients: dict[str, Tensor] = field(default_factory=dict)
    mixes: tuple[float, float, tuple[int, ...]] | None = None
    not_comparable: str = ""
    unsplit: OneProcessResult | None = None


class OneProcessStep:
    """Runs steps of a module that has all its parameters; losses and gradients accumulate in ``result``."""

    def __init__(
        self,
        module: nn.Module,
        *,
        keyed: KeyedRandomness | None,
        device: torch.device,
        splitter: Callable[[Any, int], Sequence[Any]] | None,
        weight: Callable[[Any], float] | None,
        perturbation: float,
    ) -> None:
        """Set up the step.

        Args:
            module: The user's module.
            keyed: Keyed random numbers as in the pipeline; None where each replica draws from its generators.
            device: Device of the module.
            splitter: The user's ``batch_splitter``.
            weight: The user's ``microbatch_weight``.
            perturbation: Relative perturbation of the weights for the noise floor.
        """
        self.result = OneProcessResult()
        self._module, self._keyed, self._splitter, self._weight = module, keyed, splitter, weight
        self._randomness = keyed or KeyedRandomness(0, device)
        self._perturbation = perturbation

    def run(self, call: StepCall, inputs: Sequence[ReplicaInput]) -> bool:
        """Run one batch of all replicas, and again with perturbed weights.

        Returns:
            False if the step gave no loss for some microbatch, and nothing was recorded.
        """
        losses = self._run_microbatches(call, inputs, self.result.gradients)
        if losses is None:
            return False
        if not self.result.losses:
            self._compare_with_full_batch(call, inputs, losses)
        self._run_perturbed(call, inputs, losses, self.result)
        if (unsplit := self.result.unsplit) is not None:
            together = [replace(each, count=1, sizes=self._sizes_of_microbatches(each)) for each in inputs]
            losses = self._run_microbatches(call, together, unsplit.gradients) or losses
            self._run_perturbed(call, together, losses, unsplit)
        return True

    def _sizes_of_microbatches(self, replica: ReplicaInput) -> tuple[int, ...]:
        return known_sizes(split(replica.batch, replica.count, self._splitter)[0]) if replica.count > 1 else ()

    def _run_perturbed(
        self, call: StepCall, inputs: Sequence[ReplicaInput], losses: list[float], result: OneProcessResult
    ) -> None:
        """Add the losses of a batch to a result, and what the step gives with perturbed weights."""
        result.losses.append(losses)
        with perturbed(self._module, self._perturbation):
            noisy = self._run_microbatches(call, inputs, result.noisy_gradients)
        result.noisy_losses.append(losses if noisy is None else noisy)

    def _run_microbatches(
        self, call: StepCall, inputs: Sequence[ReplicaInput], into: dict[str, Tensor]
    ) -> list[float] | None:
        """Run the microbatches of all replicas and return the loss of each replica; gradients are added to ``into``."""
        splits = [split(replica.batch, replica.count, self._splitter) for replica in inputs]
        weights = [shares for _, shares in splits]
        if self._weight is not None:
            counts = [[float(self._weight(microbatch)) for microbatch in row] for row, _ in splits]
            total = sum(map(sum, counts))
            weights = [[count * len(inputs) / total for count in row] for row in counts]
        named = list(self._module.named_parameters())
        before = [parameter.grad for _, parameter in named]
        for _, parameter in named:
            parameter.grad = None
        losses: list[float] = []
        try:
            for replica, (microbatches, _) in enumerate(splits):
                loss = self._run_replica(call, inputs[replica], replica, microbatches, weights[replica])
                if loss is None:
                    return None
                losses.append(loss)
            for name, parameter in named:
                if parameter.grad is not None:
                    gradient = (parameter.grad.detach() / len(inputs)).to("cpu")
                    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
                    into[name] = into[name] + gradient if name in into else gradient
        finally:
            for (_, parameter), gradient_before in zip(named, before, strict=True):
                parameter.grad = gradient_before
        return losses

    def _run_replica(
        self, call: StepCall, inputs: ReplicaInput, replica: int, microbatches: Sequence[Any], weights: Sequence[float]
    ) -> float | None:
        total = 0.0
        statistics = batch_norm_per_microbatch(self._module, inputs.sizes)
        with without_side_effects(self._module), self._randomness.isolated(), torch.enable_grad(), statistics:
            for index, (microbatch, weight) in enumerate(zip(microbatches, weights, strict=True)):
                number = replica * (len(inputs.sizes) or inputs.count) + index
                with self._random_state(call.number, number, inputs):
                    with call.context():
                        loss = find_loss(call.step(microbatch, *call.rest))
                    if loss is None:
                        return None
                    total += float(loss.detach()) * weight
                    if loss.requires_grad:
                        loss.backward(torch.full_like(loss, call.seed_factor * weight))
        return total

    def _compare_with_full_batch(self, call: StepCall, inputs: Sequence[ReplicaInput], losses: Sequence[float]) -> None:
        """Record the loss of the replicas' batches concatenated, beside the mean over the microbatches."""
        counts = [replica.count for replica in inputs]
        if max(counts) == 1:  # replicas alone take the mean over their losses, as DDP does
            return
        try:
            full_batch = join_batches([replica.batch for replica in inputs])
            full, compared = self._loss_without_draws(call, full_batch), losses
            if full is None:
                self.result.unsplit = OneProcessResult()
                with WithoutDropoutMode():
                    full = self._loss_without_draws(call, full_batch)
                    compared = losses if full is None else self._run_microbatches(call, inputs, {}) or losses
        except BatchError as error:
            self.result.not_comparable = str(error)
            return
        except Exception as error:  # a step may fail on so large a batch, which is no error here
            self.result.not_comparable = f"it raised {type(error).__name__}: {error}"
            return
        if full is None:
            self.result.not_comparable = "beside dropout, the module draws random numbers, which depend on how samples"
            self.result.not_comparable += " are grouped"
            return
        mean = sum(compared) / len(compared)
        self.result.mixes = full, mean, tuple(counts)
        if not math.isclose(full, mean, rel_tol=_MIXES):
            self.result.unsplit = OneProcessResult()

    def _loss_without_draws(self, call: StepCall, full_batch: Any) -> float | None:
        """Return the loss of a batch; None if the step draws random numbers."""
        losses = []
        for seed in _SEEDS:
            with without_side_effects(self._module), self._randomness.isolated(), torch.no_grad():
                with self._randomness.microbatch(seed, call.number):
                    pass
                before = GeneratorStates(self._randomness.device)
                with call.context():
                    losses.append(float(find_loss(call.step(full_batch, *call.rest)).detach()))
                if not before.are_unchanged():
                    return None
        return losses[0] if losses[0] == losses[1] else None

    @contextlib.contextmanager
    def _random_state(self, number: int, microbatch: int, inputs: ReplicaInput) -> Iterator[None]:
        if self._keyed is None:
            inputs.generators.restore()
            yield
            return
        joined = range(microbatch, microbatch + len(inputs.sizes))
        with (
            draw_as_stages(self._module, self._keyed, number, microbatch),
            self._keyed.rows_of_microbatches(number, joined, inputs.sizes),
        ):
            yield


def no_communication() -> AbstractContextManager[None]:
    """Context that refuses communication with other ranks: they do not take part, so the call would hang.

    Raises:
        RuntimeError: The step calls a collective over more than one rank.
    """
    return collectives_forbidden(
        lambda name: RuntimeError(
            f"the step communicates with other ranks ({name}), so one process cannot run it; leave verify_first_step"
            " out"
        )
    )
