"""The references of a layout: runs in one process, with their noise floor, and which of them a layout equals.

The plain step on the full batch is the rule. Three things are documented to be otherwise: a replica's loss is that of
its own batch, as under DDP; an objective that mixes samples is the mean over microbatches, as in gradient accumulation;
and a buffer that the step writes is written once per microbatch. The second counts only where the plain step gives
another loss, and both numbers are named. A mean over tokens, or over the entries of a mask, is no such objective: its
microbatches can be weighted, so it must be that of the full batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lightning_hybrid.text import contrasted
from lightning_hybrid.verify.compare import Difference, Margin, as_float64, compare, is_step_number
from lightning_hybrid.verify.data import EVALUATIONS, DataSplit
from lightning_hybrid.verify.experiment import Experiment, run_once
from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.pieces import PiecesRun
from lightning_hybrid.verify.plain import PlainRun
from lightning_hybrid.verify.record import Failure, RunRecord, perturbation

# Losses of the full batch and of its microbatches that differ by more mix samples; rounding stays far below.
_MIXES = {"64-true": 1e-7, "32-true": 1e-4}
# A smaller perturbation need not show in runs that are compared in 64 bits.
_LOST_IN_ROUNDING = 1e-14
# A perturbation that shows in a loss of 64 bits, and is lost in one of 32 bits.
_LOST_IN_FLOAT32 = 1e-11
_UNWEIGHTED = (
    "other weights of the microbatches make it that of the full batch, as for a mean over the entries of a mask: pass"
    " microbatch_weight=function(microbatch) -> count"
)


@dataclass
class Reference:
    """A run in one process that a layout is compared with."""

    observed: RunRecord  # the record of the run
    noisy: RunRecord  # the record of the same run with perturbed initial weights
    draws: bool = False  # whether the module draws random numbers; then they are keyed as the strategies key them
    irreproducible: Difference | None = None  # the first value in which two equal runs differ
    precision: str = "64-true"  # Lightning's name of the precision of its numbers
    notes: list[str] = field(default_factory=list)  # remarks for the user
    # the first loss with BatchNorm's statistics over the full batch, if the module has such layers and the layout takes
    # them per microbatch
    unchanged_loss: float | None = None
    failure: Failure | None = None  # the exception that ended the run, if one did

    @property
    def depends_on_microbatches(self) -> bool:
        """Whether its numbers depend on how the layout splits a batch."""
        return self.draws or self.observed.has_batch_norm


def data_split_of(experiment: Experiment, layout: Layout) -> DataSplit:
    """The data split of a layout; layouts with the same split have one reference."""
    options, is_hybrid = layout.options(experiment.num_microbatches), layout.strategy_name.startswith("hybrid")
    wanted = options.get("num_microbatches", "auto" if is_hybrid else 1)
    count = None if wanted == "auto" else int(wanted)
    # Without stages, evaluation runs on full batches, and training runs the user's step as it is.
    is_plain = is_hybrid and int(options.get("pipeline_parallel_size", 1)) == 1
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

    ``plain`` is the reference that sees the full batch; None where the replicas' batches cannot be joined to one.
    """
    make = partial(PiecesRun, data_split, full_training=full_training, full_evaluation=full_evaluation)
    if plain is None:
        return _measured(experiment, make)
    make = partial(make, precision=plain.precision, keyed=plain.draws)
    observed = run_once(experiment, make())
    noisy = run_once(experiment, make(), perturbation=perturbation(plain.precision))
    return replace(plain, observed=observed, noisy=noisy, failure=observed.failure or noisy.failure)


