"""Runs of a unit on trial: unsharded, or sharded on threads as ranks, each with its own copy of the unit.

Forward and backward are run, the weights are random numbers, and dropout is off.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.deterministic_mode import DeterministicMode
from lightning_hybrid.params.placement import Placement, Shard, shard_tensor
from lightning_hybrid.step.instrument.slow_attention import slow_attention
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.sharded_tensor_base_class import materialize
from lightning_hybrid.step.tracing.collect_side_outputs_of_modules import taking_asides
from lightning_hybrid.step.tracing.record_user_lines_calling_torch import TorchCall, TorchCallSites
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.runtime.sharded_unit import ShardedUnit
from lightning_hybrid.tensor.shard_state.tensor_parallel_random_draws import AroundDraw
from lightning_hybrid.tensor.trial.example_inputs import Example
from lightning_hybrid.tensor.trial.threaded_ranks import ThreadGroups, ThreadRanks


@dataclass
class Outcome:
    """The outputs, gradients and buffers of one run.

    Attributes:
        outputs: The leaves of the unit's result, and its side outputs.
        grads: Gradients by name: of parameters by FQN, of inputs by "input <leaf index>".
        buffers: Buffers after the run, by FQN.
        path: The torch calls of the unsharded unit, each with its line.
    """

    outputs: list[Any]
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    path: list[TorchCall] = field(default_factory=list)


@dataclass
class Setting:
    """The modes in which a unit is run.

    Attributes:
        training: Train mode instead of eval mode.
        grad: With gradients, of outputs weighted by `_cotangent`.
        exact: Under `DeterministicMode`.
        dtype: Dtype of all floating values.
    """

    training: bool = True
    grad: bool = True
    exact: bool = True
    dtype: torch.dtype = torch.float64

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
        """Makes the copies.

        Args:
            unit: The unit with random weights, which the copies share.
            size: Number of tensor ranks.
            context: Number of context ranks.
            copies: Copies of other trials of the unit; missing ones are appended.
        """
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
        """Runs the unit on all ranks.

        Args:
            plan: The plan.
            example: The arguments of the unit.
            setting: The setting of the run.
            learning: Whether the run makes the rules of the plan.
            check: Called with the outputs; the backward is run if it returns True and the setting has gradients.
            without: FQNs of parameters whose gradients are not needed; while learning, they require one all the same.

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
        # Nothing is drawn; and threads that access torch's generator can deadlock: its lock's owner waits for the
        # interpreter's lock if garbage is collected at that moment.
        around: AroundDraw = contextlib.nullcontext
        runner = ShardedUnit(
            unit, plan, ranks, context=context, tensors=lambda: local, around_draw=around, around_local_draw=around
        )
        runner.learning = learning
        if index == 0:
            self.first_unit = runner
        with runner.running():
            outputs, inputs = run_forward(unit, example, setting)
        buffers = {fqn: local[fqn] for fqn, _ in self._unsharded.named_buffers()}
        return Outcome(outputs, buffers=buffers), {**inputs, **parameters}


def local_and_expected(
    outcomes: list[Outcome], plan: UnitPlan, name: str, kind: str, wanted: Tensor
) -> list[tuple[list[Tensor], Tensor]]:
    """Pairs the local shards of a gradient or buffer with the expected slices; nothing is gathered, layers are large.

    Args:
        outcomes: The outcomes of all ranks.
        plan: The plan of the run.
        name: Name of the parameter, buffer or input.
        kind: "grads" or "buffers".
        wanted: The full tensor, of any shape.

    Returns:
        For each shard, the tensors of all context ranks and the slice; for a replicated one, those of all ranks.
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
