"""Tensor ranks as threads of one process, which run a unit full or sharded.

Each rank is a thread that runs the very code of `apply` on its own copy of the unit; where ranks exchange tensors, the
threads meet at a barrier: one for the tensor ranks of each context rank, one for the context ranks of each tensor rank.
Forward and backward are run, the weights are random numbers, and dropout is off.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.deterministic_mode import Exact
from lightning_hybrid.parts.placement import Placement, Shard, cut
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.deferred_tensors import whole_of
from lightning_hybrid.step.tracing.call_trace import CodePath, Step
from lightning_hybrid.step.tracing.side_outputs import taking_asides
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.runtime.region_mode import RegionWatch
from lightning_hybrid.tensor.runtime.sequence_sharding import Dealing
from lightning_hybrid.tensor.runtime.sharded_unit import sharded
from lightning_hybrid.tensor.shard_state.rank_randomness import AroundDraw
from lightning_hybrid.tensor.trial.example_inputs import Example

_T = TypeVar("_T")
_TIMEOUT = 60.0


@dataclass
class Outcome:
    """What one run gave.

    Attributes:
        outputs: The leaves of the unit's result, and of what is given aside in it.
        grads: Gradients by name: of parameters by FQN, of inputs by "input <place>".
        buffers: Buffers afterwards, by FQN.
        path: What the whole unit called of torch, and where.
    """

    outputs: list[Any]
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    path: list[Step] = field(default_factory=list)


class TrialFailed(Exception):
    """A rank of a trial raised; the message is what it said."""


@dataclass
class Setting:
    """How a unit is run.

    Attributes:
        training: In train or in eval mode.
        grad: With gradients, of outputs weighted by ``cotangents``.
        exact: Under `Exact`.
        dtype: Of all floating values.
    """

    training: bool = True
    grad: bool = True
    exact: bool = True
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{'train' if self.training else 'eval'} mode, {'with' if self.grad else 'without'} gradients"


def run_whole(
    unit: nn.Module, example: Example, setting: Setting, without: Collection[str] = (), *, backward: bool = True
) -> Outcome:
    """Run a unit as it is, and backward too if it is to have gradients; see `TrialRanks.run` for the arguments."""
    parameters = {fqn: p for fqn, p in unit.named_parameters() if p.requires_grad and fqn not in without}
    before = {fqn: buffer.clone() for fqn, buffer in unit.named_buffers()}
    unit.train(setting.training)
    try:
        path = CodePath()
        outputs, inputs = _forward(unit, example, setting, path if setting.exact else None)
        outcome = Outcome(outputs, {}, {fqn: buffer.clone() for fqn, buffer in unit.named_buffers()}, path.steps)
        if setting.grad and backward:
            outcome.grads = _gradients(outputs, {**inputs, **parameters})
        return outcome
    finally:
        for fqn, buffer in unit.named_buffers():
            buffer.copy_(before[fqn])


def _forward(
    unit: nn.Module,
    example: Example,
    setting: Setting,
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> tuple[list[Any], dict[str, Tensor]]:
    """The leaves of a unit's result, and the inputs that need a gradient, by name."""
    with torch.set_grad_enabled(setting.grad), Exact(setting.dtype) if setting.exact else contextlib.nullcontext():
        args, kwargs, inputs = example.call()
        with taking_asides() as asides, around or contextlib.nullcontext():
            result = unit(*args, **kwargs)
        outputs = [whole_of(output) for output in flatten((result, asides))[0]]
    return outputs, {f"input {place}": tensor for place, tensor in inputs.items()}


