"""Schedules of stages that several ranks hold (PipeDream's 1F1B round robin, Narayanan et al. 2019, section 3.3).

The ranks of a stage have copies of it and take its microbatches in turn: microbatch m runs on the (m mod width)-th of
them. Messages stay whole, since each goes from the rank that ran a microbatch to the one that runs it next.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.schedule.actions import Action, Kind, Schedule, alternated, check_sizes, ranks_of_widths

# Schedules that may have stages of several ranks.
WIDTH_SCHEDULES = ("1f1b", "eager_1f1b", "gpipe")


def with_widths(name: str, widths: Sequence[int], num_microbatches: int) -> Schedule:
    """The schedule of a name for stages that `widths[s]` ranks hold; "forward_only" has no backwards.

    Raises:
        ValueError: a size is below 1, or the schedule has no such form.
    """
    # widths (2, 1), 1f1b
    # rank 0  F0 F2 .. B0 F4 B2 .. B4 R
    # rank 1  F1 F3 .. .. B1 F5 B3 .. B5 R
    # rank 2  .. F0 B0 F1 B1 F2 B2 F3 B3 ...
    check_sizes(min(widths), num_microbatches, 1)
    if name not in (*WIDTH_SCHEDULES, "forward_only"):
        raise ValueError(
            f"schedule={name!r} has one rank for each stage, not {list(widths)}; set schedule to one of"
            f" {', '.join(map(repr, WIDTH_SCHEDULES))}, or leave out stage_widths"
        )
    rows = []
    for stage, ranks in enumerate(ranks_of_widths(widths)):
        # As many as keep all later ranks busy, so that they come round to this rank just when they are wanted.
        ahead = -(-sum(widths[stage:]) // len(ranks)) - 1
        for number in range(len(ranks)):
            mine = range(number, num_microbatches, len(ranks))
            forwards = [Action(Kind.F, stage, m) for m in mine]
            if name == "forward_only":
                rows.append(tuple(forwards))
                continue
            warmup = {"1f1b": ahead, "eager_1f1b": 2 * ahead, "gpipe": len(mine)}[name]
            row = alternated(forwards, [Action(Kind.B, stage, m) for m in mine], warmup)
            rows.append((*row, Action(Kind.REDUCE, stage, number - len(ranks))))
    return Schedule(name, sum(widths), 1, num_microbatches, tuple(rows), widths=tuple(widths))


def nearest_widths(widths: Sequence[int], ranks: int) -> list[int]:
    """Widths for stages of about the same shares of so many ranks, at least one each."""
    found = [1] * len(widths)
    for _ in range(ranks - len(widths)):
        found[max(range(len(widths)), key=lambda stage: widths[stage] / found[stage])] += 1
    return found
