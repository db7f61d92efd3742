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
from lightning_hybrid.schedule.actions import check_stages
from lightning_hybrid.schedule.generators import SCHEDULE_NAMES, make_schedule, stages_of_each_rank
from lightning_hybrid.schedule.in_flight import in_flight_at_peak, most_in_flight


@dataclass(frozen=True)
class MemoryConstants:
    """What a device holds besides what the sums of tensors give."""

    # bytes that the allocator reserves but no tensor takes, relative to those that tensors take
    fragmentation: float = 0.12
    loss_gradients: float = 2.0  # gradients of the logits held at once: of the loss and of its softmax
    reclaimed: float = 0.7  # share of the fragments that the allocator gives back when memory is short
    # elements of gradients in the buckets of reductions over replicas; of fewer gradients, half of them
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

    Raises:
        ValueError: The model has fewer layers than the layout has stages.
    """
    return MemoryModel(costs, layout, number_format, hardware, constants).predict()


class MemoryModel:
    """One prediction; the fields are its arguments."""

    def __init__(
        self,
        costs: ModelCosts,
        layout: PlanLayout,
        number_format: NumberFormat,
        hardware: Hardware,
        constants: MemoryConstants,
    ) -> None:
        self.costs, self.layout, self.format = costs, layout, number_format
        self.hardware, self.constants = hardware, constants
        self.trained = 1.0 - costs.frozen_parameters / max(costs.parameters, 1)  # share that takes gradients

    def predict(self) -> PredictedMemory:
        """Predict all terms of each pipeline rank."""
        layout, constants = self.layout, self.constants
        count = layout.num_microbatches
        in_flight = in_flight_by_rank(layout.schedule, layout.pipeline, count, layout.stages_per_rank, layout.widths)
        ranks, reclaimable, on_host = [], [], []
        for rank, stages in enumerate(stages_by_rank(self.costs, layout)):
            held = list(stages.values())
            has_loss = layout.num_stages - 1 in stages
            layers = list(itertools.chain.from_iterable(held))
            terms = self.states(layers, self.costs.has_tied_embedding and has_loss and 0 not in stages)
            away = layout.elsewhere & terms.keys()
            on_host.append(sum(terms[name] for name in away))
            terms |= dict.fromkeys(away, 0.0)
            terms |= self.activations(held, in_flight[rank], has_loss, self.gathered(layers))
            later = self.drop_what_comes_later(terms)
            fragments = constants.fragmentation * sum(terms.values())
            backward = sum(terms[term] for term in ("activations", "loss", "gathered", "communication buffers"))
            terms["framework"] = self.hardware.reserved + fragments
            ranks.append(terms)
            reclaimable.append(constants.reclaimed * fragments + min(backward - later, terms["optimizer step"]))
        host = max(on_host) * min(layout.ranks, self.hardware.devices_per_node)
        device = self.hardware
        limit = device.memory if device.is_host else device.limit  # a host that is short of memory ends processes
        return PredictedMemory(tuple(ranks), device.memory, tuple(reclaimable), host, device.host_memory, limit)

    def drop_what_comes_later(self, terms: dict[str, float]) -> float:
        """With one microbatch, gradients grow while activations shrink: remove the smaller from ``terms``.

        Returns:
            Bytes of gradients that are there in the optimizer's step, but no longer in ``terms``.
        """
        layout = self.layout
        if layout.num_microbatches > 1 or (layout.data > 1 and not layout.shards("states")):
            return 0.0  # gradients of earlier microbatches, or the buckets of which gradients are views
        gradients = terms["gradients"] + terms["communication buffers"]
        if gradients > terms["activations"] + terms["loss"]:
            terms["activations"] = terms["loss"] = 0.0
            return 0.0
        later = terms["gradients"]
        terms["gradients"] = terms["communication buffers"] = 0.0
        return later

    def states(self, layers: Stage, has_copy: bool) -> dict[str, float]:
        """Bytes of parameters, gradients and states of one rank, and of buckets of reductions.

        ``has_copy`` tells whether it computes with a copy of the tied embedding, whose owner is the first rank.
        """
        layout, form = self.layout, self.format
        held = parameters_of_rank(layers, layout)
        if has_copy:
            held = Parameters(held.dense + self.costs.layers[0].sharded_parameters / layout.tensor, held.routed)
        sharded = held.over_shards(layout).total
        parameters = sharded if layout.shards("parameters") else held.total
        gradients = (sharded if layout.shards("gradients") else held.total) * self.trained
        states = (sharded if layout.shards("states") else held.total) * self.trained
        terms = {
            "parameters": parameters * (form.parameter + form.compute_copy),
            "gradients": gradients * form.gradient,
            "optimizer states": states * form.state,
            "optimizer step": states * form.step,
            "communication buffers": 0.0,
        }
        # Gradients that are reduced in each microbatch go layer by layer: see `gathered`.
        if layout.reduces_in_buckets:
            bucketed = min(self.constants.bucketed, held.total * self.trained / 2)
            terms["communication buffers"] = bucketed * form.reduced
        return terms

    def gathered(self, layers: Stage) -> Gathered:
        """Bytes of full parameters and gradients that are there for a moment."""
        layout, form = self.layout, self.format
        largest = max(parameters_of_rank([(layer, 1)], layout).total for layer, _ in layers)
        element = form.gathered if layout.gathers else 0
        gradient = 0.0
        if layout.reduces_by_layer:
            gradient = (form.gathered if layout.gathers else form.gradient) * self.trained
        if layout.gathers and not layout.reshard_after_forward:
            return Gathered(parameters_of_rank(layers, layout).total * element, largest * gradient)
        return Gathered(0.0, largest * (2 * element + gradient))

    def activations(
        self, stages: Sequence[Stage], in_flight: Sequence[int], has_loss: bool, gathered: Gathered
    ) -> dict[str, float]:
        """Bytes saved for the backward by all microbatches in flight, and by one layer's backward, or the loss."""
        layout, form = self.layout, self.format
        saved = one_layer = loss = waiting = 0.0
        for stage, microbatches in zip(stages, in_flight, strict=True):
            for layer, count in stage:
                samples = layout.microbatch / (layout.tensor * layout_of_layer(layer, layout).context)
                kept = self.saved(layer, layout.recompute if layer.repeats else "none")
                if not (layout.forwards and layer.repeats):
                    saved += count * self.autocast_copies(layer)
                # Where activations are on the host, the device holds the activations of two layers.
                is_here = "activations" not in layout.elsewhere
                saved = saved + microbatches * count * kept if is_here else max(saved, 2 * kept)
                one_layer = max(one_layer, self.saved(layer, "none") - kept)
                if layout.chunked_loss and (layer.float32_saved or layer.loss_saved):
                    continue
                logit = max(4, form.activation)
                copies = form.activation if form.activation < 4 else 0
                in_loss = layer.float32_saved * (logit + copies)
                in_loss += layer.peak_only * logit * self.constants.loss_gradients
                loss = max(loss, in_loss * samples)
                waiting += (microbatches - 1) * layer.float32_saved * logit * samples
            if not (has_loss and stage is stages[-1]):  # what was sent on is held until its gradient is back
                saved += microbatches * self.outputs(stage[-1][0])
        if layout.pipeline > 1:
            saved += 2 * self.outputs(stages[0][-1][0])
        if loss >= one_layer + gathered.layer:
            return {"activations": saved, "loss": waiting + loss, "gathered": gathered.always}
        return {"activations": saved + one_layer, "loss": waiting, "gathered": gathered.always + gathered.layer}

    def autocast_copies(self, layer: LayerCosts) -> float:
        """Bytes of a layer's parameters in the format of products, which autocast makes and saves for the backward."""
        form = self.format
        is_autocast = form.parameter > form.activation and not form.compute_copy
        if not is_autocast or form.gathered <= form.activation:
            return 0.0  # ZeRO gathers that format
        return parameters_of_rank([(layer, 1)], self.layout).total * form.activation

    def saved(self, layer: LayerCosts, policy: str) -> float:
        """Bytes that one layer saves for the backward of one microbatch, besides logits of a loss."""
        if policy == "full" and layer.full_saved is None:
            return self.outputs(layer)
        layout = layout_of_layer(layer, self.layout)
        between = layout.tensor if layout.sequence_parallel else 1
        if policy == "full" and layer.full_saved is not None:
            elements = 0.0 if layout.chunked_loss else layer.loss_saved / layout.tensor
            elements += (layer.full_saved - layer.loss_saved) / between
        else:
            sharded = (layer.selective_saved if policy == "selective" else layer.saved) - layer.replicated_saved
            if layout.chunked_loss:
                sharded = max(0.0, sharded - layer.loss_saved)
            scores = 0.0 if policy == "selective" or layout.fused_attention else layer.saved_scores
            elements = (sharded + scores) / layout.tensor + layer.replicated_saved / between
        return elements * layout.microbatch / layout.context * self.format.activation

    def outputs(self, layer: LayerCosts) -> float:
        """Bytes of the results of one layer for one microbatch."""
        layout = layout_of_layer(layer, self.layout)
        between = layout.tensor if layout.sequence_parallel else 1
        return layer.outputs * layout.microbatch / (layout.context * between) * self.format.activation


