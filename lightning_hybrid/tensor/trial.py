"""Runs a unit, whole or on all tensor ranks at once, in one process.

Each rank is a thread that runs the very code of `apply` on its own copy of the unit; where ranks exchange tensors, the
threads meet at a barrier: one for the tensor ranks of each context rank, one for the context ranks of each tensor rank.
Forward and backward are run, the weights are random numbers, and dropout is off.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hybrid.parts.placement import Placement, Shard, cut, join
from lightning_hybrid.step.asides import taking_asides
from lightning_hybrid.step.deferred import whole_of
from lightning_hybrid.step.exact import Exact
from lightning_hybrid.step.tree import flatten
from lightning_hybrid.tensor.apply import sharded
from lightning_hybrid.tensor.dealing import Dealing
from lightning_hybrid.tensor.draws import AroundDraw
from lightning_hybrid.tensor.examples import Example
from lightning_hybrid.tensor.plan import UnitPlan
from lightning_hybrid.tensor.watch import RegionWatch

_T = TypeVar("_T")
_TIMEOUT = 60.0


@dataclass
class Outcome:
    """What one run gave.

    Attributes:
        outputs: The leaves of the unit's result, and of what is given aside in it.
        grads: Gradients by name: of parameters by FQN, of inputs by "input <place>".
        buffers: Buffers afterwards, by FQN.
    """

    outputs: list[Any]
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


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


def run_whole(unit: nn.Module, example: Example, setting: Setting) -> Outcome:
    """Run a unit as it is."""
    parameters = {fqn: p for fqn, p in unit.named_parameters() if p.requires_grad}
    before = {fqn: buffer.clone() for fqn, buffer in unit.named_buffers()}
    unit.train(setting.training)
    try:
        outcome = _run(unit, example, setting, parameters)
        outcome.buffers = {fqn: buffer.clone() for fqn, buffer in unit.named_buffers()}
        return outcome
    finally:
        for fqn, buffer in unit.named_buffers():
            buffer.copy_(before[fqn])


def _run(unit: nn.Module, example: Example, setting: Setting, parameters: Mapping[str, Tensor]) -> Outcome:
    with torch.set_grad_enabled(setting.grad), Exact(setting.dtype) if setting.exact else contextlib.nullcontext():
        args, kwargs, inputs = example.call()
        with taking_asides() as asides:
            result = unit(*args, **kwargs)
        outputs = [whole_of(output) for output in flatten((result, asides))[0]]
    if not setting.grad:
        return Outcome(outputs)
    wanted = {**{f"input {place}": tensor for place, tensor in inputs.items()}, **parameters}
    ends = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    if not ends:
        return Outcome(outputs)
    grads = torch.autograd.grad(ends, list(wanted.values()), [_cotangent(end) for end in ends], allow_unused=True)
    filled = {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(wanted.items(), grads, strict=True)
    }
    return Outcome(outputs, filled)


def _cotangent(tensor: Tensor) -> Tensor:
    """Weights of an output's elements; none is zero, and no two are related."""
    places = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    return torch.sin(places * 1.7 + 0.3).to(tensor.dtype) + 0.1


