"""Pipeline schedules as data: who computes what in which order, without running any of it.

Read in this order: `actions` (the alphabet), `generators` (GPipe, 1F1B, eager 1F1B, interleaved 1F1B, zero bubble),
`portals` (which stages hand values to which), `simulator` (when would it run), `program` (sends and receives added),
`checker` (proof that it runs to the end), `picture` (the swim-lane of a simulated or measured timeline).

    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    portals = chain(schedule.num_stages)
    check_schedule(schedule, portals)
    program = lower(schedule, portals)
    check_program(program)
    print(to_text(simulate(schedule, portals, forward_seconds=1, backward_seconds=2)))

The room is plain Python: it imports neither torch nor Lightning. Ranks are pipeline coordinates, not global ranks.
"""

from lightning_hybrid.schedule.checker import check_program, check_schedule
from lightning_hybrid.schedule.errors import ScheduleError
from lightning_hybrid.schedule.generators import (
    SCHEDULE_NAMES,
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved_1f1b,
    make_schedule,
    one_f_one_b,
    zero_bubble,
)
from lightning_hybrid.schedule.picture import to_svg, to_text
from lightning_hybrid.schedule.program import Channel, Compute, Instruction, Program, Receive, Send, lower, peer_of
from lightning_hybrid.schedule.schedule_and_actions import NO_MICROBATCH, Action, Kind, Schedule
from lightning_hybrid.schedule.simulator import Span, Timeline, simulate
from lightning_hybrid.schedule.stage_messages import Message, Portals, chain, made_by, needed_by

__all__ = [
    "NO_MICROBATCH",
    "SCHEDULE_NAMES",
    "Action",
    "Channel",
    "Compute",
    "Instruction",
    "Kind",
    "Message",
    "Portals",
    "Program",
    "Receive",
    "Schedule",
    "ScheduleError",
    "Send",
    "Span",
    "Timeline",
    "chain",
    "check_program",
    "check_schedule",
    "eager_1f1b",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "lower",
    "made_by",
    "make_schedule",
    "needed_by",
    "one_f_one_b",
    "peer_of",
    "simulate",
    "to_svg",
    "to_text",
    "zero_bubble",
]
