"""Portals, the pairs of stages that exchange messages, and the messages that each action waits for and makes.

A *portal* carries a value from the stage that makes it straight to a stage that uses it; a skip connection over three
stages is one message, not three. Where the value requires a gradient, the gradient comes back the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.schedule.schedule_and_actions import Action, Kind


class Message(NamedTuple):
    """All values that go from stage `source` to stage `target` for one microbatch, together.

    A "forward" message carries activations to a later stage, a "backward" message their gradients to an earlier one.
    Between two stages of one rank a message still exists, but nothing is sent.
    """

    direction: Literal["forward", "backward"]
    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        """The short form: `0>1F2` is activations from stage 0 to 1 for microbatch 2, `1>0B2` their gradients."""
        return f"{self.source}>{self.target}{self.direction[0].upper()}{self.microbatch}"


@dataclass(frozen=True)
class Portals:
    """The pairs of stages that are linked.

    Args:
        forward: pairs (src, dst), dst > src: some value made on stage src is used on stage dst.
        backward: the subset of these pairs of which some value carries a gradient back, from dst to src.

    Raises:
        ValueError: a pair does not lead to a later stage, or gradients would come back where no value went.
    """

    forward: frozenset[tuple[int, int]]
    backward: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, assignment: Assignment) -> Portals:
        """Portals of a step whose operations are assigned to stages."""
        return cls(frozenset(assignment.portals), frozenset(assignment.gradient_portals()))

    def __post_init__(self) -> None:
        """Check the pairs."""
        astray = sorted(pair for pair in self.forward if not 0 <= pair[0] < pair[1])
        if astray:
            raise ValueError(f"portals lead from a stage (>= 0) to a later one, but these do not: {astray}")
        orphans = sorted(self.backward - self.forward)
        if orphans:
            raise ValueError(f"gradients come back only where a value went; add these pairs to forward: {orphans}")


def chain(num_stages: int) -> Portals:
    """Portals of a plain sequence of stages: each hands values to the next and gets gradients back."""
    links = frozenset((stage, stage + 1) for stage in range(num_stages - 1))
    return Portals(links, links)


def needed_by(action: Action, portals: Portals) -> tuple[Message, ...]:
    """The messages that must be there before an action can run, in a fixed order.

    A forward needs the values of every stage before it; a backward (B or I) needs the gradients from every stage that
    used its values. W and REDUCE need none.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        sources = sorted(source for source, target in portals.forward if target == stage)
        return tuple(Message("forward", source, stage, microbatch) for source in sources)
    if action.kind in (Kind.B, Kind.I):
        users = sorted(target for source, target in portals.backward if source == stage)
        return tuple(Message("backward", user, stage, microbatch) for user in users)
    return ()


def made_by(action: Action, portals: Portals) -> tuple[Message, ...]:
    """The messages that an action makes, those to the nearest stage first: it waits for them soonest."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        users = sorted(target for source, target in portals.forward if source == stage)
        return tuple(Message("forward", stage, user, microbatch) for user in users)
    if action.kind in (Kind.B, Kind.I):
        sources = sorted((source for source, target in portals.backward if target == stage), reverse=True)
        return tuple(Message("backward", stage, source, microbatch) for source in sources)
    return ()
