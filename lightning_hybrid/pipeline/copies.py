"""What the ranks of one stage tell each other at the end of a step, where each runs some of the microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller

from lightning_hybrid.batch.metrics import MetricCalls
from lightning_hybrid.batch.scalars import ScalarResults, SentScalars
from lightning_hybrid.collectives.objects import gather_on_all
from lightning_hybrid.pipeline.logs import Entry
from lightning_hybrid.pipeline.runtime.running_averages import Updates
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.step.objects.pytree import map_leaves, map_tensors
from lightning_hybrid.step.objects.tensors import on_host
from lightning_hybrid.step.replay.stage import StageRun


@dataclass
class ResultsOfCopy:
    """What a rank has computed, by microbatch."""

    scalars: Mapping[int, SentScalars] = field(default_factory=dict)
    metric_calls: MetricCalls = field(default_factory=dict)
    averages: Updates = field(default_factory=dict)
    is_broken: bool = False


def exchange(plan: StagePlan, local: ResultsOfCopy) -> ResultsOfCopy:
    """Join what the ranks of one stage have computed, for the first of them; collective over the pipeline.

    The others get the averages alone: one rank calls metrics. A step that broke on any rank of the
    pipeline is broken on all.
    """
    on_hosts = {name: map_leaves(on_host, getattr(local, name)) for name in ("metric_calls", "averages")}
    sent = replace(local, **on_hosts)
    rows = gather_on_all(sent, plan.group)
    if any(row.is_broken for row in rows):
        return ResultsOfCopy(is_broken=True)
    ranks, device = plan.ranks_of_stages[plan.stages[0]], plan.randomness.device
    of_stage = [local if rank == plan.rank else rows[rank] for rank in ranks]
    averages = {index: found for row in of_stage for index, found in row.averages.items()}
    if plan.rank != ranks[0]:
        return ResultsOfCopy(averages=averages)
    scalars = {index: found for row in of_stage for index, found in row.scalars.items()}
    calls = {index: found for row in of_stage for index, found in row.metric_calls.items()}
    return ResultsOfCopy(scalars, map_tensors(methodcaller("to", device), calls), averages)


def with_scalars(runs: Sequence[StageRun], received: Mapping[int, SentScalars]) -> list[ScalarResults]:
    """The scalars of all microbatches, also of other ranks."""
    own = next((run.scalars for run in runs if run.scalars.values), ScalarResults())
    return [
        own.received(received[index]) if index in received and not run.scalars.values else run.scalars
        for index, run in enumerate(runs)
    ]


def with_values(entry: Entry, scalars: Sequence[ScalarResults]) -> list[float]:
    """The numbers that a step has logged in each microbatch, also on other ranks."""
    value = entry.value
    if value is None or not any(value in results.values for results in scalars):
        return list(entry.values)
    return [
        float(results.values[value]) if math.isnan(number) and value in results.values else number
        for number, results in zip(entry.values, scalars, strict=True)
    ]
