"""The number of microbatches in flight in each stage of a schedule: between forward and the end of the backward."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.schedule.actions import Kind, Schedule


def microbatches_in_flight(schedule: Schedule) -> list[int]:
    """The largest number of microbatches in flight, by stage; all of them where there is no backward.

    A backward in two parts, I and W, ends with W.
    """
    now, most = [0] * schedule.num_stages, [0] * schedule.num_stages
    for row in schedule.actions:
        for action in row:
            if action.kind is Kind.F:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind in (Kind.B, Kind.W):
                now[action.stage] -= 1
    return most


def in_flight_at_peak(schedule: Schedule, costs: Sequence[float]) -> list[int]:
    """The microbatches in flight in each stage when its rank holds most; the stages of a rank peak at different times.

    Args:
        schedule: what each rank does.
        costs: what a microbatch of each stage takes, such as bytes.
    """
    at_peak = [0] * schedule.num_stages
    for row in schedule.actions:
        now = dict.fromkeys((action.stage for action in row), 0)
        most = 0.0
        for action in row:
            now[action.stage] += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
            total = sum(costs[stage] * count for stage, count in now.items())
            if action.kind is Kind.F and total > most:
                most = total
                for stage, count in now.items():
                    at_peak[stage] = count
    return at_peak


def most_in_flight(schedule: Schedule) -> list[int]:
    """For each rank, how many forwards of its stages have at most run whose backward, in full, has not."""
    peaks = []
    for row in schedule.actions:
        now = peak = 0
        for action in row:
            now += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
            peak = max(peak, now)
        peaks.append(peak)
    return peaks
