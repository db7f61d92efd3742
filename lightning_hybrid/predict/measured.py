"""`corrected`: costs whose predictions are corrected by the measured steps of a run of the same model."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_hybrid.predict.correction import COMMUNICATION, OPTIMIZER, Correction, LinearCorrection
from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.hardware import Hardware, preset_names
from lightning_hybrid.predict.layout import NumberFormat, PlanLayout, layout_from_options, number_format_of, spelled
from lightning_hybrid.predict.memory import predict_memory
from lightning_hybrid.predict.plans import Plan, PredictedTime
from lightning_hybrid.predict.search import cluster_of
from lightning_hybrid.predict.time import predict_time
from lightning_hybrid.schedule.measured.lost_time import TimeByCause
from lightning_hybrid.schedule.measured.seconds import MeasuredCosts, load_measured_costs
from lightning_hybrid.text import columns, counted, sized, timed

FIRST_STEPS = 3  # of a run, which are slower than the others: lazy states, caches, compilation
FEWEST_STEPS = 3  # whose spread is known
LEAST_SHARE = 0.05  # of a predicted step, below which communication has no factor above 1
LEAST_FACTOR, LARGEST_FACTOR = 0.1, 10.0
LEAST_MEMORY_FACTOR, LARGEST_MEMORY_FACTOR = 0.5, 2.0
_SAME_SAMPLES = 0.1  # relative difference of the elements of a sample


class _NotUsed(Exception):
    """A measurement says nothing about a plan; the reason."""


def corrected(
    costs: ModelCosts, number_format: NumberFormat, hardware: Hardware, path: str | Path | None
) -> ModelCosts:
    """Return the costs with the correction by a file of measured costs, if there is one that can be used.

    A note says what it corrects, or why it is not used.
    """
    try:
        measured = None if path is None else load_measured_costs(path)
    except FileNotFoundError:
        measured = None
    except (OSError, ValueError) as error:
        return dataclasses.replace(costs, notes=(*costs.notes, f"measured costs are not used: {error}"))
    return costs if measured is None else corrected_by(costs, number_format, hardware, measured, str(path))


def corrected_by(
    costs: ModelCosts, number_format: NumberFormat, hardware: Hardware, measured: MeasuredCosts, source: str
) -> ModelCosts:
    """Return the costs with the correction by measured costs, or with a note that says why these are not used.

    The corrected prediction of the measured layout is what was measured.
    """
    try:
        _check(costs, number_format, hardware, measured)
        correction, words = _correction(costs, number_format, hardware, measured)
    except _NotUsed as reason:
        note = f"the measured costs of {source} are not used: {reason}"
        return dataclasses.replace(costs, notes=(*costs.notes, note))
    note = f"predictions are corrected by the measured costs of {source}: {words}"
    return dataclasses.replace(costs, correction=correction, notes=(*costs.notes, note))


def _check(costs: ModelCosts, number_format: NumberFormat, hardware: Hardware, measured: MeasuredCosts) -> None:
    """Refuse measured costs of another model, precision or device, or of too few steps."""
    model: Mapping[str, Any] = measured.model
    if model.get("parameters", costs.parameters) != costs.parameters:
        raise _NotUsed(
            f"the measured {model.get('name', 'model')} has {model['parameters']:,} parameters, and the planned"
            f" {costs.name} has {costs.parameters:,}"
        )
    if costs.names_checksum and model.get("names_checksum", costs.names_checksum) != costs.names_checksum:
        raise _NotUsed(f"the parameters of the measured {model.get('name', 'model')} have other names")
    elements = model.get("sample_elements", 0.0)
    if costs.sample_elements and elements and abs(elements / costs.sample_elements - 1.0) > _SAME_SAMPLES:
        raise _NotUsed(
            f"the tensors of a measured sample have {elements:,.0f} elements, and those of a planned one"
            f" {costs.sample_elements:,.0f}"
        )
    precision = measured.software.get("precision", "")
    try:
        products = number_format_of(precision).products
    except ValueError as error:
        raise _NotUsed(str(error)) from error
    if products != number_format.products:
        raise _NotUsed(f"it was measured with precision {precision}, and the plan is for {number_format.name}")
    device, planned = _kind_of_device(measured.hardware), hardware.name.split("-")[0]
    if device and planned in _kinds() and device != planned:
        raise _NotUsed(f"it was measured on {measured.hardware.get('device', device)}, the plan is for {hardware.name}")


def _kinds() -> set[str]:
    return {name.split("-")[0] for name in preset_names()}


def _kind_of_device(hardware: Mapping[str, Any]) -> str | None:
    """The presets of a measured device have names that begin so; None if it has none."""
    if hardware.get("device_type") == "cpu":
        return "cpu"
    name = str(hardware.get("device", "")).lower()
    return next((kind for kind in sorted(_kinds()) if re.search(rf"\b{kind}\b", name)), None)


def measured_layout(measured: MeasuredCosts) -> PlanLayout:
    """Return the layout of a measured run.

    Raises:
        ValueError: Its batch is unknown, or it ran in another way than its options say.
    """
    sizes = measured.layout
    data = sizes["dp_replicate"] * sizes["dp_shard"]
    if measured.batch_size is None:
        raise ValueError("the number of samples of its batches is unknown")
    if sizes["pp"] > 1 and not measured.stages:
        raise ValueError("its layers were sharded over pipeline ranks in place of stages")
    options = {
        **measured.options,
        "data_parallel_size": data,
        "pipeline_parallel_size": sizes["pp"],
        "tensor_parallel_size": sizes["tp"],
        "context_parallel_size": sizes["cp"],
        "expert_parallel_size": sizes["ep"],
        "num_microbatches": measured.num_microbatches,
    }
    ranks = data * sizes["pp"] * sizes["tp"] * sizes["cp"]
    return layout_from_options(options, ranks, measured.batch_size * data)


def usable_steps(measured: MeasuredCosts) -> list[TimeByCause]:
    """Return the measured steps but the first three of the run, the shortest first."""
    steps = [
        time
        for step, time in zip(measured.steps, measured.step_times, strict=True)
        if step >= measured.first_step + FIRST_STEPS
    ]
    return sorted(steps, key=lambda time: time.step_seconds)


def median_step(steps: Sequence[TimeByCause]) -> TimeByCause:
    """Return the median of steps that are sorted; the shorter one of two."""
    return steps[(len(steps) - 1) // 2]


def _correction(
    costs: ModelCosts, number_format: NumberFormat, hardware: Hardware, measured: MeasuredCosts
) -> tuple[Correction, str]:
    """Return the correction, and what it does in words."""
    try:
        steps, layout = usable_steps(measured), measured_layout(measured)
        hosts = measured.hardware.get("num_hosts", 1)
        cluster = cluster_of(hardware, max(1, layout.ranks // hosts), hosts)
        predicted = predict_time(costs, layout, number_format, cluster)
        memory = predict_memory(costs, layout, number_format, cluster)
    except KeyError as error:
        raise _NotUsed(f"it does not say {error}") from error
    except ValueError as error:
        raise _NotUsed(str(error)) from error
    if not steps:
        raise _NotUsed(
            f"it has no step after the first {FIRST_STEPS} of its run; set step={FIRST_STEPS + 1} or more of"
            " PipelineTimeline"
        )
    step = median_step(steps)
    correction = _of_time(layout, predicted, step)
    if len(steps) >= FEWEST_STEPS:
        spread = statistics.fmean(abs(each.step_seconds / step.step_seconds - 1.0) for each in steps)
        correction = dataclasses.replace(correction, spread=spread)
    of_memory, about_memory = _of_memory(memory.tensors, max(measured.peak_memory, default=0))
    correction = dataclasses.replace(correction, memory=of_memory)
    words = (
        f"{timed(step.step_seconds)} of a step (median of {counted(len(steps), 'step')}) against"
        f" {timed(predicted.seconds)} predicted,"
        f" {spelled(layout)}; {_words(correction)}{about_memory}"
    )
    return correction, words


def _of_memory(predicted: float, peak: float) -> tuple[LinearCorrection | None, str]:
    """Return the correction of bytes of tensors, and its words; None where they were not measured, or are too few."""
    if not peak:
        return None, "; memory was not measured, as MemoryMonitor does"
    both = f"{sized(peak)} of tensors measured against {sized(predicted)} predicted"
    if peak < LEAST_MEMORY_FACTOR * predicted:
        return None, f"; memory is not corrected: {both}"
    linear = _linear(predicted, peak, LARGEST_MEMORY_FACTOR)
    added = f" and {sized(linear.added)} more" if linear.added else ""
    return linear, f"; memory x {linear.factor:.3g}{added}: {both}"


def _of_time(layout: PlanLayout, predicted: PredictedTime, step: TimeByCause) -> Correction:
    """Return the correction by which the predicted time of a layout becomes the measured one.

    Gaps of the host, and actions that vary, are seconds that every step has. So is communication where little was
    predicted; otherwise it has a factor. Layers and communication have one factor where it runs within forwards and
    backwards: with gathers of ZeRO-3, and where less than a tenth of what was predicted is seen outside of them.
    """
    terms = predicted.terms
    communicated, optimizer = (sum(terms.get(name, 0.0) for name in names) for names in (COMMUNICATION, OPTIMIZER))
    computed = sum(terms.values()) - communicated - optimizer
    worked, gaps = step.work + step.bubble + step.imbalance, step.variation + step.other
    if layout.shards("parameters") or step.communication < LEAST_FACTOR * communicated:
        computation = _linear(computed + communicated, worked + step.communication)
        communication = LinearCorrection(computation.factor)
    else:
        computation = _linear(computed, worked)
        is_small = communicated < LEAST_SHARE * predicted.seconds and communicated < step.communication
        communication = _linear(communicated, step.communication, 1.0 if is_small else LARGEST_FACTOR)
    if computation.factor < LEAST_FACTOR:
        raise _NotUsed(
            f"its step took {timed(step.step_seconds)} against {timed(predicted.seconds)} predicted,"
            f" {spelled(layout)}, and its layers less than a tenth of their time; give the hardware that it ran on"
        )
    computation = LinearCorrection(computation.factor, computation.added + gaps)
    return Correction(layout, computation, communication, _linear(optimizer, step.optimizer, 1.0), step.input)


def _linear(predicted: float, measured: float, largest: float = LARGEST_FACTOR) -> LinearCorrection:
    """Return the correction of a predicted value to the measured one: a factor up to a limit, and the rest."""
    if measured <= largest * predicted:
        return LinearCorrection(measured / predicted if predicted else 1.0)
    factor = largest if predicted else 1.0
    return LinearCorrection(factor, measured - factor * predicted)


def _words(correction: Correction) -> str:
    computation, communication = correction.computation, correction.communication
    words = [f"times of layers x {computation.factor:.3g}, of communication x {communication.factor:.3g}"]
    optimizer = correction.optimizer
    words.append(
        f"{timed(optimizer.added)} more of the optimizer"
        if optimizer.added
        else f"of the optimizer x {optimizer.factor:.3g}"
    )
    words.append(f"{timed(correction.input_seconds)} of input")
    words.append(f"{timed(correction.unexplained_seconds)} that no factor explains")
    if correction.spread is None:
        words.append(f"of fewer than {FEWEST_STEPS} steps, so that the error bar of time stays")
    return ", ".join(words)


def compared_lines(plan: Plan, measured: MeasuredCosts) -> list[str]:
    """Return the predicted and the measured time of a step by term, the memory, and the errors of the prediction."""
    assert plan.time is not None
    try:
        layout = measured_layout(measured)
    except ValueError as error:
        return [f"the step is not compared with its plan: {error}"]
    if (spelled(layout), layout.batch) != (spelled(plan.layout), plan.layout.batch):
        of = f"{spelled(plan.layout)} with {plan.layout.batch} samples"
        return [f"the step is not compared with its plan, {of}: it ran as {spelled(layout)} with {layout.batch}"]
    steps = usable_steps(measured)
    step = median_step(steps) if steps else measured.step
    terms = dict(plan.time.terms)
    communication, optimizer = (sum(terms.pop(name, 0.0) for name in names) for names in (COMMUNICATION, OPTIMIZER))
    waits = terms.pop("input", 0.0)
    work = step.work + step.bubble + step.imbalance + step.variation + step.other
    values = [
        ("layers, with the bubble", sum(terms.values()), work),
        ("communication", communication, step.communication),
        ("optimizer", optimizer, step.optimizer),
        ("input", waits, step.input),
        ("step", plan.time.seconds, step.step_seconds),
    ]
    rows = [("", "predicted", "measured", "error")]
    rows += [(name, timed(own), timed(real), _error(own, real)) for name, own, real in values]
    if peak := max(measured.peak_memory, default=0):
        tensors = plan.memory.tensors
        rows.append(("memory of tensors", sized(tensors), sized(peak), _error(tensors, peak)))
    relative = plan.time.seconds / step.step_seconds - 1.0
    few = "" if steps else ", one of the first steps of the run, which are slower than the others"
    return [
        f"predicted {timed(plan.time.seconds)} ± {plan.time_error:.0%} of a step, measured"
        f" {timed(step.step_seconds)}{few}: the error of the prediction is {relative:+.0%}",
        *columns(rows),
    ]


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1.0:+.0%}" if predicted and measured else ""
