"""Programs: schedules with the sends and receives of each rank.

[Note: one order for all transfers]
Channels can be strict: NCCL gives a pair of ranks one queue for both directions, in which the k-th transfer of one
side meets the k-th transfer of the other, and a send may block until the other side has posted its receive. So that
no two ranks ever wait for each other, all events of a program stand in *one* global order, the simulated one: a
compute when it starts, a transfer when the compute that makes its message ends. Every pair of ranks meets its
transfers in this order. Then the earliest event that has not happened can always happen: what it waits for is earlier.

Receives do not block, so they are posted some computes ahead of their place in the order: before the compute that
keeps the receiver busy when the sender is done. That keeps the argument: a receive never passes another transfer of
its own pair, and a pair knows no other pair's order.

Nor does it pass a compute on which its message depends, through whatever ranks. On a GPU a compute may wait until all
that its rank has launched is over, posted receives among it: an allocator that tries again does so, and the loading of
a kernel. A message that needs this compute would never come.

A channel that matches transfers by tag, as gloo does, has no queue: there a receive may also pass transfers of its own
pair. That matters in 1F1B, where the last stage sends a gradient right before it needs the next activations: behind
that send, a receive would be posted when it is already waited for. Nor need it be posted while its rank is busy:
where memory allows, it goes to the nearest moment before at which the rank waits anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from lightning_hybrid.schedule.actions import Action, Kind, Message, Portals, Schedule, made_by, needed_by
from lightning_hybrid.schedule.clocks import Clock, Clocks
from lightning_hybrid.schedule.simulator import Span, simulate


@dataclass(frozen=True)
class Compute:
    """Wait for the messages that the action needs (`needed_by`), then carry it out."""

    action: Action

    def __str__(self) -> str:
        """The action's short form."""
        return str(self.action)


@dataclass(frozen=True)
class Send:
    """Send a message; the nearest compute before it made the message."""

    message: Message

    def __str__(self) -> str:
        """Such as `send(0>1F2)`."""
        return f"send({self.message})"


@dataclass(frozen=True)
class Receive:
    """Post a receive without waiting for it; the compute that needs the message waits."""

    message: Message

    def __str__(self) -> str:
        """Such as `recv(0>1F2)`."""
        return f"recv({self.message})"


Instruction: TypeAlias = Compute | Send | Receive
Channel: TypeAlias = Literal["queue", "tags"]


