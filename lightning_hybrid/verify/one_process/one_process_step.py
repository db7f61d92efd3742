"""One training step in one process: the user's method on a full copy of the parameters and the full batch of a replica.

It uses no pipeline code. The side effects of the step (buffers, counters, metrics, lists) are undone. An objective that
mixes samples runs one microbatch after another as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.randomness.generator_snapshot import GeneratorStates
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.replicate.forbid_communication import collectives_forbidden
from lightning_hybrid.step.batch.split_batch_into_microbatches import split
from lightning_hybrid.step.instrument.instrument_step import draw_as_stages
from lightning_hybrid.step.tracing.recording_dataclasses import find_loss
from lightning_hybrid.verify.one_process.batch_norm_per_microbatch import batch_norm_per_microbatch, is_batch_norm
from lightning_hybrid.verify.one_process.mixing import Mixing, mixing_of, rounding_of
from lightning_hybrid.verify.one_process.pieces import Piece, known_sizes
from lightning_hybrid.verify.one_process.undo_side_effects import without_side_effects
from lightning_hybrid.verify.records.perturb_weights import perturbed


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
        mixing: How the first batch differs from the mean over its microbatches, if it does.
        of_microbatches: The same with each microbatch on its own: for an objective that mixes samples, and in half
            precision.
    """

    losses: list[list[float]] = field(default_factory=list)
    noisy_losses: list[list[float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    noisy_gradients: dict[str, Tensor] = field(default_factory=dict)
    mixing: Mixing | None = None
    of_microbatches: OneProcessResult | None = None


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
        precision: str,
        runs_full_batch: bool = True,
    ) -> None:
        """Set up the step.

        Args:
            module: The user's module.
            keyed: Keyed random numbers as in the pipeline; None where each replica draws from its generators.
            device: Device of the module.
            splitter: The user's ``batch_splitter``.
            weight: The user's ``microbatch_weight``.
            perturbation: Relative perturbation of the weights for the noise floor.
            precision: Lightning's name of the precision of the loss.
            runs_full_batch: Whether each replica's full batch runs at once; else its microbatches, one after the other.
        """
        self.result = OneProcessResult()
        self._module, self._keyed, self._splitter, self._weight = module, keyed, splitter, weight
        self._randomness = keyed or KeyedRandomness(0, device)
        self._perturbation, self._precision, self._full = perturbation, precision, runs_full_batch

    def run(self, call: StepCall, inputs: Sequence[ReplicaInput]) -> bool:
        """Run one batch of all replicas, and again with perturbed weights.

        Returns:
            False if the step gave no loss for some microbatch, and nothing was recorded.
        """
        result, pieces = self.result, [self._full_batch(each) for each in inputs] if self._full else inputs
        try:
            losses = self._run_microbatches(call, pieces, result.gradients)
        except torch.OutOfMemoryError:
            if not self._full or result.losses:
                raise
            self._full, pieces = False, inputs
            losses = self._run_microbatches(call, pieces, result.gradients)
        if losses is None:
            return False
        if self._full and not result.losses and max(replica.count for replica in inputs) > 1:
            result.mixing = mixing = self._mixing_of(call, inputs)
            # In half precision each microbatch's gradient is rounded, which differs from one rounding of their sum.
            if not mixing.is_weighted if mixing is not None else "16" in self._precision or self._precision == "mixed":
                result.of_microbatches = OneProcessResult()
        self._run_perturbed(call, pieces, losses, result)
        if (split := result.of_microbatches) is not None:
            losses = self._run_microbatches(call, inputs, split.gradients) or losses
            self._run_perturbed(call, inputs, losses, split)
        return True

    def _full_batch(self, replica: ReplicaInput) -> ReplicaInput:
        """The full batch of a replica as one piece, whose rows draw what they draw in their microbatches."""
        return replace(replica, count=1, sizes=self._sizes_of_microbatches(replica))

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
        statistics = batch_norm_per_microbatch(self._module, [inputs.sizes])
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
                        self._backward(loss, call.seed_factor, weight)
        return total

    def _backward(self, loss: Tensor, seed_factor: float, weight: float) -> None:
        """Add the gradients of a loss, times its weight: what a backward adds by itself is weighted too."""
        so_far = [(p, p.grad) for p in self._module.parameters()]
        for parameter, _ in so_far:
            parameter.grad = None
        loss.backward(torch.full_like(loss, seed_factor))
        for parameter, before in so_far:
            if parameter.grad is None:
                parameter.grad = before
            else:
                gradient = parameter.grad * weight
                parameter.grad = gradient if before is None else before + gradient

    def _mixing_of(self, call: StepCall, inputs: Sequence[ReplicaInput]) -> Mixing | None:
        """Compare each replica's full batch with the mean over its microbatches."""
        for replica, each in enumerate(inputs):
            parts, weights = split(each.batch, each.count, self._splitter)
            first = replica * each.count
            sizes = self._sizes_of_microbatches(each)
            full_batch = Piece(replica, first, each.batch, 1.0, sizes=sizes)
            rows = zip(parts, weights, strict=True)
            pieces = [Piece(replica, first + index, part, weight) for index, (part, weight) in enumerate(rows)]
            mixing, full = mixing_of(self._module, partial(self._step, call, each), full_batch, pieces, self._precision)
            if mixing is None and any(map(is_batch_norm, self._module.modules())):
                unchanged = self._step(call, each, full_batch, lambda loss: float(loss.detach()), batch_norm=False)
                mixing = Mixing("loss", unchanged, full, each.count, False)
                mixing = None if abs(unchanged - full) <= rounding_of(self._precision) * abs(full) else mixing
            if mixing is not None:
                undivided = self._randomness.has_undivided_draws  # the full batch has the draws of one microbatch
                return replace(mixing, is_weighted=mixing.is_weighted and not undivided)
        return None

    def _step(
        self,
        call: StepCall,
        inputs: ReplicaInput,
        piece: Piece,
        then: Callable[[Any], Any],
        *,
        batch_norm: bool = True,
    ) -> Any:
        """Run the step on a piece, and return a function of its loss; its effects are undone."""
        inputs = replace(inputs, sizes=piece.sizes)
        statistics = batch_norm_per_microbatch(self._module, [piece.sizes] if batch_norm else [])
        state = self._random_state(call.number, piece.number, inputs)
        with without_side_effects(self._module), self._randomness.isolated(), torch.enable_grad(), statistics, state:
            with call.context():
                loss = find_loss(call.step(piece.batch, *call.rest))
            return then(loss)

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
