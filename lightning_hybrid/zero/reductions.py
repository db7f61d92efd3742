"""Reductions of gradients in one backward: launched in the order of the layers, and received while it goes on.

[Note: one order] Collectives match by their order, so all ranks of a shard must launch the same ones in the same order.
Reductions go in the order of the layers, whatever order a rank's code takes: a group that is complete waits for those
before it, and one that a rank does not use goes at the end of the backward.

[Note: no wait for a launch] A rank that waits in its backward for a message that another rank has not launched could
wait for ever: the other one may need this rank first, for a gather or a statistic. So within a backward a message is
received only once it has arrived, or once all ranks are known to have launched it, which the rounds of gathers tell.

[Note: in one order with gathers] Streams of a GPU may share one queue, and an allocation may wait for all of a GPU. So
where gathers follow the calls of layers, a rank must not launch a reduction before a gather that another rank launches
first. In a backward it launches the reductions of layers that all ranks have called, up to the first that some rank has
not; the others come once no rank gathers any more.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from lightning_hybrid.host_copies import HostReads
from lightning_hybrid.zero.group import ParameterGroup


class Reductions:
    """The reductions of one rank.

    Attributes:
        num_launched: Reductions launched in this step.
        num_foreseen: Those that this rank will have launched before it comes to one of a layer that it has not called.
    """

    def __init__(self) -> None:
        """Prepare."""
        self._queue: list[ParameterGroup] = []  # to launch in the current backward, in this order
        self._accumulated: set[int] = set()
        self._missing: dict[int, int] = {}  # gradients that the backward has not accumulated yet, by id of the group
        self._in_flight: deque[ParameterGroup] = deque()
        self.num_launched = self.num_foreseen = 0
        self._limit: float = math.inf  # of those that may be launched until the backward ends

    @property
    def is_idle(self) -> bool:
        """Whether no group waits for gradients."""
        return not self._queue

    def reset(self) -> None:
        """Begin a step, or end one that may have failed."""
        self._queue, self.num_launched, self.num_foreseen, self._limit = [], 0, 0, math.inf
        self._in_flight.clear()

    def begin(self, groups: Sequence[ParameterGroup]) -> None:
        """Begin a backward. Args: groups: in the order of their reductions."""
        self._queue = [group for group in groups if group.trained]
        self._accumulated = set()
        self._missing = {id(group): len(group.trained) for group in self._queue}

    def follow(self, called: Sequence[ParameterGroup]) -> None:
        """Launch none until all ranks have told what they have called. Args: called: in the order of the forward."""
        layers = dict.fromkeys(group.fqn for group in self._queue)
        backward = [fqn for fqn in dict.fromkeys(group.fqn for group in reversed(called)) if fqn in layers]
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(layers, backward, strict=False))
        same = {fqn for fqn, _ in pairs if fqn}  # others are of code outside of layers
        count = sum(1 for _ in itertools.takewhile(lambda group: group.fqn in same, self._queue))
        self._limit, self.num_foreseen = self.num_launched, self.num_launched + count

    def allow(self, num_foreseen_by_all: int) -> None:
        """Launch the reductions that all ranks launch in one order, once they are complete."""
        self._limit = num_foreseen_by_all
        self._launch_complete()

    def add(self, group: ParameterGroup, parameter: Tensor) -> None:
        """Count a gradient of the backward, of any shape, and launch the reductions that are complete."""
        if id(parameter) in self._accumulated or not any(group is other for other in self._queue):
            return
        self._accumulated.add(id(parameter))
        self._missing[id(group)] -= 1
        self._launch_complete()

    def _launch_complete(self) -> None:
        while self._queue and not self._missing[id(self._queue[0])] and self.num_launched < self._limit:
            self._launch(self._queue.pop(0))

    def _launch(self, group: ParameterGroup) -> None:
        self.receive(0)
        group.launch_reduce()
        self._in_flight.append(group)
        self.num_launched += 1

    def receive(self, num_launched_by_all: int) -> None:
        """Receive messages that have arrived, and those among the first ones of the step that all ranks launched."""
        num_received = self.num_launched - len(self._in_flight)
        while self._in_flight and (num_received < num_launched_by_all or self._in_flight[0].has_arrived):
            self._in_flight.popleft().receive_reduced()
            num_received += 1

    def launch_rest(self) -> None:
        """End a backward: launch the reductions of groups without gradients too."""
        for group in self._queue:
            self._launch(group)
        self._queue, self.num_foreseen = [], self.num_launched
        self._in_flight.clear()


def finish_reductions(groups: Sequence[ParameterGroup]) -> None:
    """Wait for the averages of groups; the host reads once which parameters have one."""
    reads = HostReads()
    for group in reversed(groups):
        group.complete_reduce(reads)
    for group in reversed(groups):
        group.finish_reduce()
