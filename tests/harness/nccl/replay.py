"""Runs traces again on devices that do nothing before they must: who gets stuck, and where.

An operation starts on a rank once it was launched, the waits of the stream before it are over, and the operation before
it on its communicator is. It is over once it has started on all members. Hosts go on unless they wait: for the stream,
for the host of another rank (gloo), for the whole device. What can happen stays possible, so the order in which it is
tried does not matter, and what is left in the end is stuck on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.nccl.trace import Event, Launch, Ops, Sync, Trace, Wait


@dataclass(frozen=True)
class Machine:
    """What a device does beyond what it must.

    Attributes:
        has_one_queue: An operation starts only after all those that its rank launched before (one hardware queue).
        connects_late: The first use of a communicator blocks each host until all its members' come to theirs.
    """

    has_one_queue: bool = False
    connects_late: bool = False


@dataclass
class _Program:
    """One thread of a rank."""

    rank: int
    thread: str
    events: list[Event]
    at: int = 0
    waits: list[int] = field(default_factory=list)  # of the stream, by number of the launch
    num_over: int = 0  # of these


@dataclass
class _Started:
    """A launch of a rank."""

    launch: Launch
    index: int  # on its communicator
    program: _Program
    num_waits: int
    is_started: bool = False


class Replay:
    """Traces on a machine."""

    def __init__(self, traces: Sequence[Trace], machine: Machine = Machine()) -> None:
        self._machine = machine
        self.programs = [
            _Program(trace.rank, thread, [e for e in trace.events if getattr(e, "thread", "") == thread])
            for trace in traces
            for thread in dict.fromkeys(getattr(e, "thread", "") for e in trace.of(Launch, Wait, Sync, Ops))
        ]
        self._launched: dict[int, list[_Started]] = {trace.rank: [] for trace in traces}
        self._by_number: dict[tuple[int, int], _Started] = {}
        self._num_on: dict[tuple[str, int], int] = {}  # launches, by communicator and rank
        self._started_on: dict[tuple[str, int], list[_Started]] = {}
        self._num_over: dict[str, int] = {}
        self._num_started: dict[int, int] = dict.fromkeys(self._launched, 0)  # in a row, by rank
        self._arrived: set[tuple[str, int]] = set()

    def run(self, limit: Mapping[int, int] | None = None) -> bool:
        """Go on until nothing moves. Args: limit: by position among the programs, where one stops.

        Returns:
            Whether all programs are at their ends or limits.
        """
        limit = limit or {}
        moved = True
        while moved:
            moved = False
            for position, program in enumerate(self.programs):
                end = limit.get(position, len(program.events))
                while program.at < end and self._step(program):
                    program.at += 1
                    moved = True
            moved |= self._devices()
        return all(p.at >= limit.get(position, len(p.events)) for position, p in enumerate(self.programs))

    def stuck(self) -> list[str]:
        """Where hosts wait for ever, and operations that never end."""
        hosts = [p for p in self.programs if p.at < len(p.events)]
        found = [f"rank {p.rank} ({p.thread}) waits at {_name(p.events[p.at], self._of(p))}" for p in hosts]
        return found + [f"rank {rank}: {text} never ends" for rank in self._launched for text in self.pending(rank)]

    def pending(self, rank: int) -> list[str]:
        """The operations of a rank that are not over."""
        return [_name(s.launch) for s in self._launched[rank] if not s.launch.is_host and not self._is_over(s)]

    def _of(self, program: _Program) -> Launch | None:
        event = program.events[program.at]
        return self._by_number[program.rank, event.number].launch if isinstance(event, Wait) else None

    def _step(self, program: _Program) -> bool:
        """Run a host's next event; False if it blocks."""
        event = program.events[program.at]
        if isinstance(event, Launch):
            return self._launch(program, event)
        if isinstance(event, Wait):
            started = self._by_number[program.rank, event.number]
            if started.launch.is_host:
                return self._is_over(started)
            program.waits.append(event.number)
        elif isinstance(event, Sync):
            return self._stream_is_idle(program)
        return True

    def _launch(self, program: _Program, launch: Launch) -> bool:
        key = launch.comm, program.rank
        index = self._num_on.get(key, 0)
        if not index and (self._machine.connects_late and not launch.is_host):
            self._arrived.add(key)
            if not all((launch.comm, member) in self._arrived for member in launch.members):
                return False
        self._num_on[key] = index + 1
        started = _Started(launch, index, program, len(program.waits))
        self._by_number[program.rank, launch.number] = started
        self._started_on.setdefault(key, []).append(started)
        self._launched[program.rank].append(started)
        return True

    def _stream_is_idle(self, program: _Program) -> bool:
        """Whether the stream has done everything; behind one queue, what was launched before has started too."""
        if program.num_over < len(program.waits):
            return False
        return not self._machine.has_one_queue or all(s.is_started for s in self._launched[program.rank])

    def _devices(self) -> bool:
        moved = False
        for program in self.programs:
            while program.num_over < len(program.waits):
                if not self._is_over(self._by_number[program.rank, program.waits[program.num_over]]):
                    break
                program.num_over += 1
                moved = True
        for rank, launched in self._launched.items():
            for started in launched[self._num_started[rank] :]:
                if not started.is_started and self._can_start(started):
                    started.is_started = moved = True
                elif not started.is_started and self._machine.has_one_queue and not started.launch.is_host:
                    break
            while self._num_started[rank] < len(launched) and launched[self._num_started[rank]].is_started:
                self._num_started[rank] += 1
        for comm in {comm for comm, _ in self._started_on}:
            moved |= self._finish(comm)
        return moved

    def _can_start(self, started: _Started) -> bool:
        if started.launch.is_host:
            return True
        is_next = self._num_over.get(started.launch.comm, 0) >= started.index
        return is_next and started.program.num_over >= started.num_waits

    def _finish(self, comm: str) -> bool:
        first = self._num_over.get(comm, 0)
        index = first
        members = next(rows for (name, _), rows in self._started_on.items() if name == comm)[0].launch.members
        while all(self._is_started(comm, member, index) for member in members):
            index += 1
        self._num_over[comm] = index
        return index > first

    def _is_started(self, comm: str, rank: int, index: int) -> bool:
        row = self._started_on.get((comm, rank), [])
        return index < len(row) and row[index].is_started

    def _is_over(self, started: _Started) -> bool:
        return self._num_over.get(started.launch.comm, 0) > started.index


def stuck_at_device_synchronisation(traces: Sequence[Trace], machine: Machine = Machine()) -> Iterator[str]:
    """Where a rank gets stuck if its host waits for its whole device once, before operations that may allocate.

    The rank is held there; all that it has launched must end while the others go on.
    """
    threads = [(program.rank, program.thread) for program in Replay(traces).programs]
    for position, (rank, _) in enumerate(threads):
        replay = Replay(traces, machine)
        program = replay.programs[position]
        reported: set[str] = set()
        for at, event in enumerate(program.events):
            if not isinstance(event, Ops):
                continue
            replay.run({position: at})
            if program.at < at:
                yield f"rank {rank} waits at {_name(program.events[program.at])} in any case"
                break
            for text in replay.pending(rank):
                if text not in reported:
                    reported.add(text)
                    yield f"rank {rank} waits for its device, and {text} does not end before it goes on"


def _name(event: Event, of: Launch | None = None) -> str:
    if isinstance(event, Launch):
        return f"{event.kind} number {event.number} on {event.comm} ({event.line})"
    if isinstance(event, Wait) and of is not None:
        return f"the wait for {_name(of)}"
    return f"{type(event).__name__.lower()} {getattr(event, 'what', '')} ({getattr(event, 'line', '')})"
