"""The executor of a pipeline program: forwards, backwards and transfers of one rank, in order.

The data path of one microbatch on one stage::

    wait for messages -> replay the step (F) -> send      ...      wait for gradients -> backward (B) -> send
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.batch.means import Share
from lightning_hybrid.batch.metrics import FullBatchMetrics
from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError, StepChanged, StepError, add_error_note
from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.params.gradient_hooks import StepHooks
from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.pipeline.runtime.gradients import ParameterGradients
from lightning_hybrid.pipeline.runtime.program import location_of
from lightning_hybrid.pipeline.runtime.rollback import StageModuleStates
from lightning_hybrid.pipeline.runtime.running_averages import RunningAverages
from lightning_hybrid.pipeline.runtime.split_backward import DeferredGradient, SplitBackward, finish, have_hooks
from lightning_hybrid.pipeline.runtime.transport import ReceivedValues, Transport, value_of_broken_step
from lightning_hybrid.pipeline.stages.plan import ELSEWHERE, StagePlan, TraceVariant
from lightning_hybrid.pipeline.stages.training import Backwards, Mark
from lightning_hybrid.schedule import Action, Compute, Instruction, Kind, Message, Program, Receive, Send, peer_of
from lightning_hybrid.step.replay.stage import ReplayWatch, StageRun, instrumented
from lightning_hybrid.step.standins.tensors import SHAPE_METHODS, fill, is_absent
from lightning_hybrid.step.tracing.mode import CurrentRun
from lightning_hybrid.techniques.technique import Active

_PROPERTIES = frozenset({"__get__", "__set__", "__delete__"})  # of which those with content are methods' results


@dataclass(frozen=True)
class Job:
    """The inputs of the executor for one step."""

    program: Program  # the instructions of all ranks
    variants: Sequence[TraceVariant]  # the trace of each microbatch
    steps: Sequence[Callable[[], Any]]  # the user's step on each microbatch
    # context of a forward (autocast, keyed randomness), from the microbatch's index
    around: Callable[[int], AbstractContextManager[None]]
    backwards: Backwards  # what is done around its backwards
    seeds: Sequence[float]  # the gradient from which the backward of each microbatch's loss starts
    factors: Sequence[float]  # what each microbatch adds to the gradients of parameters is multiplied by
    # where a rank has several stages, the buffers that each of them writes: dict and name
    repeated_buffers: Sequence[tuple[dict[str, Any], str]]
    # the weights of operations that average, by microbatch and node; empty if all weigh by samples
    shares: Sequence[Mapping[int, Share]]
    metrics: FullBatchMetrics | None  # metrics of the full batch, where it has several microbatches
    # called with this rank's runs by microbatch, and whether the step broke, once its forwards are done and the rank is
    # idle
    after_forwards: Callable[[Mapping[int, StageRun], bool], None]
    # whether a step that diverges from its recording runs to its end with placeholders, so that all ranks can roll it
    # back; otherwise its error ends the run
    may_break: bool


@dataclass
class Outcome:
    """The results of a step on one rank."""

    # by microbatch, the last run of the user's step on this rank, with the values of all its stages
    runs: dict[int, StageRun]
    broken: Exception | None  # the error by which the step diverged from its recording; the rest is meaningless then
    registered: StepHooks  # the hooks that the step has registered on parameters
    averages: RunningAverages  # of a stage that several ranks hold


class Executor:
    """Runs jobs on one rank of a pipeline.

    Attributes:
        active: The techniques that run layers.
        guards: Are off in backwards and reductions.
    """

    def __init__(self, plan: StagePlan, transport: Transport, guards: ReadGuards) -> None:
        """Set up for the stages of a module on this rank."""
        self.plan, self.root, self.rank, self.transport, self.guards = plan, plan.root, plan.rank, transport, guards
        self.device, self.active = plan.randomness.device, Active()
        self._current: CurrentRun | None = None

    def connect(self, active: Active) -> None:
        """Run layers as techniques do, from the next job on."""
        self.active = active

    def has_guessed_size(self) -> bool:
        """Whether the running step has read a recorded size in place of one that depends on values of another rank."""
        watch = None if self._current is None else self._current.watch
        return isinstance(watch, ReplayWatch) and watch.changes.has_guessed

    def run(self, job: Job) -> Outcome:
        """Run one step's program; an error inside an instruction gets a note of its stage and microbatch."""
        replays = [replay for variant in job.variants for replay in variant.replays.values()]
        split_backward = SplitBackward()
        split = split_backward.instrumented if job.program.split else nullcontext
        with (
            self.active.running(),
            instrumented(replays, self.plan.randomness) as current,
            split(current),
            closing(ParameterGradients(self.root, len(job.seeds) > 1)) as gradients,
        ):
            self._current = current
            run = _Run(self, job, current, split_backward, gradients)
            instruction: Instruction | None = None
            try:
                for instruction in job.program.instructions[self.rank]:
                    if run.is_idle and not isinstance(instruction, Send):
                        run.use_idle_time()  # the values that others wait for have been sent
                    if isinstance(instruction, Compute) and instruction.action.kind is Kind.F:
                        run.forward(instruction.action)
                    elif isinstance(instruction, Compute):
                        run.compute(instruction.action)
                    elif isinstance(instruction, Receive):
                        run.receive(instruction.message, peer_of(instruction, job.program.schedule))
                    else:
                        run.send(instruction.message, peer_of(instruction, job.program.schedule))
                instruction = None
                if run.is_idle or run.is_postponed:
                    run.use_idle_time()
                run.run_elsewhere(len(job.steps))
                self.transport.finish()
            except Exception as error:
                step = job.variants[0].assignment.graph.step
                add_error_note(error, location_of(instruction, self.rank, job.program, step))
                raise
        for variant in job.variants if job.backwards.are_run else ():
            variant.missing_grads.settle()
        return Outcome(run.results, run.broken, gradients.registered, run.averages)


