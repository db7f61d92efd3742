"""Bytes of each pipeline rank at the peak of a step: `predict_memory`.

Sums of tensors after Rajbhandari et al. (arXiv 1910.02054, model states by ZeRO stage) and Korthikanti et al. (arXiv
2205.05198, section 4, activations by recomputation and position in the pipeline), and the few terms that these leave
out: what the backward of one layer needs besides, buckets of reductions, 32-bit copies of 16-bit gradients in the
optimizer's step, fragmentation, and what the framework takes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.predict.costs.cut import stages_by_rank
from lightning_hybrid.predict.costs.layers import (
    LayerCosts,
    ModelCosts,
    Parameters,
    layout_of_layer,
    parameters_of_rank,
)
from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layout import NumberFormat, PlanLayout
from lightning_hybrid.predict.plans import PredictedMemory
from lightning_hybrid.predict.techniques.order import PLANNED, elsewhere, sharded_kinds
from lightning_hybrid.schedule.actions import Action, Kind
from lightning_hybrid.schedule.generators import SCHEDULE_NAMES, make_schedule


@dataclass(frozen=True)
class MemoryConstants:
    """What a device holds besides what the sums of tensors give.

    Attributes:
        fragmentation: Bytes that the allocator reserves but no tensor takes, relative to those that tensors take.
        loss_gradients: Gradients of the logits held at once: of the loss and of its softmax.
        reclaimed: Share of the fragments that the allocator gives back when memory is short.
        bucketed: Elements of gradients in the buckets of reductions over replicas; of fewer gradients, half of them.
    """

    fragmentation: float = 0.12
    loss_gradients: float = 2.0
    reclaimed: float = 0.7
    bucketed: float = 1e9


CONSTANTS = MemoryConstants()


Stage = Sequence[tuple[LayerCosts, int]]
_V_WARM_UP = {"zero_bubble_v": 0, "dualpipe_v": 1}  # microbatches of a rank's first stage beyond those of ZB-V


def predict_memory(
    costs: ModelCosts,
    layout: PlanLayout,
    number_format: NumberFormat,
    hardware: Hardware,
    constants: MemoryConstants = CONSTANTS,
) -> PredictedMemory:
    """Predict the bytes that each pipeline rank holds at the peak of a step.

    Args:
        costs: The model.
        layout: How it is laid out.
        number_format: Bytes of parameters, gradients, states and activations.
        hardware: The device.
        constants: Of the model.

    Raises:
        ValueError: The model has fewer layers than the layout has stages.
    """
    in_flight = in_flight_by_rank(layout.schedule, layout.pipeline, layout.num_microbatches, layout.stages_per_rank)
    ranks, reclaimable = [], []
    for rank, stages in enumerate(stages_by_rank(costs, layout)):
        held = list(stages.values())
        has_loss = layout.num_stages - 1 in stages
        has_copy = costs.has_tied_embedding and has_loss and 0 not in stages
        terms = _states(held, costs, has_copy, layout, number_format, constants)
        gathered = _gathered(list(itertools.chain.from_iterable(held)), layout, number_format, _trained(costs))
        terms |= _activations(held, in_flight[rank], has_loss, gathered, layout, number_format, constants)
        later = _drop_what_comes_later(terms, layout)
        fragments = constants.fragmentation * sum(terms.values())
        backward = sum(terms[term] for term in ("activations", "loss", "gathered", "communication buffers"))
        terms["framework"] = hardware.reserved + fragments
        ranks.append(terms)
        reclaimable.append(constants.reclaimed * fragments + min(backward - later, terms["optimizer step"]))
    return PredictedMemory(tuple(ranks), hardware.memory, tuple(reclaimable))


def _drop_what_comes_later(terms: dict[str, float], layout: PlanLayout) -> float:
    """With one microbatch, gradients grow while activations shrink: remove the smaller from ``terms``.

    Returns:
        Bytes of gradients that are there in the optimizer's step, but no longer in ``terms``.
    """
    if layout.num_microbatches > 1 or (layout.data > 1 and "states" not in sharded_kinds(layout)):
        return 0.0  # gradients of earlier microbatches, or the buckets of which gradients are views
    gradients = terms["gradients"] + terms["communication buffers"]
    if gradients > terms["activations"] + terms["loss"]:
        terms["activations"] = terms["loss"] = 0.0
        return 0.0
    later = terms["gradients"]
    terms["gradients"] = terms["communication buffers"] = 0.0
    return later


def _states(
    stages: Sequence[Stage],
    costs: ModelCosts,
    has_copy: bool,
    layout: PlanLayout,
    number_format: NumberFormat,
    constants: MemoryConstants,
) -> dict[str, float]:
    """Bytes of parameters, gradients and states of one rank, and of buckets of reductions.

    ``has_copy`` tells whether the rank computes with a copy of the tied embedding, whose owner is the first rank.
    """
    layers = [(layer, count) for stage in stages for layer, count in stage]
    trained = _trained(costs)
    held = parameters_of_rank(layers, layout)
    if has_copy:
        held = Parameters(held.dense + costs.layers[0].sharded_parameters / layout.tensor, held.routed)
    kinds = sharded_kinds(layout)
    sharded = held.over_shards(layout).total
    parameters = sharded if "parameters" in kinds else held.total
    gradients = (sharded if "gradients" in kinds else held.total) * trained
    states = (sharded if "states" in kinds else held.total) * trained
    terms = {
        "parameters": parameters * (number_format.parameter + number_format.compute_copy),
        "gradients": gradients * number_format.gradient,
        "optimizer states": states * number_format.state,
        "optimizer step": states * number_format.step,
        "communication buffers": 0.0,
    }
    for term in elsewhere(layout) & terms.keys():
        terms[term] = 0.0
    # Gradients that are reduced in each microbatch go layer by layer: see `_gathered`.
    if any(each.reduces_in_buckets(layout) for each in PLANNED):
        terms["communication buffers"] = min(constants.bucketed, held.total * trained / 2) * number_format.reduced
    return terms


class _Gathered(NamedTuple):
    """Bytes of full parameters and gradients that are there for a moment.

    Attributes:
        always: Of the whole step: parameters that are not resharded.
        layer: Besides, in a layer's backward: its parameters and those of the next one, and its gradients.
    """

    always: float
    layer: float


def _gathered(layers: Stage, layout: PlanLayout, number_format: NumberFormat, trained: float) -> _Gathered:
    is_gathered = any(each.gathers(layout) for each in PLANNED)
    is_reduced = any(each.reduces_by_layer(layout) for each in PLANNED)
    largest = max(parameters_of_rank([(layer, 1)], layout).total for layer, _ in layers)
    element = number_format.gathered if is_gathered else 0
    gradient = (number_format.gathered if is_gathered else number_format.gradient) * trained if is_reduced else 0.0
    if is_gathered and not layout.reshard_after_forward:
        return _Gathered(parameters_of_rank(layers, layout).total * element, largest * gradient)
    return _Gathered(0.0, largest * (2 * element + gradient))


def _activations(
    stages: Sequence[Stage],
    in_flight: Sequence[int],
    has_loss: bool,
    gathered: _Gathered,
    layout: PlanLayout,
    number_format: NumberFormat,
    constants: MemoryConstants,
) -> dict[str, float]:
    """Bytes saved for the backward by all microbatches in flight, and by one layer's backward, or the loss."""
    saved = one_layer = loss = waiting = 0.0
    for stage, microbatches in zip(stages, in_flight, strict=True):
        for layer, count in stage:
            samples = layout.microbatch / (layout.tensor * layout_of_layer(layer, layout).context)
            kept, full = _saved(layer, layout, number_format), _saved_bytes(layer, layout, number_format, "none")
            if not (layout.forwards and layer.repeats):
                saved += count * _autocast_copies(layer, layout, number_format)
            # Where activations are on the host, those of two layers are on the device.
            saved = max(saved, 2 * kept) if "activations" in elsewhere(layout) else saved + microbatches * count * kept
            one_layer = max(one_layer, full - kept)
            if layout.chunked_loss and (layer.float32_saved or layer.loss_saved):
                continue
            logit = max(4, number_format.activation)
            copies = number_format.activation if number_format.activation < 4 else 0
            in_loss = layer.float32_saved * (logit + copies) + layer.peak_only * logit * constants.loss_gradients
            loss = max(loss, in_loss * samples)
            waiting += (microbatches - 1) * layer.float32_saved * logit * samples
        if not (has_loss and stage is stages[-1]):  # what was sent on is held until its gradient is back
            saved += microbatches * _outputs(stage[-1][0], layout, number_format)
    if layout.pipeline > 1:
        saved += 2 * _outputs(stages[0][-1][0], layout, number_format)
    if loss >= one_layer + gathered.layer:
        return {"activations": saved, "loss": waiting + loss, "gathered": gathered.always}
    return {"activations": saved + one_layer, "loss": waiting, "gathered": gathered.always + gathered.layer}


