"""The reference of a layout: a run in one process, its noise floor and its reproducibility."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_hybrid.equivalence.without_dropout_mode import WithoutDropoutMode
from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.one_process.data_split_of_layout import DataSplit
from lightning_hybrid.verify.one_process.one_process_run import EVALUATIONS, OneProcessRun
from lightning_hybrid.verify.records.perturb_weights import perturbation
from lightning_hybrid.verify.records.record_comparison import Difference, compare
from lightning_hybrid.verify.records.run_record_and_recorder import Failure, RunRecord
from lightning_hybrid.verify.run_experiment import Experiment, run_once

# If the loss of the full batch and the mean over its microbatches differ by more, the objective mixes samples; rounding
# stays far below.
_MIXES = {"64-true": 1e-7, "32-true": 1e-4}

# A smaller perturbation need not show in runs that are compared in 64 bits.
_LOST_IN_ROUNDING = 1e-14
# A perturbation that shows in a loss of 64 bits, and is lost in one of 32 bits.
_LOST_IN_FLOAT32 = 1e-11


@dataclass
class Reference:
    """The one-process run that a layout is compared with.

    Attributes:
        observed: The record of the run.
        noisy: The record of the same run with perturbed initial weights.
        draws: Whether the module draws random numbers; then they are keyed as the strategies key them.
        irreproducible: The first value in which two equal runs differ.
        precision: Lightning's name of the precision of its numbers.
        notes: Remarks for the user.
        mixing: The remark on a loss of the full batch that differs from the mean over its microbatches, if it does.
        failure: The exception that ended the run, if one did.
    """

    observed: RunRecord
    noisy: RunRecord
    draws: bool = False
    irreproducible: Difference | None = None
    precision: str = "64-true"
    notes: list[str] = field(default_factory=list)
    mixing: str = ""
    failure: Failure | None = None


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


def run_reference(experiment: Experiment, data_split: DataSplit) -> Reference:
    """Run the reference in this process, and further runs that measure its noise and reproducibility."""
    noise = perturbation(experiment.precision)
    connection = OneProcessRun(data_split, reseed=1)
    reference = run_once(experiment, connection)
    if reference.failure is not None:
        return Reference(reference, reference, failure=reference.failure)
    result = Reference(reference, reference, precision=experiment.precision)
    # If a run with other seeds and perturbed weights gives the same numbers, neither matters. Where they differ, or are
    # likely to, one run for each shows which of them does.
    if connection.moved_generators or noise > _LOST_IN_ROUNDING:
        noisy = None
    else:
        noisy = run_once(experiment, OneProcessRun(data_split, reseed=2), perturbation=noise)
    if noisy is None or noisy.failure is not None or _first_difference(noisy, reference) is not None:
        noisy = None
        if _first_difference(run_once(experiment, OneProcessRun(data_split, reseed=2)), reference) is not None:
            result.draws = True
            result.notes.append("the module draws random numbers: the reference draws them keyed, as the strategy does")
            result.observed = run_once(experiment, OneProcessRun(data_split, keyed=True))
            result.irreproducible = _first_difference(
                run_once(experiment, OneProcessRun(data_split, keyed=True)), result.observed
            )
    result.noisy = noisy or run_once(experiment, OneProcessRun(data_split, keyed=result.draws), perturbation=noise)
    if experiment.precision == "64-true" and _computes_in_float32(experiment, data_split, result):
        result.notes.append("the module computes its loss in float32: its numbers are compared to that precision")
        result.precision, other = "32-true", OneProcessRun(data_split, keyed=result.draws)
        result.noisy = run_once(experiment, other, perturbation=perturbation(result.precision))
    result.failure = result.observed.failure or result.noisy.failure
    if result.failure is None:
        mixing = _mixing_without_dropout if result.draws else _mixing_note
        result.mixing = mixing(experiment, data_split, result.observed)
    return result


def _computes_in_float32(experiment: Experiment, data_split: DataSplit, reference: Reference) -> bool:
    """Return whether the first loss does not see perturbations of the weights that 64 bits show."""

    def is_equal(run: RunRecord) -> bool:
        first = [each.steps[0].loss for each in (run, reference.observed) if each.steps and each.failure is None]
        return len(first) == 2 and first[0] is not None and first[0] == first[1]

    if not is_equal(reference.noisy):
        return False
    other = OneProcessRun(data_split, keyed=reference.draws)
    return is_equal(run_once(experiment, other, perturbation=_LOST_IN_FLOAT32))


def _first_difference(again: RunRecord, first: RunRecord) -> Difference | None:
    """The first value in which two runs differ that should be equal."""
    return next(iter(compare([again], first, first, precision="64-true")), None)


def _mixing_note(experiment: Experiment, data_split: DataSplit, observed: RunRecord) -> str:
    """Say by how much the mean over the microbatches differs from the loss of the full batch."""
    full_batch = run_once(experiment, OneProcessRun(data_split, unsplit=True), only_first_step=True)
    if full_batch.failure is not None or not full_batch.steps or not observed.steps:
        return ""
    unsplit, mean = full_batch.steps[0].loss, observed.steps[0].loss
    if unsplit is None or mean is None:
        return ""
    if are_close(unsplit, mean, experiment.precision):
        return ""
    count = data_split.num_microbatches
    of = f"{data_split.replicas * count} microbatches" if count else "its microbatches"
    return f"the objective mixes samples: full batch {unsplit:.6g}, mean of {of} {mean:.6g}"


def _mixing_without_dropout(experiment: Experiment, data_split: DataSplit, _: RunRecord) -> str:
    """The same for a module that draws random numbers: with dropout off, if nothing else draws."""
    with WithoutDropoutMode():
        connections = [OneProcessRun(data_split, reseed=seed) for seed in (1, 2)]
        runs = [run_once(experiment, connection, only_first_step=True) for connection in connections]
        losses = [run.steps[0].loss if run.failure is None and run.steps else None for run in runs]
        if losses[0] is None or losses[0] != losses[1] or any(one.moved_generators for one in connections):
            return (
                "not compared: whether the objective mixes samples, since the module draws random numbers beside those"
                " of dropout"
            )
        note = _mixing_note(experiment, data_split, runs[0])
    return f"{note}; with dropout off" if note else ""


def are_close(loss: float, other: float, precision: str) -> bool:
    """Whether two losses differ by rounding at most; ``precision`` is Lightning's name of it."""
    return math.isclose(loss, other, rel_tol=_MIXES.get(precision, 5e-2), abs_tol=1e-12)