class _Run:
    """The state of one job while it runs."""

    def __init__(
        self,
        executor: Executor,
        job: Job,
        current: CurrentRun,
        split_backward: SplitBackward,
        parameter_gradients: ParameterGradients,
    ) -> None:
        self._executor, self._rank, self._transport = executor, executor.rank, executor.transport
        self._job, self._current, self._split_backward = job, current, split_backward
        self._parameter_gradients, self._names = parameter_gradients, executor.plan.names()
        self._deferred: dict[tuple[int, int], list[DeferredGradient]] = {}
        self._incoming: dict[Message, Callable[[], list[Tensor]]] = {}
        self._received: dict[tuple[int, int], ReceivedValues] = {}
        self._made: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._gradients: dict[Message, list[Tensor]] = {}
        kinds = [(action.stage, action.kind) for action in job.program.schedule.actions[self._rank]]
        self._forwards_left = sum(kind is Kind.F for _, kind in kinds)
        self._backwards_left = {stage: kinds.count((stage, Kind.F)) for stage in executor.plan.stages}
        self._states = StageModuleStates(executor.root, self._backwards_left, self._forwards_left, job.repeated_buffers)
        self._has_backward = job.program.schedule.has_backward
        # The rank of the last stage goes straight on to its last backward, and waits for the others only after that.
        schedule = job.program.schedule
        is_last = executor.rank in schedule.ranks_of_stages[-1]
        self._idle_after = (Kind.B, Kind.I) if is_last and self._has_backward else (Kind.F,)
        self.broken: Exception | None = None
        self._broken: set[tuple[int, int]] = set()  # stages and microbatches without a forward
        self._has_begun_exchange = self.is_postponed = False
        self.is_idle = False  # its forwards are done, and the exchange of their results has not begun
        self.results: dict[int, StageRun] = {}
        self.averages = RunningAverages(executor.root, executor.plan.shared_buffers())
        self._num_run = 0  # microbatches on which the user's code has run, where a stage has several ranks

    def values_of(self, message: Message) -> list[Value]:
        """The values that a message carries."""
        return self._job.variants[message.microbatch].message_values(message.direction, message.source, message.target)

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

    def forward(self, action: Action) -> None:
        """Wait for the messages that a forward needs, and run it."""
        stage, microbatch, job = action.stage, action.microbatch, self._job
        self.run_elsewhere(microbatch)
        start, replay = job.backwards.recorder.mark(), job.variants[microbatch].replays[stage]
        inputs = self._received[stage, microbatch] = ReceivedValues(
            {message: self.values_of(message) for message in job.program.needs[action]},
            self._arrived,
            cloned=replay.recording.graph.cloned,
            has_backward=self._has_backward,
        )
        self._states.enter(stage)
        shares = job.shares[microbatch] if job.shares else {}
        split = self._split_backward.forward() if (stage, microbatch) in job.program.split else nullcontext()
        registered = self._parameter_gradients.registered.run()
        try:
            averages = self.averages.microbatch(microbatch)
            with self._executor.active.around_step(), split, registered, averages, job.around(microbatch):
                run = replay.run(job.steps[microbatch], inputs, self._names, self._current, shares, job.metrics)
        except Exception as error:
            has_diverged = isinstance(error, StepError | ControlFlowError) or inputs.include_broken()
            if not (job.may_break and has_diverged):
                raise
            self._break(stage, microbatch, error)
        else:
            self._made[stage, microbatch] = run.made
            earlier = self.results.get(microbatch)
            self.results[microbatch] = run.kept(replay.wanted_after, earlier)
        self._states.leave(stage)
        self._num_run = microbatch + 1
        self._forwards_left -= 1
        inputs.leaves()  # also receives the values that the step has not read
        self._executor.active.settle()
        self._done(action, start, inputs.waited)

    def run_elsewhere(self, end: int) -> None:
        """Run the user's code, without operations, on the microbatches before ``end`` that other ranks compute."""
        if not self._executor.plan.widths:
            return
        for microbatch in range(self._num_run, end):
            replay, job = self._job.variants[microbatch].replays[ELSEWHERE], self._job
            registered = self._parameter_gradients.registered.run()
            try:
                with registered, job.around(microbatch):
                    run = replay.run(job.steps[microbatch], {}, self._names, self._current)
            except (StepError, ControlFlowError) as error:
                if not job.may_break:
                    raise
                self.broken = self.broken or error
            else:
                self.results[microbatch] = run.kept(replay.wanted_after, None)
        self._num_run = max(self._num_run, end)

    def _break(self, stage: int, microbatch: int, error: Exception) -> None:
        """Continue without this forward: other stages get placeholders, and the step is rolled back at its end."""
        self.broken = self.broken or error
        self._broken.add((stage, microbatch))
        variant = self._job.variants[microbatch]
        made = self._made[stage, microbatch] = dict[int, Tensor]()
        for source, target in self._job.program.portals.forward:
            if source == stage:
                values = variant.message_values("forward", source, target)
                made |= {value.index: value_of_broken_step(value, self._executor.device) for value in values}

    def compute(self, action: Action) -> None:
        """Wait for the messages that a backward or a reduction needs, and run it."""
        stage, microbatch, recorder = action.stage, action.microbatch, self._job.backwards.recorder
        off = self._executor.guards.off
        if action.kind in (Kind.B, Kind.I):
            arrived = {message: self._arrived(message) for message in self._job.program.needs[action]}
            start, is_last = recorder.mark(), self._backwards_left[stage] == 1
            weighted = self._parameter_gradients.by(self._job.factors[microbatch], stage, is_last=is_last)
            with off(), weighted:
                self._backward(stage, microbatch, arrived)
            if (stage, microbatch) not in self._deferred:
                action = action._replace(kind=Kind.B)  # nothing could be deferred: it was a full backward
        elif action.kind is Kind.W:
            if (stage, microbatch) not in self._deferred:
                return
            start = recorder.mark()
            with off():
                finish(self._deferred.pop((stage, microbatch)))
        else:
            start = recorder.mark()
            assert action.kind is Kind.REDUCE
            with off():  # a reducer that read full gradients would average those
                self._job.backwards.reduce(stage)
        self._done(action, start)

    def _done(self, action: Action, start: Mark, waited: float = 0.0) -> None:
        self._job.backwards.recorder.add(action, start, waited)
        to_do = self._forwards_left if Kind.F in self._idle_after else sum(self._backwards_left.values())
        self.is_idle |= action.kind in self._idle_after and not to_do

    def _finish_hooked_weights(self, stage: int) -> None:
        """Finish deferred weights with hooks: the last backward calls these, and they expect complete gradients."""
        for key in [key for key, deferred in self._deferred.items() if key[0] == stage and have_hooks(deferred)]:
            self.compute(Action(Kind.W, *key))

    def use_idle_time(self) -> None:
        """Begin the exchange of results, which tells whether the step broke: a hook in a backward may break it yet."""
        self.run_elsewhere(len(self._job.steps))
        self.is_idle = False
        self.is_postponed = any(self._backwards_left.values()) and self._parameter_gradients.has_hooks
        if self._has_backward and self.is_postponed:
            return
        self._has_begun_exchange = True
        self._job.after_forwards(self.results, self.broken is not None)

    def _arrived(self, message: Message) -> list[Tensor]:
        if message in self._incoming:
            return self._incoming.pop(message)()
        # The other stage is on this rank too: no transfer.
        values = self.values_of(message)
        if message.direction == "backward":
            return self._gradients.pop(message)
        made = self._made[message.source, message.microbatch]
        return [made[value.index].detach() for value in values]

    def _backward(self, stage: int, microbatch: int, arrived: Mapping[Message, list[Tensor]]) -> None:
        self._backwards_left[stage] -= 1
        is_last = not self._backwards_left[stage]
        self._job.backwards.before(stage, is_last)
        if is_last:
            self._finish_hooked_weights(stage)
        if (stage, microbatch) not in self._broken:
            try:
                if is_last:  # these call hooks
                    self._check_hooks()
                self._run_backward(stage, microbatch, arrived)
            except StepError as error:
                if not self._job.may_break or self._has_begun_exchange:
                    raise
                self.broken = self.broken or error
        self._job.backwards.after(stage, is_last)
        variant = self._job.variants[microbatch]
        received = self._received.pop((stage, microbatch)).leaves()
        for source, target in self._job.program.portals.backward:
            if target == stage:
                indices = variant.gradient_portals.get((source, target), ())
                grads = [variant.missing_grads.sent((target, source, index), received[index]) for index in indices]
                self._gradients[Message("backward", stage, source, microbatch)] = grads

    def _check_hooks(self) -> None:
        """Refuse hooks on parameters that several ranks hold: on each they would see the gradient of its share."""
        for parameter in self._parameter_gradients.hooked():
            name = self._names[id(parameter)]
            ranks = list(self._executor.plan.ranks_of(name))
            if len(ranks) > 1:
                raise StepError(
                    f"a hook on the gradient of {name!r}, which pipeline ranks {ranks} hold, would see on each of them"
                    " what its own stage or microbatches add; change the gradient in on_before_optimizer_step, or"
                    f" {WITHOUT_STAGES}",
                    entry="hook-shared",
                )

    def _run_backward(self, stage: int, microbatch: int, arrived: Mapping[Message, list[Tensor]]) -> None:
        made = self._made.pop((stage, microbatch))
        gradients: dict[int, Tensor] = {}
        variant = self._job.variants[microbatch]
        for message, tensors in arrived.items():
            for value, tensor in zip(self.values_of(message), tensors, strict=True):
                key = message.source, message.target, value.index
                if (sent := variant.missing_grads.received(key, tensor)) is not None:
                    total = gradients.get(value.index)
                    gradients[value.index] = sent if total is None else total + sent
        roots = [made[index] for index in gradients]
        seeds: list[Tensor] = list(gradients.values())
        if stage == variant.assignment.loss_stage:
            loss = made[variant.loss]
            roots.append(loss)
            seeds.append(torch.full_like(loss, self._job.seeds[microbatch]))
        pairs = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if _takes_gradient(root)]
        roots, seeds = [root for root, _ in pairs], [seed for _, seed in pairs]
        run = AbsentParameterReads(self._executor.root).backward
        if pairs and (stage, microbatch) in self._job.program.split:
            if deferred := self._split_backward.backward(roots, seeds, run):
                self._deferred[stage, microbatch] = deferred
        elif pairs:
            run(roots, seeds)


