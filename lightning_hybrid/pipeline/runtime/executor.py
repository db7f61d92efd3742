"""The executor of a program: forwards, backwards and transfers of one rank, in order.

The data path of one microbatch on one stage::

    wait for messages -> replay the step (F) -> send      ...      wait for gradients -> backward (B) -> send
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.pipeline.runtime.error_notes import note, place_of
from lightning_hybrid.pipeline.runtime.received_values import Arrivals, broken_value
from lightning_hybrid.pipeline.runtime.split_backward import Left, WeightsLater, are_heard, finish
from lightning_hybrid.pipeline.runtime.stage_module_state import StageStates
from lightning_hybrid.pipeline.runtime.transport import Incoming, Transport
from lightning_hybrid.pipeline.stages.trace_variant import Variant
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.schedule import (
    Action,
    Compute,
    Instruction,
    Kind,
    Message,
    Program,
    Receive,
    Send,
    Span,
    peer_of,
)
from lightning_hybrid.step.batch_means.batch_metrics import BatchMetrics
from lightning_hybrid.step.batch_means.mean_ops import Share
from lightning_hybrid.step.instrument.instrument import installed
from lightning_hybrid.step.replay.stage_replay import ReplayWatch, StageRun
from lightning_hybrid.step.standins.absent_tensors import ControlFlowError, fill
from lightning_hybrid.step.tracing.recording import StepError
from lightning_hybrid.step.tracing.step_mode import Current


@dataclass(frozen=True)
class Job:
    """One step to run.

    Attributes:
        program: What this and the other ranks do.
        variants: The recorded form of each microbatch.
        steps: The user's step on each microbatch.
        around: Runs a forward in its contexts (autocast, keyed randomness), given the microbatch's index.
        seeds: What the backward of each microbatch's loss starts from.
        parameters: FQN by id of the module's parameters and tracked buffers.
        before_backward: Called with a stage, and whether it is its last one, before each backward.
        after_backward: The same after it.
        repeated_buffers: Where a rank has several stages, the buffers that each of them writes: dict and name.
        reduce: Called with a stage after its last backward.
        shares: How operations that average weigh, by microbatch and node.
        metrics: Those of the whole batch, where it is in several microbatches.
        after_forwards: Called with this rank's runs by microbatch, and whether the step broke, once its forwards are
            done and it has time.
        may_break: Whether a step that is not as it was recorded is brought to its end without it, so that all ranks
            can leave it; otherwise it ends the run.
    """

    program: Program
    variants: Sequence[Variant]
    steps: Sequence[Callable[[], Any]]
    around: Callable[[int, Callable[[], StageRun]], StageRun]
    seeds: Sequence[float] = ()
    parameters: Mapping[int, str] = field(default_factory=dict)
    repeated_buffers: Sequence[tuple[dict[str, Any], str]] = ()
    before_backward: Callable[[int, bool], None] = lambda stage, is_last: None
    after_backward: Callable[[int, bool], None] = lambda stage, is_last: None
    reduce: Callable[[int], None] = lambda stage: None
    shares: Sequence[Mapping[int, Share]] = ()
    metrics: BatchMetrics | None = None
    after_forwards: Callable[[Mapping[int, StageRun], bool], None] = lambda runs, is_broken: None
    may_break: bool = False


@dataclass
class Outcome:
    """What a rank has after a step.

    Attributes:
        runs: By microbatch, the last run of the user's step on this rank, with what all its stages made.
        spans: When which action ran, in seconds of ``time.perf_counter``.
        broken: What this rank has found that the step does otherwise; the rest means nothing then.
    """

    runs: dict[int, StageRun]
    spans: list[Span]
    broken: Exception | None = None


class Executor:
    """Runs jobs on one rank of a pipeline.

    Attributes:
        around_units: Entered around each job; replaces the forwards of units by sharded ones.
        around_step: Entered around each run of the user's step.
        around_backward: Entered around each backward.
        after_forward: Called after each forward, before what it made is sent.
    """

    def __init__(self, root: nn.Module, rank: int, transport: Transport, randomness: KeyedRandomness) -> None:
        """Args: root: the user's LightningModule. rank: pipeline coordinate of this rank."""
        self._root = root
        self._rank = rank
        self._transport = transport
        self._randomness, self.device = randomness, randomness.device
        self.around_units: Callable[[], AbstractContextManager[None]] = nullcontext
        self.around_step: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.after_forward: Callable[[], None] = lambda: None
        self._current: Current | None = None

    def has_guessed_size(self) -> bool:
        """Whether the step that runs was told a size that depends on values of another rank, as it was recorded."""
        watch = None if self._current is None else self._current.watch
        return isinstance(watch, ReplayWatch) and watch.changes.has_guessed

    def run(self, job: Job) -> Outcome:
        """Run one step's program; what goes wrong inside an action carries a note of its place."""
        replays = [replay for variant in job.variants for replay in variant.replays.values()]
        later = WeightsLater()
        split = later.installed if job.program.split else nullcontext
        with self.around_units(), installed(replays, self._randomness) as current, split(current):
            self._current = current
            run = _Run(self._root, self._rank, self._transport, job, current, later, self)
            instruction: Instruction | None = None
            try:
                for instruction in job.program.instructions[self._rank]:
                    if run.is_idle and not isinstance(instruction, Send):
                        run.use_idle_time()  # what others wait for has left
                    if isinstance(instruction, Compute):
                        run.compute(instruction.action)
                    elif isinstance(instruction, Receive):
                        run.receive(instruction.message, peer_of(instruction, job.program.schedule))
                    else:
                        run.send(instruction.message, peer_of(instruction, job.program.schedule))
                instruction = None
                if run.is_idle:
                    run.use_idle_time()
                self._transport.finish()
            except Exception as error:
                step = job.variants[0].assignment.graph.step
                note(error, place_of(instruction, self._rank, job.program, step))
                raise
        for variant in job.variants if job.seeds else ():
            variant.no_gradients.is_new = False
        return Outcome(run.results, run.spans, run.broken)


