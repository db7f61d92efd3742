"""What one rank did that matters on GPUs, as plain data: the judges read nothing else.

A communicator is the collectives of one group, or one pair of its ranks, as in NCCL. Its k-th operations on all members
belong together. Operations of a gloo group are launches too (``is_host``): they block the host, and no stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Launch:
    """An operation was enqueued.

    Attributes:
        number: Of the launches of this rank.
        comm: The communicator.
        members: Global ranks of the communicator.
        kind: Such as "allreduce"; "send" and "recv" meet each other.
        sizes: Elements of the operation; of an exchange, those to each member, then those from each.
        root: Index of the root in the group, or -1.
        nbytes: Memory that is held until the wait.
        line: Of the package, or of who else calls.
    """

    number: int
    comm: str
    members: tuple[int, ...]
    kind: str
    dtype: str
    sizes: tuple[int, ...]
    root: int = -1
    nbytes: int = 0
    is_host: bool = False
    line: str = ""
    thread: str = "main"


@dataclass(frozen=True)
class Wait:
    """The current stream waits for a launch; the host itself does for one of a gloo group."""

    number: int
    line: str = ""
    thread: str = "main"


@dataclass(frozen=True)
class Sync:
    """The host waits for the current stream."""

    what: str
    line: str = ""
    thread: str = "main"


@dataclass(frozen=True)
class Ops:
    """Operations of the current stream, any of which may allocate.

    Attributes:
        products: How many of them are matrix products or attention, which take time.
    """

    count: int
    thread: str = "main"
    products: int = 0


@dataclass(frozen=True)
class Create:
    """A group was made."""

    group: str
    size: int
    is_host: bool = False


@dataclass(frozen=True)
class Objects:
    """Python objects were exchanged; ``on_device`` has the shapes of tensors that were pickled where they are."""

    kind: str
    on_device: tuple[str, ...] = ()
    line: str = ""


@dataclass(frozen=True)
class Mark:
    """A step of the run begins, such as "training"."""

    name: str
    thread: str = "main"


@dataclass(frozen=True)
class Violation:
    """A rule that was broken at a call."""

    rule: str
    text: str
    line: str = ""


Event = Launch | Wait | Sync | Ops | Create | Objects | Mark | Violation
_KINDS = {kind.__name__: kind for kind in (Launch, Wait, Sync, Ops, Create, Objects, Mark, Violation)}


@dataclass
class Trace:
    """The events of one rank, in the order in which its host came to them."""

    rank: int
    events: list[Event] = field(default_factory=list)

    def of(self, *kinds: type) -> Iterator[Event]:
        return (event for event in self.events if isinstance(event, kinds))

    @property
    def steps(self) -> list[list[Event]]:
        """The events of each training step to which another one comes next."""
        places = [index for index, event in enumerate(self.events) if isinstance(event, Mark)]
        names = [getattr(self.events[index], "name", "") for index in places]
        return [
            self.events[places[number] : places[number + 1]]
            for number in range(len(places) - 1)
            if names[number] == names[number + 1] == "training"
        ]

    def to_json(self) -> str:
        return json.dumps({"rank": self.rank, "events": [[type(e).__name__, asdict(e)] for e in self.events]})

    @classmethod
    def from_json(cls, text: str) -> Trace:
        found = json.loads(text)
        events = []
        for kind, values in found["events"]:
            values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
            events.append(_KINDS[kind](**values))
        return cls(found["rank"], events)


def summary(traces: Sequence[Trace]) -> dict[str, object]:
    """What a layout costs, for machines, in the last training step to which another one comes next; over all ranks."""
    syncs: dict[str, int] = {}
    messages: dict[str, dict[str, int]] = {}
    in_flight: dict[str, int] = {}
    for trace in traces:
        step = trace.steps[-1] if trace.steps else []
        for line, peak in peaks_in_flight(step).items():
            in_flight[line] = max(peak, in_flight.get(line, 0))
        for event in step:
            if isinstance(event, Sync):
                syncs[event.line] = syncs.get(event.line, 0) + 1
            elif isinstance(event, Launch):
                row = messages.setdefault(event.comm, {"operations": 0, "bytes": 0, "is_host": int(event.is_host)})
                row["operations"] += 1
                row["bytes"] += event.nbytes
    return {
        "ranks": len(traces),
        "host_synchronisations": dict(sorted(syncs.items())),
        "messages": dict(sorted(messages.items())),
        "bytes_in_flight": dict(sorted(in_flight.items())),
    }


def peaks_in_flight(events: Sequence[Event]) -> dict[str, int]:
    """By line of the launch, the largest memory of operations whose wait had not come; without those of gloo groups."""
    held: dict[int, Launch] = {}
    peaks: dict[str, int] = {}
    for event in events:
        if isinstance(event, Launch) and not event.is_host:
            held[event.number] = event
            now = sum(launch.nbytes for launch in held.values() if launch.line == event.line)
            peaks[event.line] = max(peaks.get(event.line, 0), now)
        elif isinstance(event, Wait):
            held.pop(event.number, None)
    return peaks
