"""The first step of a layout beside the same step in one process, before any update: losses, gradients, their norm.

One process calls the user's method with a full copy of the parameters and the full batch of each replica; an objective
that mixes samples runs one microbatch after another as well. Side effects of the step (buffers, counters, metrics,
lists) are undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.batch.split import split
from lightning_hybrid.collectives.forbidden import collectives_forbidden
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.recording import find_loss
from lightning_hybrid.verify.compare import as_float64, as_number, farthest, largest_of
from lightning_hybrid.verify.data import Piece, joined
from lightning_hybrid.verify.record import perturbation_of_weights, perturbed
from lightning_hybrid.verify.state import without_side_effects
from lightning_hybrid.verify.steps import Mixing, PieceGradients, mixing_of, rows_of_pieces

# Tolerance as a multiple of the noise floor: the perturbed run is one sample of many.
_FACTOR = 20.0
# Relative differences that come from summation order only, by the precision of the arithmetic.
# One rounding to bfloat16 is up to 2**-8: sums over few samples, in other parts, were 2.1 % apart.
_ROUNDING = {"64-true": 1e-10, "32-true": 1e-4, "bf16-mixed": 4e-2, "bf16-true": 4e-2}
# A gradient whose relative noise is larger has no significant digits.
_NOISE = 1e-2


# -- the step in one process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaInput:
    """The input of one replica in a step: its batch, number of microbatches, and generators before the step."""

    batch: Any
    count: int
    generators: GeneratorStates


class StepCall(NamedTuple):
    """The call of the user's step."""

    step: Callable[..., Any]  # the user's bound method
    rest: Sequence[Any]  # its arguments after the batch
    number: int  # number of the batch in the run
    seed_factor: float  # initial gradient of the backward (loss scale / accumulated batches)
    context: Callable[[], AbstractContextManager[Any]]  # makes the context manager entered around each forward


