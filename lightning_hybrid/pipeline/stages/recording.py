"""Recordings of steps in stages: the first one decides the partition, others are assigned to its stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_hybrid.errors import PartitionError, StepError
from lightning_hybrid.graph import partition
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.widths import TIE, owners_and_widths
from lightning_hybrid.pipeline.stages.plan import ELSEWHERE, StagePlan, TraceVariant
from lightning_hybrid.step.objects.tensors import hooks_of_user
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


@dataclass(frozen=True)
class _Candidate:
    """A recording with its partition."""

    recording: Recording  # of the step
    tracked: frozenset[str]  # the tracked buffers
    owner_stages: dict[str, int]  # the stage of each parameter
    widths: tuple[int, ...]  # the ranks of each stage; one each if empty
    costs: list[float]  # of the stages

    @classmethod
    def of(cls, plan: StagePlan, recording: Recording) -> _Candidate:
        """Partition a recorded step."""
        graph, widths = recording.graph, plan.widths
        if plan.chooses_widths:
            one_rank = with_one_rank(plan.root, recording)
            owner_stages, widths = owners_and_widths(graph, plan.num_ranks, plan.cuts, one_rank)
        else:
            owner_stages = partition.owner_stages(graph, plan.num_stages, plan.cuts, plan.num_ranks, widths)
        costs = partition.assign(graph, owner_stages, len(widths) or plan.most_stages).costs()
        return cls(recording, frozenset(plan.tracked_buffers), owner_stages, widths, costs)

    @property
    def load(self) -> float:
        """The cost of the slowest stage, divided by its width."""
        return max(cost / width for cost, width in zip(self.costs, self.widths or [1] * len(self.costs), strict=True))

    def is_better_than(self, other: _Candidate) -> bool:
        """Whether it is faster by more than a tie, or as fast with fewer copies of stages."""
        has_fewer = sum(self.widths) - len(self.widths) < sum(other.widths) - len(other.widths)
        return self.load < (1 + TIE if has_fewer else 1 - TIE) * other.load


def _best_partition(plan: StagePlan, recipe: Recipe) -> tuple[Any, ...]:
    """The recording that balances best, and as for ``adopt_partition``; last whether it has guards."""
    recording = _record(plan, recipe)
    best: _Candidate | None = None
    for _ in range(_MAX_RECORDINGS):
        try:
            found = _Candidate.of(plan, recording)
            if best is None or plan.cuts is not None or found.is_better_than(best):
                best = found
            share = sum(found.costs) / max(plan.num_stages, plan.num_ranks)
            # Where stages are wide, smaller units may make them equal without copies.
            unbalanced = found.load > _UNBALANCED * share or (plan.chooses_widths and found.widths)
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
        best = _Candidate.of(plan, recording)  # raises the reason
    recording, choice = best.recording, plan.unit_choice
    opened = {name for name in choice.opened if name not in recording.units}
    decided = opened, choice.closed, set(best.tracked), best.owner_stages, best.widths, best.costs
    return recording, *decided, bool(recording.unguarded_state)


def with_one_rank(root: nn.Module, recording: Recording) -> set[str]:
    """FQNs of parameters and units whose stage several ranks cannot hold: each would have a part of what all have.

    These are hooks on the sum of gradients, and buffers that layers write.
    """
    hooked = {name for name, each in root.named_parameters() if recording.has_hooks or hooks_of_user(each)}
    units = {fqn for fqn in recording.units if any(name.startswith(f"{fqn}.") for name in recording.written)}
    return hooked | units


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
