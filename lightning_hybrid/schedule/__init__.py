"""Pipeline schedules as data: who computes what in which order, without running any of it.

Read in this order: `schedule_and_actions` (the alphabet, and which rank holds a stage), `generators` (GPipe, 1F1B,
eager 1F1B, interleaved 1F1B, zero bubble), `zero_bubble/` (ZB-V, DualPipeV, a search under a memory limit),
`linked_stages_and_messages` (which stages hand values to which), `simulator` (when would it run), `program` (sends and
receives added), `deadlock_check` (proof that it runs to the end), `picture` (a timeline, simulated or measured),
`memory_picture`, `trace_events` (the same for trace viewers), `measured/` (time that measured steps lost, and faster
cuts).

    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    portals = chain(schedule.num_stages)
    check_program(lower(schedule, portals))
    print(to_text(simulate(schedule, portals, forward_seconds=1, backward_seconds=2)))

The room is plain Python: it imports neither torch nor Lightning. Ranks are pipeline coordinates, not global ranks.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_hybrid.errors import ScheduleError
from lightning_hybrid.schedule.deadlock_check import check_program
from lightning_hybrid.schedule.generators import (
    SCHEDULE_NAMES,
    StageCosts,
    forward_only,
    make_schedule,
    placement_of,
    stages_of_each_rank,
)
from lightning_hybrid.schedule.linked_stages_and_messages import Message, Portals, chain
from lightning_hybrid.schedule.program import Channel, Compute, Instruction, Program, Receive, Send, lower, peer_of
from lightning_hybrid.schedule.schedule_and_actions import (
    Action,
    Kind,
    Placement,
    Schedule,
    rank_of_stage,
    stages_of_rank,
)
from lightning_hybrid.schedule.simulator import Span, Timeline, simulate

if TYPE_CHECKING:
    from lightning_hybrid.schedule.measured.lost_time_by_cause import TimeByCause
    from lightning_hybrid.schedule.measured.measured_costs_file import MeasuredCosts, load_measured_costs
    from lightning_hybrid.schedule.measured.stage_seconds import StageSeconds, UnitSeconds
    from lightning_hybrid.schedule.memory_picture import MemorySample, memory_to_svg
    from lightning_hybrid.schedule.picture import to_svg, to_text
    from lightning_hybrid.schedule.trace_events import to_trace

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Channel",
    "Compute",
    "Instruction",
    "Kind",
    "MeasuredCosts",
    "MemorySample",
    "Message",
    "Placement",
    "Portals",
    "Program",
    "Receive",
    "Schedule",
    "ScheduleError",
    "Send",
    "Span",
    "StageCosts",
    "StageSeconds",
    "TimeByCause",
    "Timeline",
    "UnitSeconds",
    "chain",
    "check_program",
    "forward_only",
    "load_measured_costs",
    "lower",
    "make_schedule",
    "memory_to_svg",
    "peer_of",
    "placement_of",
    "rank_of_stage",
    "simulate",
    "stages_of_each_rank",
    "stages_of_rank",
    "to_svg",
    "to_text",
    "to_trace",
]

_LATE = {  # what no run needs, by the module that has it
    "TimeByCause": "measured.lost_time_by_cause",
    "MeasuredCosts": "measured.measured_costs_file",
    "load_measured_costs": "measured.measured_costs_file",
    "StageSeconds": "measured.stage_seconds",
    "UnitSeconds": "measured.stage_seconds",
    "MemorySample": "memory_picture",
    "memory_to_svg": "memory_picture",
    "to_svg": "picture",
    "to_text": "picture",
    "to_trace": "trace_events",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
