"""Reductions of gradients in one backward: launched in the order of the layers, and received while it goes on.

[Note: one order] Collectives match by their order, so all ranks of a shard must launch the same ones in the same order.
Reductions go in the order of the layers, whatever order a rank's code takes: a group that is complete waits for those
before it, and one that a rank does not use goes at the end of the backward.

[Note: no wait for a launch] A rank that waits in its backward for a message that another rank has not launched could
wait for ever: the other one may need this rank first, for a gather or a statistic. So within a backward a message is
received only once it has arrived, or once all ranks are known to have launched it, which the rounds of gathers tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from lightning_hybrid.host_copies import HostReads
from lightning_hybrid.zero.group import ParameterGroup


class Reductions:
    """The reductions of one rank.

    Attributes:
        num_launched: Reductions launched in this step.
    """

    def __init__(self) -> None:
        """Prepare."""
        self._queue: list[ParameterGroup] = []  # to launch in the current backward, in this order
        self._accumulated: set[int] = set()
        self._missing: dict[int, int] = {}  # gradients that the backward has not accumulated yet, by id of the group
        self._in_flight: deque[ParameterGroup] = deque()
        self.num_launched = 0

    @property
    def is_idle(self) -> bool:
        """Whether no group waits for gradients."""
        return not self._queue

    def reset(self) -> None:
        """Begin a step, or end one that may have failed."""
        self._queue, self.num_launched = [], 0
        self._in_flight.clear()

    def begin(self, groups: Sequence[ParameterGroup]) -> None:
        """Begin a backward. Args: groups: in the order of their reductions."""
        self._queue = [group for group in groups if group.trained]
        self._accumulated = set()
        self._missing = {id(group): len(group.trained) for group in self._queue}

    def add(self, group: ParameterGroup, parameter: Tensor) -> None:
        """Count a gradient of the backward, of any shape, and launch the reductions that are complete."""
        if id(parameter) in self._accumulated or not any(group is other for other in self._queue):
            return
        self._accumulated.add(id(parameter))
        self._missing[id(group)] -= 1
        while self._queue and not self._missing[id(self._queue[0])]:
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
        self._queue = []
        self._in_flight.clear()


def finish_reductions(groups: Sequence[ParameterGroup]) -> None:
    """Wait for the averages of groups; the host reads once which parameters have one."""
    reads = HostReads()
    for group in reversed(groups):
        group.complete_reduce(reads)
    for group in reversed(groups):
        group.finish_reduce()