def _takes_gradient(value: Tensor) -> bool:
    # A view taken under no_grad has requires_grad set, though it has no graph.
    return value.requires_grad and not (value.grad_fn is None and value._is_view())


def fill_placeholders(run: StageRun, content: Mapping[int, Tensor]) -> None:
    """Fill absent tensors that user code may still reference with detached ``content``, by index, in their shapes."""
    filled: set[int] = set()
    for index, placeholder in run.placeholders:
        if index in content and id(placeholder) not in filled:
            filled.add(id(placeholder))
            fill(placeholder, content[index].clone())


# Reads of parameters of other stages by code of the user that runs in a backward: hooks on gradients.
# A stage runs its backward while others do something else, so the content cannot be asked for there. The step is undone
# and runs on shards from then on.


class AbsentParameterReads(TorchFunctionMode):
    """Raises where a function reads a parameter that is on another stage, while it is entered."""

    only_watches = True

    def __init__(self, root: nn.Module) -> None:
        """Take the user's module; some of its parameters are absent."""
        super().__init__()
        self._root = root

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; ``StepChanged`` if it reads an absent parameter."""
        name = getattr(func, "__name__", "")
        if name not in SHAPE_METHODS and name != "__hash__":
            member = func.__self__.__name__ if name in _PROPERTIES else ""
            for arg in args if member in ("", "data") else ():
                for leaf in arg if isinstance(arg, list | tuple) else (arg,):
                    if is_absent(leaf) and getattr(leaf, "_is_param", False):
                        raise self._error(leaf)
        return func(*args, **(kwargs or {}))

    def backward(self, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """Run `torch.autograd.backward` of values with their gradients, of any shapes, in this mode.

        Torch's own function is one that a mode handles, and so would run outside of it.
        """
        engine = torch.autograd.Variable._execution_engine
        with self:
            engine.run_backward(
                tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _error(self, parameter: Any) -> StepChanged:
        fqn = next((fqn for fqn, other in self._root.named_parameters() if other is parameter), "")
        return StepChanged(
            f"a hook on a gradient reads '{fqn}', a parameter of another stage, in the backward; read it in the step or"
            f" in a hook such as on_train_batch_start, or {WITHOUT_STAGES}",
            entry="hook-reads-stage",
        )
