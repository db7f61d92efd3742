"""The command ``lightning-hybrid schedule 1f1b --ranks 4 --microbatches 8``, which imports no torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.command import OK, UsageError, add_command, check_counts, print_json, usage_errors, write_text
from lightning_hybrid.schedule import SCHEDULE_NAMES, StageCosts, chain, make_schedule, simulate, to_svg, to_text
from lightning_hybrid.schedule.in_flight import most_in_flight

_EXAMPLE = """example:
  lightning-hybrid schedule zero_bubble --ranks 4 --microbatches 8

exit status: 0 ok; 2 invalid command line, or sizes that the schedule does not have"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "schedule",
        run,
        text="draw a pipeline schedule, with its bubble and the microbatches in flight",
        description="Simulates a schedule under given times and draws it. Nothing is trained, and no torch is loaded.",
        example=_EXAMPLE,
        json="print numbers and every action with its times as JSON",
    )
    parser.add_argument("name", choices=SCHEDULE_NAMES, help=", ".join(SCHEDULE_NAMES), metavar="name")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, required=True, help="of a batch")
    parser.add_argument(
        "--stages-per-rank", type=int, default=1, help="(%(default)s; zero_bubble_v and dualpipe_v always have 2)"
    )
    parser.add_argument(
        "--max-microbatches-in-flight", type=int, help="of a rank, a limit for zero_bubble_searched (its --ranks)"
    )
    parser.add_argument("--forward-ms", type=float, default=1.0, help="of one microbatch on a stage (%(default)s)")
    parser.add_argument("--backward-ms", type=float, default=2.0, help="the same (%(default)s)")
    parser.add_argument("--transfer-ms", type=float, default=0.0, help="of a message between ranks (%(default)s)")
    parser.add_argument("--width", type=int, default=100, help="characters of the drawing (%(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw to this file too")


def run(parsed: argparse.Namespace) -> int:
    """Draw the schedule, and return the exit status.

    Raises:
        UsageError: The schedule does not have these sizes, or a time is negative.
    """
    _check(parsed)
    with usage_errors():
        schedule = make_schedule(
            parsed.name,
            parsed.ranks,
            parsed.microbatches,
            parsed.stages_per_rank,
            max_in_flight=parsed.max_microbatches_in_flight,
            costs=StageCosts(parsed.forward_ms, parsed.backward_ms, parsed.transfer_ms),
        )
    timeline = simulate(
        schedule,
        chain(schedule.num_stages),
        forward_seconds=parsed.forward_ms / 1000,
        backward_seconds=parsed.backward_ms / 1000,
        transfer_seconds=parsed.transfer_ms / 1000,
    )
    in_flight = most_in_flight(schedule)
    if parsed.svg is not None:
        title = f"{parsed.name}, {parsed.ranks} ranks, {parsed.microbatches} microbatches"
        write_text(parsed.svg, to_svg(timeline, title), "--svg")
    if not parsed.json:
        print(to_text(timeline, parsed.width))
        what = "microbatches" if schedule.stages_per_rank == 1 else "microbatches, counted per stage,"
        print(f"most {what} in flight, by rank: {', '.join(map(str, in_flight))}")
        return OK
    print_json(
        {
            "name": schedule.name,
            "ranks": schedule.num_ranks,
            "microbatches": schedule.num_microbatches,
            "stages_per_rank": schedule.stages_per_rank,
            "makespan_ms": timeline.makespan_seconds * 1000,
            "bubble": timeline.bubble,
            "most_in_flight": in_flight,
            "spans": [
                {
                    "rank": span.rank,
                    "action": str(span.action),
                    "start_ms": span.start * 1000,
                    "end_ms": span.end * 1000,
                }
                for span in timeline.spans
            ],
        }
    )
    return OK


def _check(parsed: argparse.Namespace) -> None:
    """Refuse times, a width and a file that nothing can be drawn with."""
    for name in ("forward", "backward", "transfer"):
        value = getattr(parsed, f"{name}_ms")
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"--{name}-ms {value}; times must be 0 or more")
    if parsed.forward_ms + parsed.backward_ms == 0:
        raise UsageError("--forward-ms 0 --backward-ms 0 leave nothing to draw; one must be above 0")
    check_counts(parsed, "width")
    if parsed.svg is not None and parsed.svg.suffix != ".svg":
        raise UsageError(f"--svg {parsed.svg} must end in .svg")