def _measured(experiment: Experiment, make: Callable[..., PlainRun]) -> Reference:
    """Make a run in this process, and further runs that measure its noise and reproducibility."""
    noise, connection = perturbation(experiment.precision), make(until_drawn=True)
    plain = run_once(experiment, connection)
    result = Reference(plain, plain, precision=experiment.precision)

    def again(size: float) -> RunRecord:
        return run_once(experiment, make(keyed=result.draws), perturbation=size)

    if connection.moved_generators:
        result.draws = True
        result.notes.append("the module draws random numbers: the reference draws them keyed, as the strategy does")
        result.observed = again(0.0)
    if (failure := result.observed.failure) is not None:
        return replace(result, failure=failure)
    result.noisy = again(noise)
    # A run whose numbers neither draws nor noise change is that of another time, too.
    may_vary = result.draws or noise > _LOST_IN_ROUNDING or _first_difference(result.noisy, result.observed) is not None
    if may_vary:
        result.irreproducible = _first_difference(again(0.0), result.observed)
    first = first_loss(result.observed)
    # A first loss that does not see perturbations of the weights that 64 bits show.
    is_coarse = experiment.precision == "64-true" and first is not None and first == first_loss(result.noisy)
    if is_coarse and first == first_loss(again(_LOST_IN_FLOAT32)):
        result.notes.append("the module computes its loss in float32: its numbers are compared to that precision")
        result.precision = "32-true"
        result.noisy = again(perturbation(result.precision))
    result.failure = result.noisy.failure
    return result


def _first_difference(again: RunRecord, first: RunRecord) -> Difference | None:
    """The first value in which two runs differ that should be equal."""
    return next(iter(compare([again], first, first, precision="64-true")), None)


def first_loss(run: RunRecord) -> float | None:
    """The loss of the first step; None if the run has failed or has none."""
    return run.steps[0].loss if run.failure is None and run.steps else None


# -- which of them a layout equals -------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """A layout beside one reference."""

    reference: Reference  # the reference
    differences: list[Difference] = field(default_factory=list)  # the values that differ, the earliest first
    declared: list[Difference] = field(default_factory=list)  # logged numbers that the run itself says to differ
    margins: list[Margin] = field(default_factory=list)  # those that differ by rounding
    # what the reference has that the plain step on the full batch has not
    notes: list[str] = field(default_factory=list)
    advice: str = ""  # what to do if the layout differs; the end of a sentence

    @property
    def is_same(self) -> bool:
        """Whether no value differs but metrics, among them a plain number that a step has logged.

        Such a number may be a mean over microbatches. Where none differs, no metric has a reason to.
        """
        numbers = self.reference.observed.step_numbers
        keys = [difference.key for difference in self.differences]
        is_metric = all(key.what.startswith("metric") for key in keys)
        return not keys or (is_metric and any(is_step_number(key, numbers) for key in keys))