def _gradients(outputs: list[Any], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ends = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if ends and wanted:
        grads = torch.autograd.grad(ends, list(wanted.values()), [_cotangent(end) for end in ends], allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(wanted.items(), grads, strict=True)
    }


def _cotangent(tensor: Tensor) -> Tensor:
    """Weights of an output's elements; none is zero, and no two are related."""
    places = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    return torch.sin(places * 1.7 + 0.3).to(tensor.dtype) + 0.1


class _ThreadGroup:
    """Where the threads of one trial exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self.slots: list[Any] = [None] * size


class ThreadRanks:
    """One of the ranks of a trial; see `ranks.Ranks`."""

    def __init__(self, rank: int, meeting: _ThreadGroup) -> None:
        self.rank, self.size, self._group = rank, meeting.size, meeting

    def all_reduce(self, tensor: Tensor) -> None:
        """See `ranks.Ranks`."""
        # Each rank sums its share of all addends where they lie: they may be gradients of whole layers.
        addends = [addend.view(-1) for addend in self.all_gather(tensor)]
        shares = [addend.tensor_split(self.size)[self.rank] for addend in addends]
        for addend in shares[1:]:
            shares[0].add_(addend)
        for addend in shares[1:]:
            addend.copy_(shares[0])
        self._group.barrier.wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `ranks.Ranks`."""
        meeting = self._group
        meeting.slots[self.rank] = tensor.detach()
        meeting.barrier.wait()
        gathered = list(meeting.slots)
        meeting.barrier.wait()
        if len({other.shape for other in gathered}) > 1:
            raise TrialFailed(f"ranks exchange tensors of shapes {[tuple(other.shape) for other in gathered]}")
        return gathered

    def exchange(self, parts: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """See `ranks.Ranks`."""
        meeting = self._group
        meeting.slots[self.rank] = [part.detach() for part in parts]
        meeting.barrier.wait()
        received = [given[self.rank] for given in meeting.slots]
        meeting.barrier.wait()
        if [part.shape for part in received] != list(shapes):
            raise TrialFailed(f"a rank expects shapes {shapes} and is given {[part.shape for part in received]}")
        return received


def on_ranks(size: int, run: Callable[[ThreadRanks], _T]) -> list[_T]:
    """What a function gives on each rank, all of them run at once in threads.

    Args:
        size: Number of ranks.
        run: Called with one rank.

    Raises:
        TrialFailed: A rank raised, or the ranks did not exchange the same things.
    """
    return ThreadGroups(size, 1).run_on_each(lambda ranks, _: run(ranks))


class ThreadGroups:
    """Where tensor ranks times context ranks meet; they are in the order of `ranks.PairedRanks`."""

    def __init__(self, size: int, context: int) -> None:
        """Args: size, context: the numbers of tensor ranks and of context ranks."""
        self._tensor = [_ThreadGroup(size) for _ in range(context)]
        self._context = [_ThreadGroup(context) for _ in range(size)]

    def run_on_each(self, run: Callable[[ThreadRanks, ThreadRanks], _T]) -> list[_T]:
        """What a function gives on each rank, all of them run at once in threads.

        Args:
            run: Called with a rank as tensor ranks and as context ranks see it.

        Raises:
            TrialFailed: A rank raised, or the ranks did not exchange the same things.
        """
        found: dict[int, _T] = {}
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            outer, inner = divmod(rank, len(self._tensor))
            try:
                found[rank] = run(ThreadRanks(outer, self._tensor[inner]), ThreadRanks(inner, self._context[outer]))
            except BaseException as error:
                errors.append(error)
                for meeting in (*self._tensor, *self._context):
                    meeting.barrier.abort()

        ranks = range(len(self._tensor) * len(self._context))
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
            if first is None:
                raise TrialFailed("the ranks did not exchange the same things")
            raise TrialFailed(f"{type(first).__name__}: {first}") from first
        return [found[rank] for rank in ranks]


class TrialRanks:
    """Copies of a unit for each rank, used for many trials of plans.

    Attributes:
        copies: Of the unit, one for each rank at least; they hold the whole's own parameters.
        num_trials: How often the unit was run.
        watches: Of the last trial, by rank.
        dealings: Likewise.
        num_gathers: Of what is cut by its vocabulary, in the last trial.
    """

    def __init__(self, whole: nn.Module, size: int, context: int = 1, *, copies: list[nn.Module] | None = None) -> None:
        """Make the copies.

        Args:
            whole: The unit with random weights, which the copies share.
            size: Number of tensor ranks.
            context: Number of context ranks.
            copies: Those of other trials of the unit; what is missing is added.
        """
        self._whole, self.size, self.context = whole, size, context
        self.copies = [] if copies is None else copies
        while len(self.copies) < size * context:
            self.copies.append(copy.deepcopy(whole, {id(p): p for p in whole.parameters()}))
        self.num_trials = 0
        self._parts: dict[tuple[str, int], tuple[Placement, Tensor]] = {}
        self.watches: list[RegionWatch | None] = []
        self.dealings: list[Dealing | None] = []
        self.num_gathers = 0

    def run(
        self,
        plan: UnitPlan,
        example: Example,
        setting: Setting,
        *,
        learning: bool = False,
        check: Callable[[list[Outcome]], bool] = lambda _: True,
        without: Collection[str] = (),
    ) -> list[Outcome]:
        """Run the unit on all ranks.

        Args:
            plan: How it is sharded.
            example: Its arguments.
            setting: How it is run.
            learning: Whether the rules of the plan are made on the way.
            check: Called with the outputs; gradients are made if it says so, and there are to be any.
            without: Parameters whose gradients are not wanted, by FQN; while learning, they need one all the same.

        Raises:
            TrialFailed: A rank raised, or the ranks did not exchange the same things.
        """
        self.num_trials += 1
        self.watches = [None] * (self.size * self.context)
        self.dealings = [None] * (self.size * self.context)
        meetings = ThreadGroups(self.size, self.context)
        runs = meetings.run_on_each(
            lambda ranks, context: self._one(ranks, context, plan, example, setting, learning, without),
        )
        outcomes = [outcome for outcome, _ in runs]
        if check(outcomes) and setting.grad:

            def backward(ranks: ThreadRanks, context: ThreadRanks) -> dict[str, Tensor]:
                outcome, wanted = runs[ranks.rank * context.size + context.rank]
                return _gradients(outcome.outputs, wanted)

            for outcome, grads in zip(outcomes, meetings.run_on_each(backward), strict=True):
                outcome.grads = grads
        return outcomes

    def _part(self, fqn: str, whole: Tensor, placement: Placement, rank: int) -> Tensor:
        """A rank's part of a parameter; weights, which units do not write, are cut once for all trials of a plan."""
        if whole.dim() < 2:
            return cut(whole, placement, rank, self.size).clone()
        known = self._parts.get((fqn, rank))
        if known is None or known[0] != placement:
            known = self._parts[fqn, rank] = placement, cut(whole, placement, rank, self.size)
        return known[1].detach()

    def _one(
        self,
        ranks: ThreadRanks,
        context: ThreadRanks,
        plan: UnitPlan,
        example: Example,
        setting: Setting,
        learning: bool,
        without: Collection[str],
    ) -> tuple[Outcome, dict[str, Tensor]]:
        """What a rank's forward gave, and what is wanted a gradient of."""
        rank, place = ranks.rank, ranks.rank * context.size + context.rank
        unit = self.copies[place].train(setting.training)
        local: dict[str, Tensor] = {}
        for fqn, tensor in self._whole.named_parameters():
            needs = tensor.requires_grad and (learning or fqn not in without)
            local[fqn] = self._part(fqn, tensor.detach(), plan.placements[fqn], rank).requires_grad_(needs)
        for fqn, buffer in self._whole.named_buffers():
            local[fqn] = cut(buffer, plan.placements[fqn], rank, self.size).clone()
        parameters = {fqn: tensor for fqn, tensor in local.items() if tensor.requires_grad and fqn not in without}
        # Nothing is drawn; and threads that ask for torch's generator can wait for each other for ever: who has its
        # lock waits for the interpreter's if garbage is collected just then.
        around: AroundDraw = contextlib.nullcontext
        running = sharded(
            unit, plan, ranks, context=context, tensors=lambda: local, around_draw=around, around_own=around
        )
        with running as runner:
            runner.learning = learning
            try:
                outputs, inputs = _forward(unit, example, setting)
            finally:
                self.watches[place], self.dealings[place] = runner.last_watch, runner.last_dealing
                self.num_gathers = runner.num_gathers
        buffers = {fqn: local[fqn] for fqn, _ in self._whole.named_buffers()}
        return Outcome(outputs, buffers=buffers), {**inputs, **parameters}


def local_and_expected(
    outcomes: list[Outcome], plan: UnitPlan, name: str, kind: str, wanted: Tensor
) -> list[tuple[list[Tensor], Tensor]]:
    """What ranks have of a gradient or buffer, beside what it should be; nothing is joined, layers are large.

    Args:
        outcomes: Of all ranks.
        plan: That they ran by.
        name: Of the parameter, buffer or input.
        kind: "grads" or "buffers".
        wanted: The whole.

    Returns:
        For each part of one that is cut, what each context rank has of it; for others, what all ranks have.
    """
    found = [getattr(outcome, kind)[name] for outcome in outcomes]
    placement, context = plan.placements.get(name), len(found) // plan.size
    if not isinstance(placement, Shard):
        return [(found, wanted)]
    return [
        (
            [local.narrow(placement.dim, local_start, length) for local in found[rank * context :][:context]],
            wanted.narrow(placement.dim, start, length),
        )
        for rank, local_start, start, length in placement.places(plan.size)
    ]
