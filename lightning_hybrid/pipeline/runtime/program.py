"""The programs of one rank: its forwards, backwards and transfers in order, where it is in them, and when each ran."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid.pipeline.runtime.transport import Transport
from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
from lightning_hybrid.schedule import Action, Compute, Kind, Portals, Program, Receive, Send, Span, check_program, lower

if TYPE_CHECKING:
    from lightning_hybrid.schedule import MemorySample


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


_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward", Kind.W: "gradients of weights"}


def location_of(instruction: Compute | Send | Receive | None, rank: int, program: Program, step: str) -> str:
    """Describe the stage, instruction and microbatch at which a rank of a pipeline is.

    Args:
        instruction: The instruction that runs; None once all have run, while messages are still being sent.
        rank: Pipeline coordinate of the rank.
        program: The program of the step.
        step: The step's name, such as "training_step".

    Returns:
        Such as ``on pipeline rank 1, stage 1 of 2, action 1F0 of training_step (forward of microbatch 0)``.
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


Mark = Any  # seconds of `time.perf_counter`, or a CUDA event

_CPU = torch.device("cpu")
_STATM = Path("/proc/self/statm")


class ActionRecorder:
    """Records the actions of the latest training step.

    Attributes:
        time_readers: Objects for which events are recorded on a CUDA device, from the next step on; the host's clock is
            read in any case.
        memory_readers: Objects for which the memory in use is read at the start and the end of each action; it is not
            read while there are none. They read the times too.
    """

    def __init__(self, device: torch.device = _CPU, new_event: Callable[[], Any] | None = None) -> None:
        """Set up for a rank on ``device``; ``new_event`` returns a CUDA event with timing, and serves tests."""
        self.time_readers: set[object] = set()
        self.memory_readers: set[object] = set()
        self._device, self._is_cuda = device, device.type == "cuda"
        self._new_event = new_event or _new_cuda_event
        self._rows: list[tuple[Action, Mark, Mark, float]] = []
        self._memory: list[tuple[Mark, int]] = []
        self._last: Mark = None
        self._input: list[Mark] = []
        self._is_recording = not self._is_cuda

    def begin_input(self) -> None:
        """Record that this rank waits for its batch from now on; on a CUDA device, from the end of launched work."""
        self._input = [self._now()] if self._is_read else []

    def end_input(self) -> None:
        """Record that the batch of the next step has come."""
        if len(self._input) == 1:
            self._input.append(self._now())

    def begin(self) -> None:
        """Forget the earlier step."""
        self._rows, self._memory = [], []
        self._is_recording = self._is_read
        self._last = self.mark()

    def mark(self) -> Mark:
        """The present time, on a CUDA device an event after all launched work; None in a step that is not recorded."""
        if not self._is_recording:
            return None
        mark = self._now()
        if self.memory_readers:
            self._memory.append((mark, used_bytes(self._device)))
        return mark

    def add(self, action: Action, start: Mark, waited_seconds: float = 0.0) -> None:
        """Record an action that began at ``start`` and ends now, without the time for which the host waited in it."""
        if not self._is_recording:
            return
        self._last = self.mark()
        self._rows.append((action, start, self._last, waited_seconds))

    def add_since_last(self, action: Action) -> None:
        """Record an action that began when the last one ended, or at the beginning of the step."""
        self.add(action, self._last if self._last is not None else self.mark())

    def spans(self, rank: int) -> list[Span]:
        """The actions with their times in seconds of ``time.perf_counter``; waits for a CUDA device.

        Args:
            rank: The pipeline coordinate, which each span carries.
        """
        seconds = self._seconds()
        return [
            Span(rank, action, seconds(start) + (0.0 if self._is_cuda else waited), seconds(end))
            for action, start, end, waited in self._rows
        ]

    def memory(self, rank: int) -> list[MemorySample]:
        """The memory in use between the actions; empty if it was not sampled."""
        from lightning_hybrid.schedule import MemorySample

        seconds = self._seconds()
        return [MemorySample(rank, seconds(mark), size) for mark, size in self._memory]

    def input_wait(self) -> tuple[float, float] | None:
        """When this rank began to wait for its batch, and when it had it; None if that was not recorded."""
        if len(self._input) < 2:
            return None
        seconds = self._seconds()
        return seconds(self._input[0]), seconds(self._input[1])

    @property
    def _is_read(self) -> bool:
        """Whether times are recorded: always by the clock of the host, and for readers on a CUDA device."""
        return not self._is_cuda or bool(self.time_readers or self.memory_readers)

    def _now(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._new_event()
        event.record()
        return event

    def _seconds(self) -> Callable[[Mark], float]:
        """A function that returns the host's time of a mark."""
        if not self._is_cuda or not (self._rows or self._memory or self._input):
            return lambda mark: mark
        now = self._new_event()
        now.record()
        now.synchronize()
        anchor = time.perf_counter()
        return lambda mark: anchor - mark.elapsed_time(now) / 1000  # milliseconds


def used_bytes(device: torch.device) -> int:
    """The memory in use: of tensors on a CUDA device, and of the whole process (resident set size) elsewhere."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not on Linux
        return 0


def _new_cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)