class Judge:
    """Compares one layout with the plain step, and where it differs, with what is documented to differ."""

    def __init__(
        self,
        ranks: Sequence[RunRecord],
        plain: Reference | None,
        data_split: DataSplit,
        pieces: Callable[[bool, bool], Reference],
    ) -> None:
        """Set up the comparison.

        ``plain`` is None where the replicas' batches cannot be joined to one. ``pieces`` makes the reference that
        trains, and evaluates, on full batches of replicas or on microbatches.
        """
        self._ranks, self._plain, self._pieces, self._replicas = ranks, plain, pieces, data_split.replicas
        is_split = data_split.num_microbatches != 1
        self._splits_training = is_split or data_split.shares > 1
        self._splits_evaluation = is_split and not data_split.unsplit_steps >= EVALUATIONS
        self._made: dict[tuple[bool, bool], Comparison | None] = {}
        self._declared = {name: text for rank in ranks for name, text in rank.declared.items()}

    def comparison(self) -> Comparison:
        """The reference that the layout equals; the one with the fewest differences if it equals none."""
        candidates = [] if self._plain is None else [self.beside(self._plain)]
        if not candidates or (candidates[0].differences and self._replicas > 1):
            own = self._with_pieces(True, True)
            if own is not None:
                candidates.append(own)
                self._name(own, candidates[0])
        if self._splits_training and not any(one.is_same for one in candidates):
            split = self._with_pieces(False, True)
            mixing = None if split is None else split.reference.observed.mixing
            if split is not None and mixing is not None and not mixing.is_weighted:
                split.notes.append(str(mixing))
                candidates.append(split)
            elif split is not None and mixing is not None and split.is_same:
                candidates[-1].advice = f"; {mixing}, and {_UNWEIGHTED}"
            elif split is not None and split.is_same and (name := self._written_buffer(split.reference)):
                split.notes.append(f"the step writes the buffer {name!r} once per microbatch")
                candidates.append(split)
        best = min(candidates, key=lambda one: (not one.is_same, len(one.differences)))
        if best.is_same and best.differences:
            self._explain(best)
        best.notes += [
            f"metric {name} is not the batch's, and the run says so: {text}"
            for name, text in self._declared.items()
            if any(is_step_number(each.key, {name}) for each in best.declared)
        ]
        return best

    def _written_buffer(self, split: Reference) -> str:
        """A buffer that microbatches leave with another content than the full batch does; empty if there is none."""
        full = {} if self._plain is None else self._plain.observed.buffers
        tolerance = _MIXES.get(split.precision, 5e-2)

        def is_equal(value: Tensor, other: Tensor | None) -> bool:
            return other is not None and torch.allclose(as_float64(value), as_float64(other), rtol=tolerance)

        return next((name for name in full if not is_equal(full[name], split.observed.buffers.get(name))), "")

    def _explain(self, best: Comparison) -> None:
        """Drop plain numbers that steps have logged, where they are means over replicas' batches or microbatches."""
        first = best.differences[0]
        is_split = best is self._made.get((False, True))
        kinds = ((False, False),) if is_split else ((True, True), (True, False), (False, True), (False, False))
        for training, evaluation in kinds:
            exists = self._replicas > 1 or not (training and evaluation)
            exists &= (training or self._splits_training) and (evaluation or self._splits_evaluation)
            other = self._with_pieces(training, evaluation) if exists and best.differences else None
            if other is not None:
                differing = {difference.key for difference in other.differences}
                best.differences = [each for each in best.differences if each.key in differing]
        if not best.differences:
            full, mean = contrasted(first.reference, first.value)
            best.notes.append(
                f"{first.key} is {full} over the full batch, and {mean} as the mean over its"
                " parts: plain numbers that a step logs are means over replicas and microbatches"
            )

    def _with_pieces(self, training: bool, evaluation: bool) -> Comparison | None:
        """Compare with a run on full batches of replicas, or on microbatches; None if that does not run."""
        if (training, evaluation) not in self._made:
            reference = self._pieces(training, evaluation)
            self._made[training, evaluation] = None if reference.failure else self.beside(reference)
        return self._made[training, evaluation]

    def beside(self, reference: Reference) -> Comparison:
        """Compare the layout with one reference."""
        result, precision = Comparison(reference), reference.precision
        records = self._ranks, reference.observed, reference.noisy
        for each in compare(*records, precision=precision, margins=result.margins):
            is_declared = is_step_number(each.key, self._declared) and not math.isnan(each.value)
            (result.declared if is_declared else result.differences).append(each)
        return result

    def _name(self, own: Comparison, plain: Comparison) -> None:
        """Note the first loss over all samples and as the mean over replicas, if they differ."""
        full, mean = (first_loss(one.reference.observed) for one in (plain, own))
        tolerance = _MIXES.get(plain.reference.precision, 5e-2)
        if full is None or mean is None or math.isclose(full, mean, rel_tol=tolerance, abs_tol=1e-12):
            return
        of_batch, of_replicas = contrasted(full, mean)
        own.notes.append(
            f"each replica's loss is that of its own batch, as under DDP: full batch {of_batch}, mean of"
            f" {self._replicas} replicas {of_replicas}"
        )
