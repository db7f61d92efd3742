"""The contiguous cut of a model's layers into pipeline stages, balanced by FLOPs, and the stages of each rank."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

from lightning_hybrid.graph.partition import balance
from lightning_hybrid.graph.widths import Elements, choose_widths
from lightning_hybrid.predict.costs.layers import LayerCosts, ModelCosts
from lightning_hybrid.predict.layout import Balance, PlanLayout
from lightning_hybrid.schedule.actions import rank_of_stage
from lightning_hybrid.schedule.generators import placement_of

# Times a rank's share of the FLOPs in one layer: with less, the cut of stages of one rank matters as much as widths.
_MUCH = 1.5


def stages_by_rank(costs: ModelCosts, layout: PlanLayout) -> list[dict[int, list[tuple[LayerCosts, int]]]]:
    """Return for each pipeline rank its stages, by their numbers in ascending order.

    Raises:
        ValueError: There are fewer single layers than stages.
    """
    stages = cut_into_stages(costs, layout.num_stages, layout.balanced_by, layout.widths)
    if layout.widths:
        return [{number: stages[number]} for number, width in enumerate(layout.widths) for _ in range(width)]
    placement = placement_of(layout.schedule, layout.stages_of_each_rank)
    ranks: list[dict[int, list[tuple[LayerCosts, int]]]] = [{} for _ in range(layout.pipeline)]
    for number, stage in enumerate(stages):
        ranks[rank_of_stage(number, layout.pipeline, placement)][number] = stage
    return ranks


def cut_into_stages(
    costs: ModelCosts, num_stages: int, balanced_by: Balance = "layers", widths: Sequence[int] = ()
) -> list[list[tuple[LayerCosts, int]]]:
    """Cut a model's layers into contiguous stages.

    By "layers", a run of equal layers with most of the FLOPs is divided into equal numbers where that is possible, as
    Megatron-LM does: with what precedes it (an embedding) in the first stage and what follows (a head) in the last, or
    with one layer fewer in the first, the last or both of these. Otherwise, and by "flops", the boundaries are those
    nearest to equal FLOPs, as the strategies of this package partition. Stages of several ranks, whose numbers are
    ``widths``, have equal FLOPs per rank.

    Returns:
        For each stage its layers with the number of them, in order of execution; no stage is empty.

    Raises:
        ValueError: There are fewer single layers than stages.
    """
    costs = costs.with_stages(num_stages)
    if costs.num_layers < num_stages:
        raise ValueError(f"{costs.name} has {costs.num_layers} layers, too few for {num_stages} stages")
    if widths:
        return [list(_between(costs, *ends)) for ends in itertools.pairwise(_boundaries_of_widths(costs, widths))]
    by_layers = num_stages == 1 or balanced_by == "layers"
    boundaries = _boundaries(costs, num_stages) if by_layers else _boundaries_by_flops(costs, num_stages)
    return [list(_between(costs, start, stop)) for start, stop in itertools.pairwise(boundaries)]


def _boundaries(costs: ModelCosts, num_stages: int) -> list[int]:
    """Index of each stage's first single layer, and the number of layers at the end."""
    total = costs.num_layers
    if num_stages == 1:
        return [0, total]
    repeated = max(range(len(costs.layers)), key=lambda index: costs.layers[index].flops * costs.layers[index].count)
    before = sum(layer.count for layer in costs.layers[:repeated])
    count = costs.layers[repeated].count
    after = total - before - count
    is_most = 2 * costs.layers[repeated].flops * count >= costs.flops
    for fewer_first, fewer_last in ((0, 0), (0, 1), (1, 1), (1, 0)) if is_most else ():
        each, rest = divmod(count + fewer_first + fewer_last, num_stages)
        if rest or each <= max(fewer_first, fewer_last) or fewer_first > before or fewer_last > after:
            continue
        inner = [before - fewer_first + each * stage for stage in range(1, num_stages)]
        return [0, *inner, total]
    return _boundaries_by_flops(costs, num_stages)


def _boundaries_by_flops(costs: ModelCosts, num_stages: int) -> list[int]:
    ends = list(itertools.accumulate(layer.flops for layer in costs.single_layers()))
    boundaries = [0]
    for stage in range(1, num_stages):
        wanted = ends[-1] * stage / num_stages
        least, most = boundaries[-1] + 1, len(ends) - (num_stages - stage)
        right = min(max(bisect.bisect_left(ends, wanted) + 1, least), most)
        left = max(right - 1, least)
        boundaries.append(min(left, right, key=lambda index: abs(ends[index - 1] - wanted)))
    return [*boundaries, len(ends)]


def _boundaries_of_widths(costs: ModelCosts, widths: Sequence[int]) -> list[int]:
    flops = [layer.flops for layer in costs.single_layers()]
    return [*balance(flops, len(widths), widths), len(flops)]


def best_widths(costs: ModelCosts, num_ranks: int) -> tuple[int, ...]:
    """Return the ranks of stages that divide the FLOPs best; empty where stages of one rank are as fast.

    They are looked for where one layer has much more than a rank's share of the FLOPs.
    """
    layers = list(costs.single_layers())
    if num_ranks * max((layer.flops for layer in layers), default=0.0) < _MUCH * costs.flops:
        return ()
    found = choose_widths(Elements([each.flops for each in layers], [each.parameters for each in layers]), num_ranks)
    return () if found is None or found.is_ordinary else tuple(found.widths)


def _between(costs: ModelCosts, start: int, stop: int) -> Iterator[tuple[LayerCosts, int]]:
    first = 0
    for layer in costs.layers:
        inside = min(stop, first + layer.count) - max(start, first)
        if inside > 0:
            yield layer, inside
        first += layer.count
