"""One training step in one process: the user's method on a full copy of the parameters and the full batch of a replica.

The side effects of the step (buffers, counters, metrics, lists) are undone. An objective that mixes samples runs one
microbatch after another as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.collectives.forbidden import collectives_forbidden
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.batch.split import split
from lightning_hybrid.step.tracing.recording import find_loss
from lightning_hybrid.verify.one_process.gradients import PieceGradients
from lightning_hybrid.verify.one_process.mixing import Mixing, mixing_of, rounding_of
from lightning_hybrid.verify.one_process.module_state import without_side_effects
from lightning_hybrid.verify.one_process.pieces import Piece, joined
from lightning_hybrid.verify.one_process.rows import is_batch_norm, rows_of_pieces
from lightning_hybrid.verify.records.noise import perturbed


@dataclass(frozen=True)
class ReplicaInput:
    """The input of one replica in a step.

    Attributes:
        batch: The replica's batch.
        count: Number of microbatches.
        generators: States of the random generators before the step.
    """

    batch: Any
    count: int
    generators: GeneratorStates


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
        result, microbatches = self.result, self._microbatches(inputs)
        full = joined(microbatches, [each.batch for each in inputs])
        pieces = full if self._full else microbatches
        try:
            losses = self._losses(call, inputs, pieces, result.gradients)
        except torch.OutOfMemoryError:
            if not self._full or result.losses:
                raise
            self._full, pieces = False, microbatches
            losses = self._losses(call, inputs, pieces, result.gradients)
        if losses is None:
            return False
        if self._full and not result.losses and len(microbatches) > len(inputs):
            result.mixing = mixing = self._mixing_of(call, inputs, microbatches, full)
            # In half precision each microbatch's gradient is rounded, which differs from one rounding of their sum.
            if not mixing.is_weighted if mixing is not None else "16" in self._precision or self._precision == "mixed":
                result.of_microbatches = OneProcessResult()
        self._run_perturbed(call, inputs, pieces, losses, result)
        if (each := result.of_microbatches) is not None:
            losses = self._losses(call, inputs, microbatches, each.gradients) or losses
            self._run_perturbed(call, inputs, microbatches, losses, each)
        return True

    def _microbatches(self, inputs: Sequence[ReplicaInput]) -> list[Piece]:
        pieces = []
        for replica, each in enumerate(inputs):
            for index, (part, weight) in enumerate(zip(*split(each.batch, each.count, self._splitter), strict=True)):
                pieces.append(Piece(replica, replica * each.count + index, part, weight / len(inputs)))
        if self._weight is None:
            return pieces
        counts = [float(self._weight(piece.batch)) for piece in pieces]
        return [replace(piece, weight=count / sum(counts)) for piece, count in zip(pieces, counts, strict=True)]

    def _run_perturbed(
        self,
        call: StepCall,
        inputs: Sequence[ReplicaInput],
        pieces: Sequence[Piece],
        losses: list[float],
        result: OneProcessResult,
    ) -> None:
        """Add the losses of a batch to a result, and what the step gives with perturbed weights."""
        result.losses.append(losses)
        with perturbed(self._module, self._perturbation):
            noisy = self._losses(call, inputs, pieces, result.noisy_gradients)
        result.noisy_losses.append(losses if noisy is None else noisy)

    def _losses(
        self, call: StepCall, inputs: Sequence[ReplicaInput], pieces: Sequence[Piece], into: dict[str, Tensor]
    ) -> list[float] | None:
        """Run these pieces and return the loss of each replica; gradients are added to ``into``."""
        gradients, losses = PieceGradients(self._module), [0.0] * len(inputs)

        def backward(piece: Piece, loss: Tensor | None) -> bool:
            if loss is None:
                return False
            losses[piece.replica] += float(loss.detach()) * piece.weight * len(inputs)
            if loss.requires_grad:
                gradients.backward(loss, piece.weight, call.seed_factor)
            return True

        with gradients:
            for replica, each in enumerate(inputs):
                with without_side_effects(self._module), self._randomness.isolated(), torch.enable_grad():
                    for piece in pieces:
                        if piece.replica == replica and not self._run_piece(
                            call, each, piece, partial(backward, piece)
                        ):
                            return None
        gradients.add_to(into)
        return losses

    def _run_piece(
        self,
        call: StepCall,
        inputs: ReplicaInput,
        piece: Piece,
        then: Callable[[Any], Any],
        *,
        batch_norm: bool = True,
    ) -> Any:
        """Run the step on a piece, and return a function of its loss."""
        if self._keyed is None:
            inputs.generators.restore()
        with rows_of_pieces(self._module, self._keyed, call.number, [piece], batch_norm=batch_norm):
            with call.context():
                loss = find_loss(call.step(piece.batch, *call.rest))
            return then(loss)

    def _mixing_of(
        self, call: StepCall, inputs: Sequence[ReplicaInput], microbatches: Sequence[Piece], full: Sequence[Piece]
    ) -> Mixing | None:
        """Compare each replica's full batch with the mean over its microbatches."""

        def step(piece: Piece, then: Callable[[Any], Any], batch_norm: bool = True) -> Any:
            with without_side_effects(self._module), self._randomness.isolated(), torch.enable_grad():
                return self._run_piece(call, inputs[piece.replica], piece, then, batch_norm=batch_norm)

        for batch in full:
            pieces = [piece for piece in microbatches if piece.replica == batch.replica]
            mixing, loss = mixing_of(self._module, step, batch, pieces, self._precision)
            if mixing is None and any(map(is_batch_norm, self._module.modules())):
                unchanged = step(batch, lambda loss: float(loss.detach()), batch_norm=False)
                mixing = Mixing("loss", unchanged, loss, len(pieces), False)
                mixing = None if abs(unchanged - loss) <= rounding_of(self._precision) * abs(loss) else mixing
            if mixing is not None:
                undivided = self._randomness.has_undivided_draws  # the full batch has the draws of one microbatch
                return replace(mixing, is_weighted=mixing.is_weighted and not undivided)
        return None


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
