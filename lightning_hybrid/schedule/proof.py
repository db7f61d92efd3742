"""Proof that a program, a schedule with its transfers, runs to its end without a deadlock.

The program is executed without any values on the strictest channel there is: per pair of ranks one queue for both
directions, and sends that block until they are matched. What passes there passes on gloo, on NCCL and between threads.
A program made for a channel that matches by tag is executed on such a one, whose sends block all the same.

With queues, a compute may also wait for all receives that are posted before it, as a GPU does that synchronises. So no
message may depend on a compute that stands behind its receive, through whatever ranks.
"""

from __future__ import annotations

from collections import Counter

from lightning_hybrid.errors import ScheduleError
from lightning_hybrid.schedule.actions import Action, Message, made_by, needed_by
from lightning_hybrid.schedule.clocks import Clock, Clocks
from lightning_hybrid.schedule.program import Compute, Program, Receive, Send, peer_of


def check_program(program: Program) -> tuple[int, ...]:
    """Prove that a program computes its schedule, gets every message it needs, and never deadlocks.

    Returns:
        For every rank, the peak number of messages that are posted or received but not yet used: its receive buffers.

    Raises:
        ScheduleError: the proof fails; the message shows the program, the spot, and what each rank waits for.
    """
    schedule = program.schedule
    for rank, row in enumerate(program.instructions):
        computed = tuple(instruction.action for instruction in row if isinstance(instruction, Compute))
        if computed != schedule.actions[rank]:
            raise ScheduleError.at(
                f"rank {rank} of the program does not compute the actions of schedule {schedule.name!r} in their order",
                program.instructions,
                entry="schedule-transfer",
            )
    execution = _StrictExecution(program)
    while execution.advance():
        pass
    execution.check_finished()
    return tuple(execution.peak_buffers)