def _trained(costs: ModelCosts) -> float:
    """Share of the parameters that take gradients."""
    return 1.0 - costs.frozen_parameters / max(costs.parameters, 1)


def _autocast_copies(layer: LayerCosts, layout: PlanLayout, number_format: NumberFormat) -> float:
    """Bytes of a layer's parameters in the format of products, which autocast makes and saves for the backward."""
    is_autocast = number_format.parameter > number_format.activation and not number_format.compute_copy
    if not is_autocast or number_format.gathered <= number_format.activation:
        return 0.0  # ZeRO gathers that format
    return parameters_of_rank([(layer, 1)], layout).total * number_format.activation


def _saved(layer: LayerCosts, layout: PlanLayout, number_format: NumberFormat) -> float:
    kept = [each.keeps(layout) for each in PLANNED] if layer.repeats else []
    policy = next((each for each in kept if each != "none"), "none")
    return _saved_bytes(layer, layout, number_format, policy)


def _saved_bytes(layer: LayerCosts, layout: PlanLayout, number_format: NumberFormat, policy: str) -> float:
    """Bytes that one layer saves for the backward of one microbatch, besides logits of a loss."""
    if policy == "full":
        return _repeat_saved(layer, layout, number_format)
    layout = layout_of_layer(layer, layout)
    sharded = (layer.selective_saved if policy == "selective" else layer.saved) - layer.replicated_saved
    if layout.chunked_loss:
        sharded = max(0.0, sharded - layer.loss_saved)
    scores = 0.0 if policy == "selective" or layout.fused_attention else layer.saved_scores
    elements = (sharded + scores) / layout.tensor
    elements += layer.replicated_saved / (layout.tensor if layout.sequence_parallel else 1)
    return elements * layout.microbatch / layout.context * number_format.activation


