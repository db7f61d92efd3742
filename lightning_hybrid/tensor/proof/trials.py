"""Runs of a unit on trial: unsharded, or sharded on threads as ranks, each with its own copy of the unit.

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

from lightning_hybrid.equivalence.deterministic import DeterministicMode
from lightning_hybrid.params.placement import Placement, Shard, shard_tensor
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.kernels import slow_attention
from lightning_hybrid.step.standins.tensors import materialize
from lightning_hybrid.step.tracing.asides import taking_asides
from lightning_hybrid.step.tracing.lines import TorchCall, TorchCallSites
from lightning_hybrid.tensor.collectives import Ranks
from lightning_hybrid.tensor.plan import UnitPlan
from lightning_hybrid.tensor.proof.example import Example
from lightning_hybrid.tensor.runtime.unit import ShardedUnit, unit_on_trial


@dataclass
class Outcome:
    """The outputs, gradients and buffers of one run."""

    outputs: list[Any]  # the leaves of the unit's result, and its side outputs
    grads: dict[str, Tensor] = field(default_factory=dict)  # of parameters by FQN, of inputs by "input <leaf index>"
    buffers: dict[str, Tensor] = field(default_factory=dict)  # buffers after the run, by FQN
    path: list[TorchCall] = field(default_factory=list)  # the torch calls of the unsharded unit, each with its line


@dataclass
class Setting:
    """The modes in which a unit is run."""

    training: bool = True  # train mode instead of eval mode
    grad: bool = True  # with gradients, of outputs weighted by `_cotangent`
    exact: bool = True  # under `DeterministicMode`
    dtype: torch.dtype = torch.float64  # dtype of all floating values

    def __str__(self) -> str:
        return f"{'train' if self.training else 'eval'} mode, {'with' if self.grad else 'without'} gradients"


def run_unsharded(
    unit: nn.Module, example: Example, setting: Setting, without: Collection[str] = (), *, backward: bool = True
) -> Outcome:
    """Runs a unit unsharded, and its backward if the setting has gradients; arguments as for `TrialRanks.run`."""
    parameters = {fqn: p for fqn, p in unit.named_parameters() if p.requires_grad and fqn not in without}
    before = {fqn: buffer.clone() for fqn, buffer in unit.named_buffers()}
    unit.train(setting.training)
    try:
        path = TorchCallSites()
        outputs, inputs = run_forward(unit, example, setting, path if setting.exact else None)
        outcome = Outcome(outputs, {}, {fqn: buffer.clone() for fqn, buffer in unit.named_buffers()}, path.calls)
        if setting.grad and backward:
            outcome.grads = _gradients(outputs, {**inputs, **parameters})
        return outcome
    finally:
        for fqn, buffer in unit.named_buffers():
            buffer.copy_(before[fqn])


def run_forward(
    unit: nn.Module,
    example: Example,
    setting: Setting,
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> tuple[list[Any], dict[str, Tensor]]:
    """Runs the forward; returns the leaves of the unit's result, and the inputs that need a gradient by name.

    Inputs are of any shape, those of the example's leaves.
    """
    with (
        torch.set_grad_enabled(setting.grad),
        slow_attention(),
        DeterministicMode(setting.dtype) if setting.exact else contextlib.nullcontext(),
    ):
        args, kwargs, inputs = example.call()
        with taking_asides() as asides, around or contextlib.nullcontext():
            result = unit(*args, **kwargs)
        outputs = [materialize(output) for output in flatten((result, asides))[0]]
    return outputs, {f"input {leaf_index}": tensor for leaf_index, tensor in inputs.items()}


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
    """Weights of an output's elements, different and not zero."""
    positions = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    return torch.sin(positions * 1.7 + 0.3).to(tensor.dtype) + 0.1