@dataclass
class OneProcessResult:
    """Losses and gradients of one process, over all batches of one optimizer step."""

    losses: list[list[float]] = field(default_factory=list)  # by batch, then by replica
    # full gradients averaged over the replicas, by FQN; on the CPU
    gradients: dict[str, Tensor] = field(default_factory=dict)
    noisy: OneProcessResult | None = None  # the same with perturbed weights
    mixing: Mixing | None = None  # how the first batch differs from the mean over its microbatches, if it does
    # the same with each microbatch on its own: for an objective that mixes samples, and in half precision
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
        precision: str,
        runs_full_batch: bool = True,
    ) -> None:
        """Set up the step.

        ``keyed`` draws random numbers as the pipeline does; None where each replica draws from its generators. Without
        ``runs_full_batch`` each replica's microbatches run one after the other.
        """
        self.result = OneProcessResult(noisy=OneProcessResult())
        self._module, self._keyed, self._splitter, self._weight = module, keyed, splitter, weight
        self._randomness = keyed or KeyedRandomness(0, device)
        self._precision, self._full = precision, runs_full_batch

    def run(self, call: StepCall, inputs: Sequence[ReplicaInput]) -> bool:
        """Run one batch of all replicas, and again with perturbed weights.

        Returns:
            False if the step gave no loss for some microbatch, and nothing was recorded.
        """
        result, microbatches = self.result, self._microbatches(inputs)
        full = joined(microbatches, [each.batch for each in inputs])
        try:
            gave_loss = self._add(call, inputs, full if self._full else microbatches, result)
        except torch.OutOfMemoryError:
            if not self._full or result.losses:
                raise
            self._full = False
            gave_loss = self._add(call, inputs, microbatches, result)
        if gave_loss and self._full and len(result.losses) == 1 and len(microbatches) > len(inputs):
            result.mixing = mixing = self._mixing_of(call, inputs, microbatches, full)
            # In half precision each microbatch's gradient is rounded, which differs from one rounding of their sum.
            if not mixing.is_weighted if mixing is not None else "16" in self._precision or self._precision == "mixed":
                result.of_microbatches = OneProcessResult(noisy=OneProcessResult())
        if gave_loss and result.of_microbatches is not None:
            self._add(call, inputs, microbatches, result.of_microbatches)
        return gave_loss

    def _microbatches(self, inputs: Sequence[ReplicaInput]) -> list[Piece]:
        pieces = []
        for replica, each in enumerate(inputs):
            for index, (part, weight) in enumerate(zip(*split(each.batch, each.count, self._splitter), strict=True)):
                pieces.append(Piece(replica, replica * each.count + index, part, weight / len(inputs)))
        if self._weight is None:
            return pieces
        counts = [float(self._weight(piece.batch)) for piece in pieces]
        return [replace(piece, weight=count / sum(counts)) for piece, count in zip(pieces, counts, strict=True)]

    def _add(
        self, call: StepCall, inputs: Sequence[ReplicaInput], pieces: Sequence[Piece], result: OneProcessResult
    ) -> bool:
        """Add the losses and gradients of these pieces to a result, and those with perturbed weights to its noise."""
        losses = self._losses(call, inputs, pieces, result.gradients)
        if losses is None:
            return False
        result.losses.append(losses)
        if (noisy := result.noisy) is not None:
            with perturbed(self._module, perturbation_of_weights(self._precision)):
                noisy.losses.append(self._losses(call, inputs, pieces, noisy.gradients) or losses)
        return True

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
                    own = [piece for piece in pieces if piece.replica == replica]
                    if not all(self._run_piece(call, each, piece, partial(backward, piece)) for piece in own):
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
            mixing, _ = mixing_of(self._module, step, batch, pieces, self._precision, self._randomness, statistics=True)
            if mixing is not None:
                return mixing
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


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison, the same on every rank."""

    first: str  # a sentence on the first number that differs; empty if none does
    within: float  # the largest relative difference of those that agree
    num_gradients: int  # number of gradients compared
    num_noise: int  # number of these that consist of noise, so that they prove little


def precision_of(name: str, parameters: Sequence[Tensor]) -> str:
    """The precision whose rounding applies, by the dtypes of parameters of any shapes: float64 needs no "64-true"."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    if name in ("32-true", "64-true"):
        uniform = {frozenset({torch.float64}): "64-true", frozenset({torch.float32}): "32-true"}
        return uniform.get(frozenset(dtypes), "32-true" if dtypes <= {torch.float32, torch.float64} else "mixed")
    return name


def compare_first_step(
    single: OneProcessResult | None,
    losses: Sequence[float],
    parameters: Mapping[str, nn.Parameter],
    stages: Mapping[str, tuple[int, ...]],
    norm: float | None,
    *,
    replica: int,
    mesh: Mesh,
    device: torch.device,
    precision: str,
    parts: LocalShards,
) -> Verdict:
    """Compare losses, gradients and the gradient norm; collective over all ranks.

    The first rank alone has ``single``. ``losses`` are this rank's by batch, ``stages`` those of each parameter, and
    ``norm`` that by which this rank would clip. ``device`` is that of messages.
    """
    box: list[Any] = [None if single is None else _summary(single)]
    if mesh.layout.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    batch_losses, noisy_losses, expected, (single_norm, norm_noise) = box[0]
    found = _Found(mesh.rank, _ROUNDING.get(precision, 1e-2))
    for loss, row, noisy in zip(losses, batch_losses, noisy_losses, strict=True):
        found.add(0, "loss", as_number(loss), as_number(row[replica]), abs(noisy[replica] - row[replica]))
    # Numbers below the last digit of the largest gradient are zeros that were rounded.
    last_digit = torch.finfo(torch.float64 if precision == "64-true" else torch.float32).eps
    smallest = max((largest for _, largest, _ in expected.values()), default=0.0) * last_digit
    for order, (name, parameter) in enumerate(parameters.items(), 1):
        dtype, _, noise = expected.get(name, (None, 0.0, 0.0))
        shape = parts.full_shape(name, parameter)
        reference = None if dtype is None else _broadcast(single, name, torch.empty(shape, dtype=dtype, device=device))
        if is_absent(parameter):
            continue
        gradient = parameter.grad
        if gradient is not None:
            gradient = parts.full_state_of(parameter, gradient)
        if gradient is not None:  # on the host, if it is offloaded there
            gradient = (gradient if gradient.layout == torch.strided else gradient.to_dense()).to(device)
        found.add(order, f"the gradient of {name}", gradient, reference, noise, stages.get(name, ()), smallest)
    if norm is not None:
        found.add(len(parameters) + 1, "the norm of all gradients", as_number(norm), as_number(single_norm), norm_noise)
    return found.merged(mesh, num_gradients=len(expected))


