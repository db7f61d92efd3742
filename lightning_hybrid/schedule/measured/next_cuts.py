"""The next cuts of a run that measures its stages under one cut after the other.

    predict   the steps of cuts that have not been measured, by all measurements so far; against the best measured step
    move      to that which tells most of the slow layers, of those that promise more than the noise
    take back where nothing promises more, and the present step is longer than that of an earlier cut

So each move tries other cuts, or ends at the best measured ones. The last move is never a trial, which might fail and
would have to be taken back by one more; cuts that are taken back stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.schedule.measured.learned_seconds import MeasuredCut, learned_seconds
from lightning_hybrid.schedule.measured.propose_cuts import NOISE, CutProposal, CutSearch, cut_points, present_cuts
from lightning_hybrid.schedule.schedule_and_actions import Schedule

_MOST_MOVES = 3


def next_cuts(measured: Sequence[MeasuredCut], schedule: Schedule) -> CutProposal | None:
    """Return the cuts that come next; None if the present ones stay.

    Args:
        measured: Cuts of one step in the order in which the run had them, the present one last.
        schedule: The order of the actions, which stays.
    """
    present = measured[-1]
    graph, num_stages = present.assignment.graph, present.assignment.num_stages
    if num_stages < 2 or len(cut_points(graph)) < num_stages:
        return None
    best = min(measured, key=lambda cut: cut.step_seconds)
    search = CutSearch(graph, num_stages, schedule, learned_seconds(measured))
    known = {present_cuts(cut.assignment) for cut in measured}
    if present_cuts(present.assignment) in {present_cuts(cut.assignment) for cut in measured[:-1]}:
        return None  # taken back
    if len(measured) < _MOST_MOVES:
        groups = list(zip(*(cut.assignment.node_stage for cut in measured), strict=True))
        # Both are simulated: what a simulation leaves out is in both.
        before = search.simulated(best.assignment)
        found = search.most_telling(known, groups, before - NOISE * best.step_seconds)
        if found is not None:
            return _proposal(found[0], present, best.step_seconds - before + found[1])
    if present.step_seconds > min(measured[0].step_seconds, (1 + NOISE) * best.step_seconds):
        return _proposal(present_cuts(best.assignment), present, best.step_seconds)
    return None


def _proposal(cuts: tuple[str, ...], present: MeasuredCut, seconds: float) -> CutProposal:
    return CutProposal(cuts, present_cuts(present.assignment), present.step_seconds, seconds)