class _StrictExecution:
    """A program in the middle of running on the strictest channel of its kind, without values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.schedule = program.schedule
        self.peak_buffers = [0] * self.schedule.num_ranks
        self._position = [0] * self.schedule.num_ranks
        self._buffers = [0] * self.schedule.num_ranks
        # (rank, peer) -> what `rank` has issued to `peer`; of a queue, the first _matched of a pair met.
        self._issued: dict[tuple[int, int], list[tuple[Send | Receive, int]]] = {}
        self._matched: Counter[tuple[int, int]] = Counter()
        self._seen: set[Send | Receive] = set()
        self._made: set[Message] = set()
        self._arrived: set[Message] = set()
        self._clocks = Clocks(self.schedule.num_ranks)
        self._posted: dict[Message, tuple[int, Clock]] = {}  # where in its row a receive stands, and its rank's clock

    def advance(self) -> bool:
        """Let every rank run until it blocks; False if none moved."""
        moved = False
        for rank, row in enumerate(self.program.instructions):
            while self._position[rank] < len(row) and self._step(rank):
                self._position[rank] += 1
                moved = True
        return moved

    def check_finished(self) -> None:
        """Raise unless every rank is done and every transfer met its other half."""
        rows = self.program.instructions
        blocked = {rank: at for rank, at in enumerate(self._position) if at < len(rows[rank])}
        if blocked:
            details = [f"rank {rank} waits at {rows[rank][at]} for {self._lack(rank)}" for rank, at in blocked.items()]
            raise ScheduleError.at("deadlock: no rank can continue", rows, blocked, details, entry="schedule-deadlock")
        for (rank, peer), issued in self._issued.items():
            for instruction, index in issued:
                if instruction.message in self._arrived:
                    continue
                raise ScheduleError.at(
                    f"{instruction} of rank {rank} has no matching transfer on rank {peer}",
                    rows,
                    {rank: index},
                    entry="schedule-transfer",
                )

    def _step(self, rank: int) -> bool:
        """Run the rank's next instruction; False if it blocks."""
        instruction = self.program.instructions[rank][self._position[rank]]
        if isinstance(instruction, Compute):
            needed = needed_by(instruction.action, self.program.portals)
            if any(message not in self._arrived for message in needed):
                return False
            self._buffers[rank] -= sum(self.schedule.source_of(message) != rank for message in needed)
            self._clocks.compute(rank, needed)
            self._compute(rank, instruction.action)
            return True
        peer = peer_of(instruction, self.schedule)
        issued = self._issued.setdefault((rank, peer), [])
        if (instruction, self._position[rank]) not in issued[-1:]:
            self._check_transfer(rank, peer, instruction)
            self._seen.add(instruction)
            issued.append((instruction, self._position[rank]))
            if isinstance(instruction, Receive):
                self._posted[instruction.message] = self._position[rank], self._clocks.now(rank)
                self._buffers[rank] += 1
                self.peak_buffers[rank] = max(self.peak_buffers[rank], self._buffers[rank])
            self._match(rank, peer)
        return isinstance(instruction, Receive) or instruction.message in self._arrived

    def _compute(self, rank: int, action: Action) -> None:
        for message in made_by(action, self.program.portals):
            self._made.add(message)
            if self.schedule.target_of(message) == rank:
                self._arrived.add(message)

    def _check_transfer(self, rank: int, peer: int, instruction: Send | Receive) -> None:
        message = instruction.message
        ends = self.schedule.source_of(message), self.schedule.target_of(message)
        here = ends[0] if isinstance(instruction, Send) else ends[1]
        reason = None
        if here != rank or peer == rank:
            reason = f"is on rank {rank} but goes from rank {ends[0]} to rank {ends[1]}"
        elif isinstance(instruction, Send) and message not in self._made:
            reason = "precedes the action that computes it"
        elif instruction in self._seen:
            reason = "occurs twice"
        if reason:
            position = {rank: self._position[rank]}
            raise ScheduleError.at(
                f"{instruction} {reason}", self.program.instructions, position, entry="schedule-transfer"
            )

    def _match(self, rank: int, peer: int) -> None:
        """Let the k-th transfers of both sides of a pair meet, within one tag, as far as both have issued them."""
        here, there = self._issued[rank, peer], self._issued.get((peer, rank), [])
        if self.program.channel == "tags":
            self._arrived.update({one.message for one, _ in here[-1:]} & {other.message for other, _ in there})
            return
        pair = min(rank, peer), max(rank, peer)
        while self._matched[pair] < min(len(here), len(there)):
            (one, one_index), (other, other_index) = here[self._matched[pair]], there[self._matched[pair]]
            if one.message != other.message or type(one) is type(other):
                spots = dict(sorted({rank: one_index, peer: other_index}.items()))
                rows = self.program.instructions
                raise ScheduleError.at(
                    f"deadlock: transfer number {self._matched[pair]} between ranks {pair[0]} and {pair[1]} does not"
                    " match, so both wait forever",
                    rows,
                    spots,
                    [f"rank {spot} waits at {rows[spot][index]}" for spot, index in spots.items()],
                    entry="schedule-deadlock",
                )
            self._matched[pair] += 1
            self._arrived.add(one.message)
            self._meet(one.message)

    def _meet(self, message: Message) -> None:
        """Let the rank that sends a message go on; its own computes must not be behind the receive."""
        source, target = self.schedule.source_of(message), self.schedule.target_of(message)
        index, posted = self._posted[message]
        num_needed = self._clocks.now(source)[target]
        if num_needed > posted[target]:
            needed = self.schedule.actions[target][num_needed - 1]
            raise ScheduleError.at(
                f"{Receive(message)} of rank {target} is posted before {needed}, on which the message depends: a rank"
                " that waits there for all that it has posted waits forever",
                self.program.instructions,
                {target: index},
                entry="schedule-transfer",
            )
        self._clocks.transfer(message, source, posted)

    def _lack(self, rank: int) -> str:
        """What a blocked rank waits for, in words."""
        instruction = self.program.instructions[rank][self._position[rank]]
        if not isinstance(instruction, Compute):
            return f"rank {peer_of(instruction, self.schedule)} to post its half"
        words = []
        for message in needed_by(instruction.action, self.program.portals):
            if message in self._arrived:
                continue
            source_rank = self.schedule.source_of(message)
            posted = any(one.message == message for one, _ in self._issued.get((rank, source_rank), []))
            local = source_rank == rank
            words.append(f"{message}" + ("" if posted or local else " (no receive of it is posted before)"))
        return ", ".join(words)
