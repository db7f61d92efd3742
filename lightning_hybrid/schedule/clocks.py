"""Vector clocks of a program: how many computes of each rank are over, at least, where a rank is in its row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from lightning_hybrid.schedule.actions import Message

Clock: TypeAlias = tuple[int, ...]  # computes, by rank


class Clocks:
    """The clocks of all ranks, each behind what it has done so far, and of the messages that have arrived."""

    def __init__(self, num_ranks: int) -> None:
        """Begin before the first instruction of every rank."""
        self._of_rank: list[Clock] = [(0,) * num_ranks] * num_ranks
        self._of_message: dict[Message, Clock] = {}

    def now(self, rank: int) -> Clock:
        """The clock of a rank."""
        return self._of_rank[rank]

    def compute(self, rank: int, needed: Iterable[Message]) -> None:
        """Let a rank wait for messages, and compute; those between its own stages are behind its clock anyway."""
        clock = self._of_rank[rank]
        for message in needed:
            clock = _latest(clock, self._of_message.get(message, clock))
        self._of_rank[rank] = (*clock[:rank], clock[rank] + 1, *clock[rank + 1 :])

    def transfer(self, message: Message, source: int, posted: Clock) -> None:
        """Let the rank ``source`` send a message, until the receive is posted that its receiver posts at this clock."""
        self._of_rank[source] = self._of_message[message] = _latest(self._of_rank[source], posted)


def _latest(one: Clock, other: Clock) -> Clock:
    return tuple(map(max, one, other))