@dataclass(frozen=True)
class Program:
    """A schedule with its transfers.

    Attributes:
        schedule: What each rank computes.
        portals: Which stages hand values to which.
        instructions: For every pipeline rank, what it does, in order.
        channel: What it may run on: "queue" runs everywhere; "tags" needs transfers that are matched by tag.
    """

    schedule: Schedule
    portals: Portals
    instructions: tuple[tuple[Instruction, ...], ...]
    channel: Channel = "queue"

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose backward is in two parts."""
        return frozenset(
            (action.stage, action.microbatch)
            for row in self.schedule.actions
            for action in row
            if action.kind is Kind.I
        )

    @cached_property
    def needs(self) -> dict[Action, tuple[Message, ...]]:
        """For every action, the messages that it waits for."""
        return {action: needed_by(action, self.portals) for row in self.schedule.actions for action in row}


def lower(
    schedule: Schedule, portals: Portals, *, post_ahead: int = 1, channel: Channel = "queue", idle_within: int = 0
) -> Program:
    """Add sends and receives to a schedule, so that it cannot deadlock: by default on the strictest channel.

    See [Note: one order for all transfers]. A message between stages of one rank needs no transfer.

    Args:
        schedule: what each rank computes.
        portals: which stages hand values to which.
        post_ahead: how many computes ahead of its place in the global order a receive is posted. One hides the
            sender's wait for a receiver that is busy; each more can cost a rank one more receive buffer per peer.
        channel: "queue" for one queue per pair of ranks, "tags" where transfers are matched by tag.
        idle_within: with tags, how many computes ahead a moment may lie at which the rank is idle and posts instead;
            as many receive buffers per peer can be the price.

    Raises:
        ScheduleError: the schedule's dependencies cannot be satisfied.
    """
    # The costs only choose among the right orders; a backward is taken to cost two forwards.
    timeline = simulate(schedule, portals, forward_seconds=1.0, backward_seconds=2.0)
    events: list[tuple[float, bool, int, Compute | Send]] = []
    for span in timeline.spans:
        # At one moment transfers come before computes, which may need them; then the order of the simulation holds.
        events.append((span.start, True, len(events), Compute(span.action)))
        for message in made_by(span.action, portals):
            if schedule.target_of(message) != span.rank:
                events.append((span.end, False, len(events), Send(message)))

    idle = _computes_after_waiting(timeline.spans) if channel == "tags" else frozenset[Action]()
    rows: list[list[Instruction]] = [[] for _ in range(schedule.num_ranks)]
    clocks = Clocks(schedule.num_ranks)
    starts: list[list[Clock]] = [[] for _ in rows]  # the clock of each rank before each of its computes
    for _, _, _, event in sorted(events):
        if isinstance(event, Compute):
            rank = schedule.rank_of(event.action.stage, event.action.microbatch)
            rows[rank].append(event)
            starts[rank].append(clocks.now(rank))
            clocks.compute(rank, needed_by(event.action, portals))
            continue
        source, target = schedule.source_of(event.message), schedule.target_of(event.message)
        rows[source].append(event)
        row = rows[target]
        waits = idle_within and not idle.isdisjoint(_users_of(event.message))
        place = len(row) if waits else _place_when_idle(row, idle, idle_within)
        if place is None:
            independent = len(starts[target]) - clocks.now(source)[target]
            ahead, peer = (min(post_ahead, independent), source) if channel == "queue" else (post_ahead, None)
            place = _place_ahead(row, peer, schedule, ahead)
        passed = sum(isinstance(instruction, Compute) for instruction in row[place:])
        clocks.transfer(event.message, source, starts[target][-passed] if passed else clocks.now(target))
        row.insert(place, Receive(event.message))
    return Program(schedule, portals, tuple(tuple(row) for row in rows), channel)


def peer_of(instruction: Send | Receive, schedule: Schedule) -> int:
    """The rank at the other end of a transfer."""
    message = instruction.message
    return schedule.target_of(message) if isinstance(instruction, Send) else schedule.source_of(message)


def _users_of(message: Message) -> tuple[Action, ...]:
    """The actions before which a rank waits for a message."""
    kinds = (Kind.F,) if message.direction == "forward" else (Kind.B, Kind.I)
    return tuple(Action(kind, message.target, message.microbatch) for kind in kinds)


def _computes_after_waiting(spans: Iterable[Span]) -> frozenset[Action]:
    """The computes before which their rank is idle."""
    ends: dict[int, float] = {}
    after_waiting = set()
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.start > ends.get(span.rank, 0.0):
            after_waiting.add(span.action)
        ends[span.rank] = span.end
    return frozenset(after_waiting)


def _place_when_idle(row: list[Instruction], idle: frozenset[Action], within: int) -> int | None:
    """Where in an unfinished row its rank waits last, not more than `within` computes before the end."""
    for index in range(len(row) - 1, -1, -1):
        instruction = row[index]
        if isinstance(instruction, Compute):
            within -= 1
            if within < 0:
                return None
            if instruction.action in idle:
                return index
    return None


def _place_ahead(row: list[Instruction], peer: int | None, schedule: Schedule, post_ahead: int) -> int:
    """Where in an unfinished row the next receive goes: up to `post_ahead` computes before the end, behind `peer`'s."""
    place = index = len(row)
    while index and post_ahead:
        instruction = row[index - 1]
        if isinstance(instruction, Compute):
            post_ahead -= 1
            place = index - 1
        elif peer_of(instruction, schedule) == peer:
            break
        index -= 1
    return place
