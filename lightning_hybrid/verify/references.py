"""The references of a layout: runs in one process, with their noise floor and their reproducibility."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from lightning_hybrid.verify.experiment import Experiment, run_once
from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.one_process.pieces import EVALUATIONS, DataSplit
from lightning_hybrid.verify.one_process.pieces_run import PiecesRun
from lightning_hybrid.verify.one_process.plain_run import PlainRun
from lightning_hybrid.verify.records.compare import Difference, compare
from lightning_hybrid.verify.records.noise import perturbation
from lightning_hybrid.verify.records.record import Failure, RunRecord

# Losses of the full batch and of its microbatches that differ by more mix samples; rounding stays far below.
_MIXES = {"64-true": 1e-7, "32-true": 1e-4}
# A smaller perturbation need not show in runs that are compared in 64 bits.
_LOST_IN_ROUNDING = 1e-14
# A perturbation that shows in a loss of 64 bits, and is lost in one of 32 bits.
_LOST_IN_FLOAT32 = 1e-11


@dataclass
class Reference:
    """A run in one process that a layout is compared with.

    Attributes:
        observed: The record of the run.
        noisy: The record of the same run with perturbed initial weights.
        draws: Whether the module draws random numbers; then they are keyed as the strategies key them.
        irreproducible: The first value in which two equal runs differ.
        precision: Lightning's name of the precision of its numbers.
        notes: Remarks for the user.
        unchanged_loss: The first loss with BatchNorm's statistics over the full batch, if the module has such layers
            and the layout takes them per microbatch.
        failure: The exception that ended the run, if one did.
    """

    observed: RunRecord
    noisy: RunRecord
    draws: bool = False
    irreproducible: Difference | None = None
    precision: str = "64-true"
    notes: list[str] = field(default_factory=list)
    unchanged_loss: float | None = None
    failure: Failure | None = None

    @property
    def depends_on_microbatches(self) -> bool:
        """Whether its numbers depend on how the layout splits a batch."""
        return self.draws or self.observed.has_batch_norm


def data_split_of(experiment: Experiment, layout: Layout) -> DataSplit:
    """The data split of a layout; layouts with the same split have one reference."""
    options = layout.options(experiment.num_microbatches)
    wanted = options.get("num_microbatches", "auto" if layout.strategy_name.startswith("hybrid") else 1)
    count = None if wanted == "auto" else int(wanted)
    # Without stages, evaluation runs on full batches, and training runs the user's step as it is.
    is_plain = layout.strategy_name.startswith("hybrid") and int(options.get("pipeline_parallel_size", 1)) == 1
    unsplit_steps = EVALUATIONS if is_plain else frozenset()
    # Only a count that the strategy chooses depends on the stages.
    num_stages = layout.num_stages if count is None and not is_plain else 1
    splitter, weight = options.get("batch_splitter"), options.get("microbatch_weight")
    return DataSplit(layout.replicas, count, num_stages, splitter, weight, unsplit_steps, plain=is_plain)


def run_plain(experiment: Experiment, data_split: DataSplit) -> Reference:
    """Run the plain Trainer on the batches of all replicas, joined to one, and measure noise and reproducibility."""
    result = _measured(experiment, partial(PlainRun, data_split))
    replicas, count, _ = result.observed.batch
    if result.failure is None and result.observed.has_batch_norm and replicas * count > 1:
        unchanged = PlainRun(data_split, keyed=result.draws, batch_norm=False)
        result.unchanged_loss = first_loss(run_once(experiment, unchanged, only_first_step=True))
    return result


def run_pieces(
    experiment: Experiment,
    data_split: DataSplit,
    plain: Reference | None,
    full_training: bool,
    full_evaluation: bool,
) -> Reference:
    """Run the step on each replica's batch, or on each of its microbatches, and take the mean of their gradients.

    Args:
        experiment: The run.
        data_split: How the layout splits the data.
        plain: The reference that sees the full batch; None where the replicas' batches cannot be joined to one.
        full_training: Whether to train on the replicas' full batches.
        full_evaluation: Whether to evaluate on these.
    """
    make = partial(PiecesRun, data_split, full_training=full_training, full_evaluation=full_evaluation)
    if plain is None:
        return _measured(experiment, make)
    make = partial(make, precision=plain.precision)
    observed = run_once(experiment, make(keyed=plain.draws))
    noisy = run_once(experiment, make(keyed=plain.draws), perturbation=perturbation(plain.precision))
    return replace(plain, observed=observed, noisy=noisy, failure=observed.failure or noisy.failure)


def _measured(experiment: Experiment, make: Callable[..., PlainRun | PiecesRun]) -> Reference:
    """Make a run in this process, and further runs that measure its noise and reproducibility."""
    noise = perturbation(experiment.precision)
    connection = make()
    plain = run_once(experiment, connection)
    result = Reference(plain, plain, precision=experiment.precision, failure=plain.failure)
    if plain.failure is not None:
        return result
    if connection.moved_generators:
        result.draws = True
        result.notes.append("the module draws random numbers: the reference draws them keyed, as the strategy does")
        result.observed = run_once(experiment, make(keyed=True))
    result.noisy = run_once(experiment, make(keyed=result.draws), perturbation=noise)
    # A run whose numbers neither draws nor noise change is that of another time, too.
    may_vary = result.draws or noise > _LOST_IN_ROUNDING or _first_difference(result.noisy, result.observed) is not None
    if may_vary and result.observed.failure is None:
        again = run_once(experiment, make(keyed=result.draws))
        result.irreproducible = _first_difference(again, result.observed)
    if experiment.precision == "64-true" and _computes_in_float32(experiment, make, result):
        result.notes.append("the module computes its loss in float32: its numbers are compared to that precision")
        result.precision, other = "32-true", make(keyed=result.draws)
        result.noisy = run_once(experiment, other, perturbation=perturbation(result.precision))
    result.failure = result.observed.failure or result.noisy.failure
    return result


def _computes_in_float32(
    experiment: Experiment, make: Callable[..., PlainRun | PiecesRun], reference: Reference
) -> bool:
    """Return whether the first loss does not see perturbations of the weights that 64 bits show."""

    def is_equal(run: RunRecord) -> bool:
        first = first_loss(run)
        return first is not None and first == first_loss(reference.observed)

    if not is_equal(reference.noisy):
        return False
    return is_equal(run_once(experiment, make(keyed=reference.draws), perturbation=_LOST_IN_FLOAT32))


def _first_difference(again: RunRecord, first: RunRecord) -> Difference | None:
    """The first value in which two runs differ that should be equal."""
    return next(iter(compare([again], first, first, precision="64-true")), None)


def are_close(loss: float | None, other: float | None, precision: str) -> bool:
    """Whether two losses differ by rounding at most; ``precision`` is Lightning's name of it."""
    if loss is None or other is None:
        return loss is other
    return math.isclose(loss, other, rel_tol=_MIXES.get(precision, 5e-2), abs_tol=1e-12)


def first_loss(run: RunRecord) -> float | None:
    """The loss of the first step; None if the run has failed or has none."""
    return run.steps[0].loss if run.failure is None and run.steps else None