class TrialRanks:
    """Runs plans of a unit on threads as ranks, with a copy of the unit for each rank.

    Attributes:
        copies: Copies of the unit, at least one for each rank; they hold the same parameter objects.
        num_trials: Number of sharded runs.
        first_unit: The sharded unit of the first rank in the last trial; None if that did not begin.
    """

    def __init__(self, unit: nn.Module, size: int, context: int = 1, *, copies: list[nn.Module] | None = None) -> None:
        """Makes the copies of a unit with random weights, beside the copies of other trials."""
        self._unsharded, self.size, self.context = unit, size, context
        self.copies = [] if copies is None else copies
        while len(self.copies) < size * context:
            self.copies.append(copy.deepcopy(unit, {id(p): p for p in unit.parameters()}))
        self.num_trials = 0
        self._shards: dict[tuple[str, int], tuple[Placement, Tensor]] = {}
        self.first_unit: ShardedUnit | None = None

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
        """Runs the unit on all ranks; the backward only if there are gradients and ``check`` accepts the outputs.

        Parameters ``without`` need no gradients; while learning, they require one all the same.

        Raises:
            TrialFailed: A rank raised, or the ranks did not exchange the same things.
        """
        self.num_trials += 1
        self.first_unit = None
        groups = ThreadGroups(self.size, self.context)
        runs = groups.run_on_each(
            lambda ranks, context: self._one(ranks, context, plan, example, setting, learning, without),
        )
        outcomes = [outcome for outcome, _ in runs]
        if check(outcomes) and setting.grad:

            def backward(ranks: ThreadRanks, context: ThreadRanks) -> dict[str, Tensor]:
                outcome, wanted = runs[ranks.rank * context.size + context.rank]
                return _gradients(outcome.outputs, wanted)

            for outcome, grads in zip(outcomes, groups.run_on_each(backward), strict=True):
                outcome.grads = grads
        return outcomes

    def _shard_of(self, fqn: str, full: Tensor, placement: Placement, rank: int) -> Tensor:
        """A rank's shard of a parameter; weights, which units do not write, are sharded once for all trials."""
        if full.dim() < 2:
            return shard_tensor(full, placement, rank, self.size).clone()
        cached = self._shards.get((fqn, rank))
        if cached is None or cached[0] != placement:
            cached = self._shards[fqn, rank] = placement, shard_tensor(full, placement, rank, self.size)
        return cached[1].detach()

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
        """Runs the forward of a rank; returns its outcome, and the tensors to differentiate by, by name."""
        rank, index = ranks.rank, ranks.rank * context.size + context.rank
        unit = self.copies[index].train(setting.training)
        local: dict[str, Tensor] = {}
        for fqn, tensor in self._unsharded.named_parameters():
            needs = tensor.requires_grad and (learning or fqn not in without)
            local[fqn] = self._shard_of(fqn, tensor.detach(), plan.placements[fqn], rank).requires_grad_(needs)
        for fqn, buffer in self._unsharded.named_buffers():
            local[fqn] = shard_tensor(buffer, plan.placements[fqn], rank, self.size).clone()
        parameters = {fqn: tensor for fqn, tensor in local.items() if tensor.requires_grad and fqn not in without}
        runner = unit_on_trial(unit, plan, ranks, context, local)
        runner.learn(learning)
        if index == 0:
            self.first_unit = runner
        with runner.running():
            outputs, inputs = run_forward(unit, example, setting)
        buffers = {fqn: local[fqn] for fqn, _ in self._unsharded.named_buffers()}
        return Outcome(outputs, buffers=buffers), {**inputs, **parameters}


def local_and_expected(
    outcomes: list[Outcome], plan: UnitPlan, name: str, kind: str, wanted: Tensor
) -> list[tuple[list[Tensor], Tensor]]:
    """Pairs the local shards of "grads" or "buffers", of any shape, with the expected slices; nothing is gathered.

    Returns:
        For each shard, the tensors of all context ranks and the slice; for a replicated tensor, one pair of all ranks.
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
        for rank, local_start, start, length in placement.shard_ranges(plan.size)
    ]


_T = TypeVar("_T")
_TIMEOUT = 60.0


class TrialFailed(Exception):
    """A rank of a trial raised; has the message of its exception."""


class _ThreadGroup:
    """The barrier and slots over which threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)
        self.slots: list[Any] = [None] * size


class ThreadRanks(Ranks):
    """One rank of a trial; its collectives are between threads."""

    def __init__(self, rank: int, group: _ThreadGroup) -> None:
        self.rank, self.size, self._group = rank, group.size, group

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor of any shape over the ranks, in place."""
        # Each rank sums its share of all addends in place: they may be gradients of full layers.
        addends = [addend.view(-1) for addend in self.all_gather(tensor)]
        shares = [addend.tensor_split(self.size)[self.rank] for addend in addends]
        for addend in shares[1:]:
            shares[0].add_(addend)
        for addend in shares[1:]:
            addend.copy_(shares[0])
        self._group.barrier.wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""
        group = self._group
        group.slots[self.rank] = tensor.detach()
        group.barrier.wait()
        gathered = list(group.slots)
        group.barrier.wait()
        if len({other.shape for other in gathered}) > 1:
            raise TrialFailed(f"ranks exchange tensors of shapes {[tuple(other.shape) for other in gathered]}")
        return gathered

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """All-to-all: sends one tensor to each rank; returns the tensor from each rank, in these shapes."""
        group = self._group
        group.slots[self.rank] = [tensor.detach().contiguous() for tensor in blocks]
        group.barrier.wait()
        received = [sent[self.rank] for sent in group.slots]
        group.barrier.wait()
        if [tensor.shape for tensor in received] != list(shapes):
            raise TrialFailed(f"a rank expects shapes {shapes} and receives {[tensor.shape for tensor in received]}")
        return received


class ThreadGroups:
    """The thread groups of tensor ranks times context ranks, in the order of `PairedRanks`."""

    def __init__(self, size: int, context: int) -> None:
        self._tensor = [_ThreadGroup(size) for _ in range(context)]
        self._context = [_ThreadGroup(context) for _ in range(size)]

    def run_on_each(self, run: Callable[[ThreadRanks, ThreadRanks], _T]) -> list[_T]:
        """Runs a function of tensor and context rank on all ranks at once, in threads; the results are in their order.

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
                for group in (*self._tensor, *self._context):
                    group.barrier.abort()

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