class _Run:
    """The state of one job while it runs."""

    def __init__(
        self,
        root: nn.Module,
        rank: int,
        transport: Transport,
        job: Job,
        current: Current,
        later: WeightsLater,
        contexts: Executor,
    ) -> None:
        self._root, self._rank, self._transport, self._job, self._current = root, rank, transport, job, current
        self._later = later
        self._left: dict[tuple[int, int], list[Left]] = {}
        self._contexts = contexts
        self._incoming: dict[Message, Incoming] = {}
        self._received: dict[tuple[int, int], Arrivals] = {}
        self._made: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._gradients: dict[Message, list[Tensor]] = {}
        self._backwards_left = {stage: len(job.steps) for stage in job.variants[0].replays}
        self._forwards_left = len(job.steps) * len(self._backwards_left)
        self._states = StageStates(root, self._backwards_left, self._forwards_left, job.repeated_buffers)
        self._has_backward = job.program.schedule.has_backward
        # The last rank goes straight on to its last backward, and waits for the others only after that.
        is_last = rank == job.program.schedule.num_ranks - 1
        self._idle_after = (Kind.B, Kind.I) if is_last and self._has_backward else (Kind.F,)
        self.broken: Exception | None = None
        self._broken: set[tuple[int, int]] = set()  # stages and microbatches without a forward
        self.is_idle = False  # its forwards are done, and their results not yet shared
        self.results: dict[int, StageRun] = {}
        self.spans: list[Span] = []

    def values_of(self, message: Message) -> list[Value]:
        """What a message carries."""
        return self._job.variants[message.microbatch].carried(message.direction, message.source, message.target)

    def receive(self, message: Message, peer: int) -> None:
        self._incoming[message] = self._transport.receive(message, peer, self.values_of(message))

    def send(self, message: Message, peer: int) -> None:
        values = self.values_of(message)
        if message.direction == "forward":
            made = self._made[message.source, message.microbatch]
            tensors = [made[value.index] for value in values]
        else:
            tensors = self._gradients.pop(message)
        self._transport.send(message, peer, values, tensors)

    def compute(self, action: Action) -> None:
        """Wait for what the action needs, and carry it out."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.F:
            start = time.perf_counter()
            start += self._forward(stage, microbatch, self._job.program.needs[action])
        elif action.kind in (Kind.B, Kind.I):
            arrived = {message: self._arrived(message) for message in self._job.program.needs[action]}
            start = time.perf_counter()
            with self._contexts.around_backward():
                self._backward(stage, microbatch, arrived)
            if (stage, microbatch) not in self._left:
                action = action._replace(kind=Kind.B)  # nothing could be left: it was a whole one
        elif action.kind is Kind.W:
            if (stage, microbatch) not in self._left:
                return
            start = time.perf_counter()
            with self._contexts.around_backward():
                finish(self._left.pop((stage, microbatch)))
        else:
            start = time.perf_counter()
            assert action.kind is Kind.REDUCE
            self._job.reduce(stage)
        self.spans.append(Span(self._rank, action, start, time.perf_counter()))
        to_do = self._forwards_left if Kind.F in self._idle_after else sum(self._backwards_left.values())
        self.is_idle |= action.kind in self._idle_after and not to_do

    def _settle(self, stage: int) -> None:
        """Whoever is told of gradients by the backward that completes them expects those of the ones before."""
        for action in [Action(Kind.W, *key) for key, left in self._left.items() if key[0] == stage and are_heard(left)]:
            self.compute(action)

    def use_idle_time(self) -> None:
        """Begin to share the results."""
        self.is_idle = False
        self._job.after_forwards(self.results, self.broken is not None)

    def _arrived(self, message: Message) -> list[Tensor]:
        if message in self._incoming:
            return self._incoming.pop(message).wait()
        # The other stage is on this rank too: hand the tensors over.
        values = self.values_of(message)
        if message.direction == "backward":
            return self._gradients.pop(message)
        made = self._made[message.source, message.microbatch]
        return [made[value.index].detach() for value in values]

    def _forward(self, stage: int, microbatch: int, needs: Sequence[Message]) -> float:
        """Run a forward; the seconds of it that were spent waiting."""
        replay = self._job.variants[microbatch].replays[stage]
        given = self._received[stage, microbatch] = Arrivals(
            {message: self.values_of(message) for message in needs},
            self._arrived,
            cloned=replay.recording.graph.cloned,
            has_backward=self._has_backward,
        )
        self._states.enter(stage)
        job = self._job
        shares = job.shares[microbatch] if job.shares else None
        step = partial(
            replay.run, job.steps[microbatch], given, job.parameters, self._current, shares=shares, metrics=job.metrics
        )
        is_split = (stage, microbatch) in job.program.split
        try:
            with self._contexts.around_step(), self._later.forward() if is_split else nullcontext():
                run = job.around(microbatch, step)
        except Exception as error:
            is_other = isinstance(error, StepError | ControlFlowError) or given.are_of_broken()
            if not (job.may_break and is_other):
                raise
            self._break(stage, microbatch, given, error)
            return given.waited
        self._states.leave(stage)
        self._made[stage, microbatch] = run.made
        self._forwards_left -= 1
        earlier = self.results.get(microbatch)
        held = {index: made.detach() for index, made in run.made.items() if index in replay.wanted_after}
        run.made = held if earlier is None else {**earlier.made, **held}
        run.scalars = run.scalars if earlier is None else run.scalars.joined(earlier.scalars)
        self.results[microbatch] = run
        given.leaves()  # also what the step has not read
        self._contexts.after_forward()
        return given.waited

    def _break(self, stage: int, microbatch: int, given: Arrivals, error: Exception) -> None:
        """Go on without this forward: what other stages wait for holds nothing, and none of it is kept."""
        self.broken = self.broken or error
        self._broken.add((stage, microbatch))
        variant = self._job.variants[microbatch]
        made: dict[int, Tensor] = {}
        for source, target in self._job.program.portals.forward:
            if source == stage:
                values = variant.carried("forward", source, target)
                made |= {value.index: broken_value(value, self._contexts.device) for value in values}
        self._made[stage, microbatch] = made
        self._states.leave(stage)
        self._forwards_left -= 1
        given.leaves()
        self._contexts.after_forward()

    def _backward(self, stage: int, microbatch: int, arrived: Mapping[Message, list[Tensor]]) -> None:
        self._backwards_left[stage] -= 1
        is_last = not self._backwards_left[stage]
        self._job.before_backward(stage, is_last)
        if is_last:
            self._settle(stage)
        if (stage, microbatch) not in self._broken:
            self._run_backward(stage, microbatch, arrived)
        self._job.after_backward(stage, is_last)
        variant = self._job.variants[microbatch]
        received = self._received.pop((stage, microbatch)).leaves()
        for source, target in self._job.program.portals.backward:
            if target == stage:
                indices = variant.gradient_portals.get((source, target), ())
                grads = [variant.no_gradients.sent((target, source, index), received[index]) for index in indices]
                self._gradients[Message("backward", stage, source, microbatch)] = grads

    def _run_backward(self, stage: int, microbatch: int, arrived: Mapping[Message, list[Tensor]]) -> None:
        made = self._made.pop((stage, microbatch))
        gradients: dict[int, Tensor] = {}
        variant = self._job.variants[microbatch]
        for message, tensors in arrived.items():
            for value, tensor in zip(self.values_of(message), tensors, strict=True):
                key = message.source, message.target, value.index
                if (sent := variant.no_gradients.received(key, tensor)) is not None:
                    known = gradients.get(value.index)
                    gradients[value.index] = sent if known is None else known + sent
        roots = [made[index] for index in gradients]
        seeds: list[Tensor] = list(gradients.values())
        if stage == variant.assignment.loss_stage:
            loss = made[variant.loss]
            roots.append(loss)
            seeds.append(torch.full_like(loss, self._job.seeds[microbatch]))
        pairs = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if _takes_gradient(root)]
        roots, seeds = [root for root, _ in pairs], [seed for _, seed in pairs]
        if pairs and (stage, microbatch) in self._job.program.split:
            if left := self._later.backward(roots, seeds):
                self._left[stage, microbatch] = left
        elif pairs:
            torch.autograd.backward(roots, seeds)


def _takes_gradient(value: Tensor) -> bool:
    # A view that was taken without grad says that it requires one, though nothing leads back from it.
    return value.requires_grad and not (value.grad_fn is None and value._is_view())


def fill_placeholders(run: StageRun, content: Mapping[int, Tensor]) -> None:
    """Give the absent tensors that the user may still hold their content.

    Args:
        run: A finished run.
        content: Detached tensors by value index; what is not among them stays absent.
    """
    filled: set[int] = set()
    for index, placeholder in run.placeholders:
        if index in content and id(placeholder) not in filled:
            filled.add(id(placeholder))
            fill(placeholder, content[index].clone())
