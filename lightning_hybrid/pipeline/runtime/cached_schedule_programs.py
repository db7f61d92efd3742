"""The programs of one rank: forwards, backwards and transfers in the order in which it runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hybrid.pipeline.runtime.transport import Transport
from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.pipeline.stages.stages_of_parameters_and_buffers import StagePlan
from lightning_hybrid.schedule import Portals, Program, check_program, lower

# Posting a receive early pays where the sender waits for a message about it, as in gloo; it costs buffers.
_POST_AHEAD = {"queue": 1, "tags": 2}
# Receives of small messages are posted while a rank is idle, as long as those of one peer take no more than this.
_EARLY_BYTES = 1 << 20


class Programs:
    """Builds and caches the program of each number of microbatches and each set of messages."""

    def __init__(self, plan: StagePlan, transport: Transport) -> None:
        """Set up for the stages and the schedule of a plan, whose messages ``transport`` carries."""
        self._plan, self._transport = plan, transport
        self._programs: dict[Any, Program] = {}

    def of(self, variants: Sequence[TraceVariant], *, train: bool) -> Program:
        """The program of a step.

        Args:
            variants: The trace of each microbatch.
            train: Whether backwards follow.
        """
        kinds = dict.fromkeys(variants)
        forward = frozenset(pair for variant in kinds for pair in variant.assignment.portals)
        backward = frozenset(pair for variant in kinds for pair in variant.gradient_portals) if train else frozenset()
        dynamic = any(
            variant.assignment.graph.values[index].dynamic
            for variant in kinds
            for sent in variant.assignment.portals.values()
            for index in sent
        )
        key = train, len(variants), forward, backward, dynamic
        if key not in self._programs:
            count = len(variants)
            schedule = self._plan.training_schedule(count) if train else self._plan.evaluation_schedule(count)
            # A receive with a header is waited for when it is posted, so it must not move in the order of transfers.
            ahead = 0 if dynamic else _POST_AHEAD[self._transport.channel]
            within = 0 if dynamic else _EARLY_BYTES // max(1, *(variant.largest_message for variant in kinds))
            portals = Portals(forward, backward)
            program = lower(schedule, portals, post_ahead=ahead, channel=self._transport.channel, idle_within=within)
            check_program(program)
            self._transport.connect(
                (schedule.rank_of(source), schedule.rank_of(target))
                for source, target in forward | backward
                if schedule.rank_of(source) != schedule.rank_of(target)
            )
            self._programs[key] = program
        return self._programs[key]