def _repeat_saved(layer: LayerCosts, layout: PlanLayout, number_format: NumberFormat) -> float:
    """Bytes that one layer saves for the backward of one microbatch under full recomputation."""
    if layer.full_saved is None:
        return _outputs(layer, layout, number_format)
    in_loss = 0.0 if layout.chunked_loss else layer.loss_saved / layout.tensor
    layout = layout_of_layer(layer, layout)
    tensor = layout.tensor if layout.sequence_parallel else 1
    elements = in_loss + (layer.full_saved - layer.loss_saved) / tensor
    return elements * layout.microbatch / layout.context * number_format.activation


def _outputs(layer: LayerCosts, layout: PlanLayout, number_format: NumberFormat) -> float:
    layout = layout_of_layer(layer, layout)
    tensor = layout.tensor if layout.sequence_parallel else 1
    return layer.outputs * layout.microbatch / (layout.context * tensor) * number_format.activation


@functools.lru_cache(maxsize=4096)
def in_flight_by_rank(
    schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the microbatches of each of its stages that are between forward and backward at its peak.

    The peak is the first backward: a rank then has all forwards of its warm-up in flight, and later as many at most.
    A searched zero-bubble schedule holds what its limit allows, as many as there are pipeline ranks. Schedules without
    a closed form are generated, for at most four microbatches per rank.

    Args:
        schedule: Name of the schedule; "1f1b" with several stages per rank is the interleaved one.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of one step and replica.
        stages_per_rank: Stages of each rank.
    """
    m, p = num_microbatches, num_ranks
    if schedule == "gpipe":
        return ((m,) * stages_per_rank,) * p
    if schedule in _V_WARM_UP:
        return tuple((min(m, 2 * p - rank - 1 + _V_WARM_UP[schedule]), min(m, rank + 1)) for rank in range(p))
    if stages_per_rank == 1:
        warm_up = {"1f1b": 1, "interleaved_1f1b": 1, "eager_1f1b": 2}
        if schedule in warm_up:
            return tuple((min(m, warm_up[schedule] * (p - 1 - rank) + 1),) for rank in range(p))
        if schedule in ("zero_bubble", "zero_bubble_searched"):
            return ((min(m, p),),) * p
    elif schedule in ("1f1b", "interleaved_1f1b"):
        return tuple(_interleaved(m, p, stages_per_rank, rank) for rank in range(p))
    name = schedule if schedule in SCHEDULE_NAMES else "1f1b"
    return tuple(_at_peak(row) for row in make_schedule(name, p, min(m, 4 * p), stages_per_rank).actions)


def _at_peak(row: tuple[Action, ...]) -> tuple[int, ...]:
    """Microbatches of each stage, in ascending order of the stages, when all of them together are most."""
    now = dict.fromkeys(sorted({action.stage for action in row}), 0)
    peak: tuple[int, ...] = ()
    for action in row:
        now[action.stage] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
        if sum(now.values()) > sum(peak):
            peak = tuple(now.values())
    return peak


def _interleaved(num_microbatches: int, num_ranks: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """Forwards of each stage before the first backward: groups of microbatches go through all stages in turn."""
    num_groups = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, num_groups)
    first = size + (larger > 0)
    left = min(2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * first + 1, stages_per_rank * num_microbatches)
    started, group = [0] * stages_per_rank, 0
    while left > 0:
        members = size + (group < larger)
        for stage in range(stages_per_rank):
            taken = min(left, members)
            started[stage] += taken
            left -= taken
        group += 1
    return tuple(started)
