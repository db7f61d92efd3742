"""Proof that a schedule does every action once, on the right rank, in an order that can run; its short form."""

import re
from collections import defaultdict

from lightning_hybrid.errors import ScheduleError
from lightning_hybrid.schedule import Action, Kind, simulate


def action_of(text):
    """The action that is written so, such as `2F0` or `2R`."""
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FBIWR])(\d*)", text).groups()
    return Action(Kind(kind), int(stage), *map(int, filter(None, [microbatch])))


def rows_of(schedule):
    """Each rank's actions as one line of short forms: the schedule as people draw it."""
    return tuple(" ".join(map(str, row)) for row in schedule.actions)


def check_schedule(schedule, portals):
    """Prove that a schedule does every action once, on the right rank, in an order that can run.

    Returns:
        For every rank, the peak number of (stage, microbatch) pairs whose activations wait for their backward; all 0
        for a schedule without backward.

    Raises:
        ScheduleError: the proof fails; the message shows the schedule and the spot.
    """
    _check_stages(schedule, portals)
    _check_actions(schedule)
    simulate(schedule, portals, forward_seconds=1.0, backward_seconds=2.0)  # raises where some action waits for ever
    for rank, row in enumerate(schedule.actions):
        _check_reductions(schedule, rank, row)
    if not schedule.has_backward:
        return (0,) * schedule.num_ranks
    return tuple(_peak_in_flight(row) for row in schedule.actions)


def _check_stages(schedule, portals):
    beyond = sorted(pair for pair in portals.forward if pair[1] >= schedule.num_stages)
    if beyond:
        raise ScheduleError.at(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages but portals lead to later ones: {beyond}",
            schedule.actions,
        )
    if len(schedule.actions) != schedule.num_ranks:
        raise ScheduleError.at(
            f"schedule {schedule.name!r} has {len(schedule.actions)} rows for {schedule.num_ranks} ranks",
            schedule.actions,
        )


def _check_actions(schedule):
    """Every action is known, on its rank, and done once; none is missing."""
    seen = set()
    done = defaultdict(set)  # (stage, microbatch) -> letters
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            reason = None
            if not 0 <= action.stage < schedule.num_stages:
                reason = f"{action} is of a stage that does not exist (stages 0 to {schedule.num_stages - 1})"
            elif (home := schedule.rank_of(action.stage, action.microbatch)) != rank:
                reason = f"{action} stands on rank {rank} but stage {action.stage} is on rank {home}"
            elif action in seen:
                reason = f"{action} is done twice"
            elif action.kind is not Kind.REDUCE and not 0 <= action.microbatch < schedule.num_microbatches:
                reason = f"{action} is of a microbatch that does not exist (0 to {schedule.num_microbatches - 1})"
            if reason:
                raise ScheduleError.at(f"schedule {schedule.name!r}: {reason}", schedule.actions, {rank: index})
            seen.add(action)
            done[action.stage, action.microbatch].add(action.kind.value)

    has_backward = schedule.has_backward
    complete = ({"F", "B"}, {"F", "I", "W"}) if has_backward else ({"F"},)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            letters = done[stage, microbatch]
            if letters not in complete:
                wanted = " or ".join("+".join(sorted(kinds)) for kinds in complete)
                raise ScheduleError.at(
                    f"schedule {schedule.name!r}: stage {stage} does {'+'.join(sorted(letters)) or 'nothing'} for "
                    f"microbatch {microbatch} but must do {wanted}",
                    schedule.actions,
                )
        if has_backward and Action(Kind.REDUCE, stage) not in seen:
            raise ScheduleError.at(
                f"schedule {schedule.name!r}: {stage}R, the gradient reduction of stage {stage}, is missing",
                schedule.actions,
            )


def _check_reductions(schedule, rank, row):
    reduced = set()
    for index, action in enumerate(row):
        if action.kind is Kind.REDUCE:
            reduced.add(action.stage)
        elif action.stage in reduced:
            raise ScheduleError.at(
                f"schedule {schedule.name!r}: {action} comes after {action.stage}R, which reduces its gradients",
                schedule.actions,
                {rank: index},
            )


def _peak_in_flight(row):
    in_flight = peak = 0
    for action in row:
        if action.kind is Kind.F:
            in_flight += 1
        elif action.kind in (Kind.B, Kind.W):
            in_flight -= 1
        peak = max(peak, in_flight)
    return peak
