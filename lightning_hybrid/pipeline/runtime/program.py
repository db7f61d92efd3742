"""The programs of one rank: its forwards, backwards and transfers in order, and where it is in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hybrid.pipeline.runtime.transport import Transport
from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
from lightning_hybrid.schedule import Action, Compute, Kind, Portals, Program, Receive, Send, check_program, lower

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
        """The program of a step."""
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
                (schedule.source_of(each.message), schedule.target_of(each.message))
                for row in program.instructions
                for each in row
                if isinstance(each, Send)
            )
            self._programs[key] = program
        return self._programs[key]


_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward", Kind.W: "gradients of weights"}


def location_of(instruction: Compute | Send | Receive | None, rank: int, program: Program, step: str) -> str:
    """Describe the stage, instruction and microbatch at which a rank of a pipeline is.

    Such as ``on pipeline rank 1, stage 1 of 2, action 1F0 of training_step (forward of microbatch 0)``. Without an
    instruction, messages are still being sent.
    """
    stages = program.schedule.num_stages
    if instruction is None:
        return f"on pipeline rank {rank}, at the end of {step}, sending its last messages"
    if isinstance(instruction, Compute):
        action = instruction.action
        location = f"stage {action.stage} of {stages}, action {action} of {step} ({_in_words(action)})"
    else:
        message = instruction.message
        what = "gradients" if message.direction == "backward" else "values"
        what = f"{what} of microbatch {message.microbatch} of {step}"
        if isinstance(instruction, Receive):
            location = f"stage {message.target} of {stages}, receiving {what} from stage {message.source}"
        else:
            location = f"stage {message.source} of {stages}, sending {what} to stage {message.target}"
    return f"on pipeline rank {rank}, {location}"


def _in_words(action: Action) -> str:
    if action.kind is Kind.REDUCE:
        return "average of its gradients over the replicas"
    return f"{_WORDS[action.kind]} of microbatch {action.microbatch}"
