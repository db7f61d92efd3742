"""Recordings of steps in stages: the first one decides the partition, others are assigned to its stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_hybrid.errors import PartitionError, StepError
from lightning_hybrid.graph import partition
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.pipeline.stages.plan import ELSEWHERE, StagePlan, TraceVariant
from lightning_hybrid.step.recording.branches import BranchCheck
from lightning_hybrid.step.recording.record import Recipe
from lightning_hybrid.step.replay.stage import StageReplay
from lightning_hybrid.step.tracing.recording import Recording

# If a stage costs more than this multiple of the mean, the units of the costliest are opened to balance better.
_UNBALANCED = 1.08
_MAX_RECORDINGS = 4


def record_variant(plan: StagePlan, recipe: Recipe) -> TraceVariant:
    """Record a step, and assign it to stages; the first one decides the partition."""
    recording, assignment = _record_and_assign(plan, recipe)
    stages = (*plan.stages, ELSEWHERE) if plan.widths else plan.stages
    replays = {s: StageReplay(recording, assignment, plan.root, plan.randomness, s) for s in stages}
    variant = TraceVariant(assignment, replays)
    plan.adopt(variant, recording.units)
    return variant


def _record_and_assign(plan: StagePlan, recipe: Recipe) -> tuple[Recording, Assignment]:
    """Record and assign to stages; the first time the ranks agree on the partition, or each has an error."""
    if plan.owner_stages:
        recording = _record(plan, recipe)
        return recording, plan.assign(recording)
    try:
        recording, *decided = _best_partition(plan, recipe)
    except Exception as error:
        plan.first_failure(error)
        raise
    if failed := plan.first_failure(None):
        rank, reason = failed
        raise StepError(f"on rank {rank}: {reason}", entry="on-rank")
    *agreed, has_guards = plan.agree(decided)
    plan.adopt_partition(*agreed)
    if plan.unit_choice.choose().keys() != recording.units.keys():
        recording = _record(plan, recipe)
    if has_guards:
        plan.share_unread(recording)
    assignment = plan.assign(recording)
    partition.check_shared(assignment)
    return recording, assignment


def _best_partition(plan: StagePlan, recipe: Recipe) -> tuple[Any, ...]:
    """The recording that balances best, and as for ``adopt_partition``; last whether it has guards."""
    recording = _record(plan, recipe)
    best: tuple[float, list[float], Recording, dict[str, int], set[str]] | None = None
    sizes = plan.num_stages, plan.cuts, plan.num_ranks, plan.widths
    for _ in range(_MAX_RECORDINGS):
        try:
            owner_stages = partition.owner_stages(recording.graph, *sizes)
            costs = partition.assign(recording.graph, owner_stages, plan.num_stages).costs()
            load = max(cost / width for cost, width in zip(costs, plan.widths or [1] * len(costs), strict=True))
            if best is None or plan.cuts is not None or load < 0.97 * best[0]:
                best = load, costs, recording, owner_stages, set(plan.tracked_buffers)
            share = sum(costs) / max(plan.num_stages, plan.num_ranks)
            unbalanced = load > _UNBALANCED * share
            # A pipeline cut inside a unit opens it, whatever the balance.
            wanted = share / 4 if unbalanced or plan.cuts is not None else None
        except PartitionError:
            if best is None and not plan.unit_choice.to_open(recording, 0.0, plan.cuts):
                raise
            wanted = 0.0
        larger = plan.unit_choice.to_open(recording, wanted, plan.cuts) if wanted is not None else set()
        if not larger or plan.num_stages == 1:
            break
        opened, tracked = set(plan.unit_choice.opened), set(plan.tracked_buffers)
        plan.unit_choice.opened.update(larger)
        try:
            recording = _record(plan, recipe)
        except Exception:  # such as a branch on values inside a unit, which can be recorded as one node
            if best is None:
                raise
            plan.go_back(opened, tracked)
            break
    if best is None:
        partition.owner_stages(recording.graph, *sizes)  # raises the reason
    assert best is not None
    _, costs, recording, owner_stages, tracked = best
    opened = {name for name in plan.unit_choice.opened if name not in recording.units}
    return recording, opened, plan.unit_choice.closed, tracked, owner_stages, costs, bool(recording.unguarded_state)


def _record(plan: StagePlan, recipe: Recipe) -> Recording:
    """Record a step with units, and buffers with owners, that are corrected until the recording needs no others."""
    branches = BranchCheck(plan.root, recipe.step)
    while True:
        units = plan.unit_choice.choose()
        attempt = replace(recipe, step=branches.step, units=units, tracked=plan.tracked_buffers)
        try:
            recording = attempt.record()
        except Exception as error:
            if not plan.unit_choice.corrects(error):
                raise
            continue
        missed = plan.unit_choice.missed(recording, units)
        found = set(recording.found_buffers) - plan.tracked_buffers
        if not missed and not found:
            if not recipe.guesses:
                branches.check(recording, attempt)
            return recording
        plan.unit_choice.opened.update(missed)
        plan.tracked_buffers.update(found)