class Gathered(NamedTuple):
    """Bytes of full parameters and gradients that are there for a moment."""

    always: float  # of the whole step: parameters that are not resharded
    layer: float  # besides, in a layer's backward: its parameters and those of the next one, and its gradients


@functools.lru_cache(maxsize=4096)
def in_flight_by_rank(
    schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, widths: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the microbatches of each of its stages that are between forward and backward at its peak.

    The peak is the first backward: a rank then has all forwards of its warm-up in flight, and later as many at most.
    A searched zero-bubble schedule holds what its limit allows, as many as there are pipeline ranks. Schedules without
    a closed form are generated, for at most four microbatches per rank.
    """
    m, p = num_microbatches, num_ranks
    if widths:
        made = make_schedule(schedule, p, min(m, 4 * p), widths=widths)
        return tuple((count,) for count in most_in_flight(made))
    if schedule == "gpipe":
        return ((m,) * stages_per_rank,) * p
    if schedule in _V_WARM_UP:
        check_stages(schedule, stages_of_each_rank(schedule, stages_per_rank), 2)
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
    made = make_schedule(name, p, min(m, 4 * p), stages_per_rank)
    at_peak = in_flight_at_peak(made, [1.0] * made.num_stages)
    return tuple(tuple(at_peak[stage] for stage in sorted({each.stage for each in row})) for row in made.actions)


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
