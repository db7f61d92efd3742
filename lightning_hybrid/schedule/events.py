"""A timeline as a Chrome trace, for chrome://tracing and ui.perfetto.dev.

The Trace Event Format: a process per rank, a complete event per action, a flow arrow per message between ranks, and a
counter of the memory in use. Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hybrid.schedule.actions import Action, Kind, Portals, needed_by
from lightning_hybrid.schedule.picture import WORDS, MemorySample
from lightning_hybrid.schedule.simulator import Span, Timeline

_MICROSECONDS = 1e6


def to_trace(
    timeline: Timeline,
    *,
    columns: Mapping[str, Sequence[int]] | None = None,
    group_size: int = 0,
    portals: Portals | None = None,
    memory: Sequence[MemorySample] = (),
) -> dict[str, Any]:
    """Return a timeline as the content of a trace file in JSON.

    Args:
        timeline: simulated or measured.
        columns: by heading, a number for each rank; "rank" is its process id if it is among them, and the others are
            its coordinates.
        group_size: ranks of one pipeline, between which messages are sent; all of them if 0.
        portals: which stages send messages to which; no flow arrows if None.
        memory: samples, drawn as a counter of each rank.
    """
    headings = dict(columns or {})
    processes = list(headings.pop("rank", range(timeline.num_ranks)))
    begin = min([span.start for span in timeline.spans] + [sample.time for sample in memory], default=0.0)
    events: list[dict[str, Any]] = []
    for lane, process in enumerate(processes):
        coordinates = ", ".join(f"{heading} {values[lane]}" for heading, values in headings.items())
        name = f"rank {process}" + (f" ({coordinates})" if coordinates else "")
        events += [
            {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}},
            {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": lane}},
            {"ph": "M", "pid": process, "tid": 0, "name": "thread_name", "args": {"name": "actions"}},
        ]
    events += [
        _complete(span, processes[span.rank], begin) for span in sorted(timeline.spans, key=lambda span: span.start)
    ]
    if portals is not None:
        events += _flows(timeline, processes, begin, group_size or timeline.num_ranks, portals)
    events += [
        {
            "ph": "C",
            "pid": processes[sample.rank],
            "name": "memory",
            "ts": (sample.time - begin) * _MICROSECONDS,
            "args": {"bytes": sample.num_bytes},
        }
        for sample in memory
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete(span: Span, process: int, begin: float) -> dict[str, Any]:
    action, word = span.action, WORDS[span.action.kind]
    args: dict[str, Any] = {"action": str(action)}
    if action.kind is not Kind.OPTIMIZER:
        args["stage"] = action.stage
    if action.microbatch >= 0:
        args["microbatch"] = action.microbatch
        word = f"{word} {action.microbatch}"
    return {
        "ph": "X",
        "pid": process,
        "tid": 0,
        "name": word,
        "cat": WORDS[action.kind],
        "ts": (span.start - begin) * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "args": args,
    }


def _flows(
    timeline: Timeline, processes: Sequence[int], begin: float, group_size: int, portals: Portals
) -> list[dict[str, Any]]:
    """Arrows from the action that makes a message to the one that needs it, on another rank of the same pipeline."""
    found: dict[tuple[int, Action], Span] = {
        (span.rank // group_size, span.action): span for span in timeline.spans if span.end > span.start
    }
    events: list[dict[str, Any]] = []
    for (group, action), target in found.items():
        for message in needed_by(action, portals):
            kinds = (Kind.F,) if message.direction == "forward" else (Kind.B, Kind.I)
            makers = (found.get((group, Action(kind, message.source, message.microbatch))) for kind in kinds)
            source = next((span for span in makers if span is not None), None)
            if source is None or source.rank == target.rank:
                continue
            # An arrow begins inside of its box, or viewers do not attach it.
            sent = max(source.end - 1 / _MICROSECONDS, (source.start + source.end) / 2)
            common = {"cat": "message", "name": str(message), "id": len(events) // 2, "tid": 0}
            start, end = (sent - begin) * _MICROSECONDS, (target.start - begin) * _MICROSECONDS
            events.append({"ph": "s", "pid": processes[source.rank], "ts": start, **common})
            events.append({"ph": "f", "bp": "e", "pid": processes[target.rank], "ts": max(start, end), **common})
    return events