class _Meeting:
    """Where the threads of one trial exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self.slots: list[Any] = [None] * size


class ThreadRanks:
    """One of the ranks of a trial; see `ranks.Ranks`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_reduce(self, tensor: Tensor) -> None:
        """See `ranks.Ranks`."""
        addends = self.all_gather(tensor.detach().clone())
        tensor.copy_(torch.stack(addends).sum(0))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `ranks.Ranks`."""
        meeting = self._meeting
        meeting.slots[self.rank] = tensor.detach()
        meeting.barrier.wait()
        gathered = list(meeting.slots)
        meeting.barrier.wait()
        if len({other.shape for other in gathered}) > 1:
            raise TrialFailed(f"ranks exchange tensors of shapes {[tuple(other.shape) for other in gathered]}")
        return gathered

    def exchange(self, parts: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """See `ranks.Ranks`."""
        meeting = self._meeting
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
    return on_both(size, 1, lambda ranks, _: run(ranks))


def on_both(size: int, context: int, run: Callable[[ThreadRanks, ThreadRanks], _T]) -> list[_T]:
    """What a function gives on tensor ranks times context ranks, in the order of `ranks.PairedRanks`.

    Args:
        size: Number of tensor ranks.
        context: Number of context ranks.
        run: Called with a rank as tensor ranks and as context ranks see it.

    Raises:
        TrialFailed: A rank raised, or the ranks did not exchange the same things.
    """
    tensor_meetings = [_Meeting(size) for _ in range(context)]
    context_meetings = [_Meeting(context) for _ in range(size)]
    num_ranks = size * context
    found: dict[int, _T] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        outer, inner = divmod(rank, context)
        try:
            found[rank] = run(ThreadRanks(outer, tensor_meetings[inner]), ThreadRanks(inner, context_meetings[outer]))
        except BaseException as error:
            errors.append(error)
            for meeting in (*tensor_meetings, *context_meetings):
                meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
        if first is None:
            raise TrialFailed("the ranks did not exchange the same things")
        raise TrialFailed(f"{type(first).__name__}: {first}") from first
    return [found[rank] for rank in range(num_ranks)]


class TrialRanks:
    """Copies of a unit for each rank, used for many trials of plans."""

    def __init__(self, whole: nn.Module, size: int, context: int = 1) -> None:
        """Args: whole: the unit with random weights, which the copies share. size, context: the numbers of ranks."""
        self._whole, self.size, self.context = whole, size, context
        held = {id(p): p for p in whole.parameters()}
        self._copies = [copy.deepcopy(whole, dict(held)) for _ in range(size * context)]
        self.num_trials = 0
        self._parts: dict[tuple[str, int], tuple[Placement, Tensor]] = {}
        self.watches: list[RegionWatch | None] = []
        self.dealings: list[Dealing | None] = []
        self.num_gathers = 0  # of what is cut by its vocabulary, in the last trial

    def run(self, plan: UnitPlan, example: Example, setting: Setting, *, learning: bool = False) -> list[Outcome]:
        """Run the unit on all ranks.

        Args:
            plan: How it is sharded.
            example: Its arguments.
            setting: How it is run.
            learning: Whether the rules of the plan are made on the way.

        Raises:
            TrialFailed: A rank raised, or the ranks did not exchange the same things.
        """
        self.num_trials += 1
        self.watches = [None] * (self.size * self.context)
        self.dealings = [None] * (self.size * self.context)
        return on_both(
            self.size,
            self.context,
            lambda ranks, context: self._one(ranks, context, plan, example, setting, learning),
        )

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
    ) -> Outcome:
        rank, place = ranks.rank, ranks.rank * context.size + context.rank
        unit = self._copies[place].train(setting.training)
        local: dict[str, Tensor] = {}
        for fqn, tensor in self._whole.named_parameters():
            local[fqn] = self._part(fqn, tensor.detach(), plan.placements[fqn], rank).requires_grad_(
                tensor.requires_grad
            )
        for fqn, buffer in self._whole.named_buffers():
            local[fqn] = cut(buffer, plan.placements[fqn], rank, self.size).clone()
        parameters = {fqn: local[fqn] for fqn, p in self._whole.named_parameters() if p.requires_grad}
        # Nothing is drawn; and threads that ask for torch's generator can wait for each other for ever: who has its
        # lock waits for the interpreter's if garbage is collected just then.
        around: AroundDraw = contextlib.nullcontext
        running = sharded(
            unit, plan, ranks, context=context, tensors=lambda: local, around_draw=around, around_own=around
        )
        with running as runner:
            runner.learning = learning
            try:
                outcome = _run(unit, example, setting, parameters)
            finally:
                self.watches[place], self.dealings[place] = runner.last_watch, runner.last_dealing
                self.num_gathers = runner.num_gathers
        outcome.buffers = {fqn: local[fqn] for fqn, _ in self._whole.named_buffers()}
        return outcome


def joined(outcomes: list[Outcome], plan: UnitPlan, name: str, kind: str) -> list[Tensor]:
    """A gradient or buffer as each rank has it; for one that is cut, the whole, once for each context rank."""
    found = [getattr(outcome, kind)[name] for outcome in outcomes]
    placement, context = plan.placements.get(name), len(found) // plan.size
    return [join(found[k::context], placement) for k in range(context)] if isinstance(placement, Shard) else found
