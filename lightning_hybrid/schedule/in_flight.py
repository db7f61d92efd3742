"""The number of microbatches in flight in a schedule: between forward and the end of the backward, which W ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_hybrid.schedule.actions import Action, Kind, Schedule


def microbatches_in_flight(schedule: Schedule) -> list[int]:
    """The largest number of microbatches in flight, by stage; all of them where there is no backward."""
    most = [0] * schedule.num_stages
    for now in (now for row in schedule.actions for now in _after_forwards(row)):
        for stage, count in now.items():
            most[stage] = max(most[stage], count)
    return most


def in_flight_at_peak(schedule: Schedule, costs: Sequence[float]) -> list[int]:
    """By stage, the microbatches in flight when its rank holds most: the stages of a rank peak at different times.

    ``costs`` are what a microbatch of each stage takes, such as bytes.
    """

    def cost(now: dict[int, int]) -> float:
        return sum(costs[stage] * count for stage, count in now.items())

    at_peak = [0] * schedule.num_stages
    for row in schedule.actions:
        for stage, count in max(_after_forwards(row), key=cost, default={}).items():
            at_peak[stage] = count
    return at_peak


def most_in_flight(schedule: Schedule) -> list[int]:
    """For each rank, how many forwards of its stages have at most run whose backward, in full, has not."""
    return [max((sum(now.values()) for now in _after_forwards(row)), default=0) for row in schedule.actions]


def _after_forwards(row: Sequence[Action]) -> Iterator[dict[int, int]]:
    """The microbatches in flight in each stage of a rank after each of its forwards, where all peaks are."""
    now = dict.fromkeys((action.stage for action in row), 0)
    for action in row:
        now[action.stage] += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
        if action.kind is Kind.F:
            yield dict(now)
