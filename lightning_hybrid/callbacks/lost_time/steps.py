"""The measured steps of a run on the first rank: their lost time by cause, the seconds of stages, and better cuts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.callbacks.actions import MeasuredStep
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.schedule import Kind, Schedule, Timeline, chain
from lightning_hybrid.schedule.measured.cuts import (
    NOISE,
    CutProposal,
    MeasuredCut,
    learned_seconds,
    next_cuts,
    present_cuts,
)
from lightning_hybrid.schedule.measured.lost_time import (
    LOSSES,
    LostTime,
    TimeByCause,
    lost_time,
    mean_of_pipelines,
    measured_schedule,
)
from lightning_hybrid.schedule.measured.seconds import (
    StageSeconds,
    describe_range,
    seconds_of_stages,
    unit_ranges,
)
from lightning_hybrid.text import columns

_MOST_STEPS = 100  # the latest ones; each has the times of all its actions


@dataclass(frozen=True)
class AnalyzedStep:
    """One measured step."""

    step: int  # counted from 1
    lost: LostTime  # its time by cause
    columns: Mapping[str, Sequence[int]]  # numbers of the lanes, by heading
    pipelines: tuple[Timeline, ...]  # the actions of each pipeline, without the optimizer's
    schedule: Schedule  # the order of the actions of the first pipeline


def analyze_step(step: int, measured: MeasuredStep, assignment: Assignment | None) -> AnalyzedStep | None:
    """Attribute the time of a measured step to its causes.

    None for parts of pipelines, and where a lane ran an action twice (manual optimization).
    """
    if assignment is not None and measured.portals is None:
        return None
    size, num_stages = (1, 1) if assignment is None else (measured.group_size, assignment.num_stages)
    pipelines: list[Timeline] = []
    lost: list[LostTime] = []
    schedule: Schedule | None = None
    for first in range(0, measured.timeline.num_ranks, size):
        own = [s for s in measured.timeline.spans if first <= s.rank < first + size]
        actions = tuple(s._replace(rank=s.rank - first) for s in own if s.action.kind is not Kind.OPTIMIZER)
        pipeline = Timeline(actions, size)
        order = measured_schedule(pipeline, num_stages)
        if order is None or not all(order.actions):
            return None
        schedule = schedule or order
        pipelines.append(pipeline)
        lost.append(
            lost_time(
                pipeline,
                order,
                measured.portals or chain(num_stages),
                inputs=measured.inputs[first : first + size] or [None] * size,
                end=max(span.end for span in own),
            )
        )
    if schedule is None:
        return None
    return AnalyzedStep(step, mean_of_pipelines(lost), measured.columns, tuple(pipelines), schedule)


class MeasuredSteps:
    """The analyzed steps of a run under one partition.

    Attributes:
        steps: In the order in which they ran; the latest 100.
        assignment: The stages; None without.
    """

    def __init__(self) -> None:
        self.steps: list[AnalyzedStep] = []
        self.assignment: Assignment | None = None
        self._earlier: list[MeasuredCut] = []  # of stages that the run had before
        self._proposal: tuple[bool, CutProposal | None] = False, None  # whether it is known, and what it is

    def add(self, step: int, measured: MeasuredStep, assignment: Assignment | None) -> AnalyzedStep | None:
        """Analyze a step; those before it are forgotten if it ran in other stages. None if it cannot be analyzed."""
        analyzed = analyze_step(step, measured, assignment)
        if assignment is not self.assignment:
            if (before := self.present) is not None:
                has_moved = assignment is not None and present_cuts(before.assignment) != present_cuts(assignment)
                self._earlier = [*self._earlier, before] if has_moved else self._earlier
            self.steps, self.assignment, self._proposal = [], assignment, (False, None)
        if analyzed is not None:
            self.steps.append(analyzed)
            del self.steps[:-_MOST_STEPS]
            self._proposal = False, None
        return analyzed

    @property
    def typical(self) -> AnalyzedStep:
        """The step of median length."""
        by_length = sorted(self.steps, key=lambda step: step.lost.total.step_seconds)
        return by_length[(len(by_length) - 1) // 2]

    @property
    def step_seconds(self) -> float:
        """The seconds of that step."""
        return self.typical.lost.total.step_seconds

    @property
    def stages(self) -> list[StageSeconds]:
        """The seconds of the stages, medians over all steps; empty without stages."""
        if self.assignment is None:
            return []
        timelines = [pipeline for step in self.steps for pipeline in step.pipelines]
        return seconds_of_stages(timelines, self.assignment.num_stages)

    @property
    def present(self) -> MeasuredCut | None:
        """The measurement of the present stages; None without stages, or without measured steps."""
        if self.assignment is None or not self.steps:
            return None
        return MeasuredCut(self.assignment, self.stages, self.step_seconds)

    def proposal(self) -> CutProposal | None:
        """The cuts that come next by all measurements of the run; None if the stages stay."""
        if self.present is None:
            return None
        if not self._proposal[0]:
            self._proposal = True, next_cuts(self._measured_cuts(), self.typical.schedule)
        return self._proposal[1]

    def lines(self, present: Assignment | None) -> list[str]:
        """The table of the lost time, the slowest stage and the proposed cuts; the run has the ``present`` stages."""
        typical = self.typical
        lines = table_of(typical, len(self.steps))
        if self.assignment is None:
            return lines
        lines.append(_describe_slowest(self.stages, self.assignment))
        lines += self._slowest_unit()
        if present is not self.assignment:
            return [*lines, "the stages have changed since; set every_n_steps to measure later steps too"]
        if (proposal := self.proposal()) is None:
            return [*lines, f"no other pipeline_cuts are predicted to save more than {NOISE:.0%} of a step"]
        return [
            *lines,
            f"{proposal.describe(self.step_seconds)}; the seconds of stages are measured, and shared among their units"
            " by estimated cost",
        ]

    def _measured_cuts(self) -> list[MeasuredCut]:
        """The cuts of the present step that were measured, the present one last."""
        present = self.present
        return [] if present is None else [*(cut for cut in self._earlier if cut.is_of_same_step(present)), present]

    def _slowest_unit(self) -> list[str]:
        """The unit that takes the longest, where several cuts tell it apart from others."""
        cuts = self._measured_cuts()
        if len(cuts) < 2:
            return []
        seconds: dict[str, float] = {}
        for node, (forward, backward) in zip(cuts[-1].assignment.graph.nodes, learned_seconds(cuts), strict=True):
            if node.unit:
                seconds[node.unit] = seconds.get(node.unit, 0.0) + forward + backward
        if not seconds:
            return []
        slowest, usual = max(seconds, key=lambda unit: seconds[unit]), statistics.median(seconds.values())
        times = f", {seconds[slowest] / usual:.1f} times the median" if usual else ""
        return [f"slowest layer by {len(cuts)} cuts: {slowest}, {1000 * seconds[slowest]:.1f} ms{times}"]

    def as_json(self) -> dict[str, Any]:
        """All steps and stages, and the proposed cuts, for a file."""
        ranges = [] if self.assignment is None else unit_ranges(self.assignment)
        proposal = self.proposal()
        return {
            "steps": [
                {
                    "step": one.step,
                    "seconds": one.lost.total.step_seconds,
                    "total": one.lost.total.seconds(),
                    "ranks": [
                        {**{name: numbers[lane] for name, numbers in one.columns.items()}, **row.seconds()}
                        for lane, row in enumerate(one.lost.ranks)
                    ],
                }
                for one in self.steps
            ],
            "stages": [
                {
                    "stage": one.stage,
                    "units": list(units),
                    "forward": one.forward,
                    "backward": one.backward,
                    "weight": one.weight,
                }
                for one, units in zip(self.stages, ranges, strict=True)
            ],
            "pipeline_cuts": None if proposal is None else list(proposal.cuts),
            "predicted_gain": 0.0 if proposal is None else proposal.gain(self.step_seconds),
        }


def metrics_of(lost: TimeByCause) -> dict[str, float]:
    """The share of the step of each cause, and the seconds of the step, by the names of logged metrics."""
    seconds = lost.step_seconds
    shares = {f"lost_time/{name}": getattr(lost, name) / seconds if seconds else 0.0 for name in LOSSES}
    return {**shares, "lost_time/step_seconds": seconds}


_NOTED = 0.05  # of a step, from which on the gaps of the host are told apart
# The predicted and the measured bubble hold more than fill and drain; "other" has to be looked up.
_SHOWN = {"bubble": "fill+drain", "other": "host"}


def table_of(step: AnalyzedStep, count: int) -> list[str]:
    """The lines of a table of milliseconds: the step and each rank, by cause."""
    total = step.lost.total
    of = f" (of median length of {count})" if count > 1 else ""
    largest = max(LOSSES, key=lambda name: getattr(total, name))
    shown = {name: _SHOWN.get(name, name) for name in total.seconds()}
    names = list(total.seconds())
    if not any(row.bubble or row.imbalance or row.variation for row in (total, *step.lost.ranks)):  # no stages
        names = [name for name in names if name not in ("bubble", "imbalance", "variation")]
    rows = [["ms", *(shown[name] for name in names)]]
    rows.append(["step", *(f"{1000 * getattr(total, name):.1f}" for name in names)])
    share = total.step_seconds or 1.0
    rows.append(["share", *(f"{getattr(total, name) / share:.1%}" for name in names)])
    for rank, row in zip(step.columns["rank"], step.lost.ranks, strict=True):
        rows.append([f"rank {rank}", *(f"{1000 * getattr(row, name):.1f}" for name in names)])
    host = []
    if total.other > _NOTED * share:
        lane = max(range(len(step.lost.ranks)), key=lambda lane: step.lost.ranks[lane].other)
        start, other = step.lost.starts[lane], step.lost.ranks[lane].other
        host.append(
            f"host, of rank {step.columns['rank'][lane]}: {1000 * start:.1f} ms before the first action (callbacks,"
            " split of the batch, dry runs, comparisons of microbatches),"
            f" {1000 * (other - start):.1f} ms between actions (Python)"
        )
    return [
        f"step {step.step}{of} took {1000 * total.step_seconds:.1f} ms with its input; besides work and the"
        f" optimizer the largest loss is {shown[largest]},"
        f" {1000 * getattr(total, largest):.1f} ms ({getattr(total, largest) / share:.1%})",
        *columns(rows, right=1),
        *host,
    ]


def _describe_slowest(stages: Sequence[StageSeconds], assignment: Assignment) -> str:
    slowest = max(stages, key=lambda stage: stage.total)
    mean = sum(stage.total for stage in stages) / len(stages)
    weights = f", weights {1000 * slowest.weight:.1f} ms" if slowest.weight else ""
    return (
        f"slowest stage: {slowest.stage} ({describe_range(unit_ranges(assignment)[slowest.stage])}), forward"
        f" {1000 * slowest.forward:.1f} ms, backward {1000 * slowest.backward:.1f} ms{weights} per microbatch,"
        f" {slowest.total / mean if mean else 1.0:.2f} times the mean stage"
    )