def _broadcast(single: OneProcessResult | None, name: str, empty: Tensor) -> Tensor:
    """Send a gradient of the one process to all ranks: one by one, as all of them may not fit."""
    gradient = empty if single is None else single.gradients[name].to(empty.device).contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(gradient, src=0)
    return gradient


def _summary(single: OneProcessResult) -> tuple[Any, ...]:
    """What all ranks know of the one process: losses, then dtype, largest element and noise of each gradient, norms."""
    noisy = single.noisy or single
    pairs = {name: (gradient, noisy.gradients.get(name, gradient)) for name, gradient in single.gradients.items()}
    expected = {name: (g.dtype, largest_of(g), largest_of(other - g)) for name, (g, other) in pairs.items()}
    norm, noisy_norm = (
        math.sqrt(sum(float(as_float64(pair[i]).square().sum()) for pair in pairs.values())) for i in (0, 1)
    )
    return single.losses, noisy.losses, expected, (norm, abs(noisy_norm - norm))


class _Found:
    """What one rank finds: the first difference, the largest deviation that is none, and the gradients of noise."""

    def __init__(self, rank: int, rounding: float) -> None:
        self._rank, self._rounding = rank, rounding
        self._differences: list[tuple[int, int, str]] = []  # position among the numbers compared, rank, sentence
        self._within, self._noisy = 0.0, set[str]()

    def merged(self, mesh: Mesh, num_gradients: int) -> Verdict:
        """What all ranks have found; collective."""
        own = self._differences[:1], self._within, self._noisy
        rows: list[Any] = [own] * mesh.layout.world_size
        if mesh.layout.world_size > 1:
            dist.all_gather_object(rows, own)
        first = min((first for differences, _, _ in rows for first in differences), default=(0, 0, ""))
        noisy = set().union(*(noisy for _, _, noisy in rows))
        return Verdict(first[-1], max(within for _, within, _ in rows), num_gradients, len(noisy))

    def add(
        self,
        order: int,
        what: str,
        actual: Tensor | None,
        expected: Tensor | None,
        noise: float,
        stages: tuple[int, ...] = (),
        smallest: float = 0.0,
    ) -> None:
        """Compare one number, or the full gradient of one parameter, with one process's; None if it has none."""
        if actual is None or expected is None:
            value, was = (math.nan if each is None else largest_of(each) for each in (actual, expected))
            apart, size, noise = 0.0 if actual is expected else math.inf, 1.0, 0.0
        elif not expected.numel():
            return
        else:
            _, was, value, apart = farthest(expected, actual)
            size = largest_of(expected)
            if what.startswith("the gradient") and noise > _NOISE * size:
                self._noisy.add(what)
        unit = size or 1.0
        if apart > max(_FACTOR * noise, self._rounding * size, smallest):
            stage = f"stage {', '.join(map(str, stages))}, " if stages else ""
            text = (
                f"the first step is not that of one process: {what} ({stage}rank {self._rank}) is {_shown(value)} and"
                f" {_shown(was)} in one process; relative difference {apart / unit:.2g}"
                f"{f', noise floor {noise / unit:.2g}' if noise else ''}"
            )
            self._differences.append((order, self._rank, text))
        elif noise <= _NOISE * size and apart > smallest:
            self._within = max(self._within, apart / unit)


def _shown(number: float) -> str:
    return "missing" if math.isnan(number) else f"{number:.10g}"
