"""Pipeline schedules as data: who computes what in which order, without running any of it.

Read in this order: `actions` (the alphabet, which rank holds a stage, and which stages hand values to which),
`generators` (GPipe, 1F1B, eager 1F1B, interleaved 1F1B, zero bubble), `v_shape` (ZB-V, DualPipeV), `search` (under a
memory limit), `simulator` (when would it run), `clocks`, `program` (sends and receives added), `proof` (proof that it
runs to the end), `picture` (a timeline, simulated or measured), `events` (the same for trace viewers), `measured/`
(time that measured steps lost, and faster cuts).

    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    portals = chain(schedule.num_stages)
    check_program(lower(schedule, portals))
    print(to_text(simulate(schedule, portals, forward_seconds=1, backward_seconds=2)))

The room is plain Python: it imports neither torch nor Lightning. Ranks are pipeline coordinates, not global ranks.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_hybrid.errors import ScheduleError
from lightning_hybrid.schedule.actions import (
    Action,
    Kind,
    Message,
    Placement,
    Portals,
    Schedule,
    chain,
    rank_of_stage,
    stages_of_rank,
)
from lightning_hybrid.schedule.generators import (
    SCHEDULE_NAMES,
    StageCosts,
    forward_only,
    make_schedule,
    placement_of,
    stages_of_each_rank,
)
from lightning_hybrid.schedule.program import Channel, Compute, Instruction, Program, Receive, Send, lower, peer_of
from lightning_hybrid.schedule.proof import check_program
from lightning_hybrid.schedule.simulator import Span, Timeline, simulate
from lightning_hybrid.schedule.widths import with_widths

if TYPE_CHECKING:
    from lightning_hybrid.schedule.events import to_trace
    from lightning_hybrid.schedule.measured.lost_time import TimeByCause
    from lightning_hybrid.schedule.measured.seconds import MeasuredCosts, StageSeconds, UnitSeconds, load_measured_costs
    from lightning_hybrid.schedule.picture import MemorySample, memory_to_svg, to_svg, to_text

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
    "with_widths",
]

_LATE = {  # what no run needs, by the module that has it
    "TimeByCause": "measured.lost_time",
    "MeasuredCosts": "measured.seconds",
    "load_measured_costs": "measured.seconds",
    "StageSeconds": "measured.seconds",
    "UnitSeconds": "measured.seconds",
    "MemorySample": "picture",
    "memory_to_svg": "picture",
    "to_svg": "picture",
    "to_text": "picture",
    "to_trace": "events",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
