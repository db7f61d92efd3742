"""The reference of a layout: a run in one process, and what its numbers are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_hybrid.verify.layout_run import Experiment, run_once
from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.one_process.data_split import Cut
from lightning_hybrid.verify.one_process.one_process_run import EVALUATIONS, PartsReference
from lightning_hybrid.verify.records.record_comparison import Difference, compare, perturbation
from lightning_hybrid.verify.records.run_record import Failure, Observed

# Losses of the whole batch and of its parts that differ by more mix samples; rounding stays far below.
_MIXES = {"64-true": 1e-7, "32-true": 1e-4}

# A perturbation that runs which are compared in 64 bits need not show.
_LOST_IN_ROUNDING = 1e-14


@dataclass
class Reference:
    """What a layout is compared with.

    Attributes:
        observed: The run.
        noisy: The same with perturbed initial weights.
        draws: Whether the module draws random numbers; then they are keyed as the strategies key them.
        irreproducible: The first value in which two equal runs differ.
        notes: What the user should know.
        failure: How it failed.
    """

    observed: Observed
    noisy: Observed
    draws: bool = False
    irreproducible: Difference | None = None
    notes: list[str] = field(default_factory=list)
    failure: Failure | None = None


def cut_of(experiment: Experiment, layout: Layout) -> Cut:
    """How a layout cuts the data; layouts that cut alike have one reference."""
    options = layout.options(experiment.num_microbatches)
    wanted = options.get("num_microbatches", "auto" if layout.strategy_name.startswith("hybrid") else 1)
    count = None if wanted == "auto" else int(wanted)
    # Evaluation without stages runs on whole batches, and training steps as they are.
    is_plain = layout.strategy_name.startswith("hybrid") and int(options.get("pipeline_parallel_size", 1)) == 1
    at_once = EVALUATIONS if is_plain else frozenset()
    # Only a count that the strategy chooses depends on the stages.
    num_stages = layout.num_stages if count is None and not is_plain else 1
    splitter, weight = options.get("batch_splitter"), options.get("microbatch_weight")
    return Cut(layout.replicas, count, num_stages, splitter, weight, at_once, plain=is_plain)


def observe_reference(experiment: Experiment, cut: Cut) -> Reference:
    """In one process: run the reference, and runs beside it that show what it is worth.

    Args:
        experiment: What to run.
        cut: How the layout cuts the data.
    """
    noise = perturbation(experiment.precision)
    connection = PartsReference(cut, reseed=1)
    reference = run_once(experiment, connection)
    if reference.failure is not None:
        return Reference(reference, reference, failure=reference.failure)
    result = Reference(reference, reference)
    # A run with other seeds and with perturbed weights that comes to the same numbers shows that neither counts. Where
    # they differ, or are likely to, it takes one run for each to tell which of them does.
    if connection.moved_generators or noise > _LOST_IN_ROUNDING:
        noisy = None
    else:
        noisy = run_once(experiment, PartsReference(cut, reseed=2), perturbation=noise)
    if noisy is None or noisy.failure is not None or _apart(noisy, reference) is not None:
        noisy = None
        if _apart(run_once(experiment, PartsReference(cut, reseed=2)), reference) is not None:
            result.draws = True
            result.notes.append("the module draws random numbers: the reference draws them keyed, as the strategy does")
            result.observed = run_once(experiment, PartsReference(cut, keyed=True))
            result.irreproducible = _apart(run_once(experiment, PartsReference(cut, keyed=True)), result.observed)
    result.noisy = noisy or run_once(experiment, PartsReference(cut, keyed=result.draws), perturbation=noise)
    result.failure = result.observed.failure or result.noisy.failure
    if result.failure is None and not result.draws:
        result.notes += _mixing(experiment, cut, result.observed)
    return result


def _apart(again: Observed, first: Observed) -> Difference | None:
    """The first value in which two runs differ that should be equal."""
    return next(iter(compare([again], first, first, precision="64-true")), None)


def _mixing(experiment: Experiment, cut: Cut, observed: Observed) -> list[str]:
    """Say by how much the mean over the parts misses the whole batch's loss."""
    whole = run_once(experiment, PartsReference(cut, whole=True), only_first_step=True)
    if whole.failure is not None or not whole.steps or not observed.steps:
        return []
    at_once, in_parts = whole.steps[0].loss, observed.steps[0].loss
    if at_once is None or in_parts is None:
        return []
    if math.isclose(at_once, in_parts, rel_tol=_MIXES.get(experiment.precision, 5e-2), abs_tol=1e-12):
        return []
    parts = f"{cut.replicas * (cut.num_microbatches or 1)} microbatches" if cut.num_microbatches else "its microbatches"
    return [f"the objective mixes samples: whole batch {at_once:.6g}, mean of {parts} {in_parts:.6g}"]
