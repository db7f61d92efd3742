"""The traces of a unit of fake tensors: unsharded, and on one rank of a plan."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.equivalence.narrow.shape_trace import ShapeTrace
from lightning_hybrid.parts.parameter_shard_placement import shard_tensor
from lightning_hybrid.step.standins.absent_tensors import FAKE_MODE
from lightning_hybrid.step.standins.fake_kernel_fallback import quiet_fake_kernels
from lightning_hybrid.tensor.collectives.collectives_over_rank_groups import ExchangingRanks
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.runtime.sharded_unit import ShardedUnit
from lightning_hybrid.tensor.trial.example_inputs import Example
from lightning_hybrid.tensor.trial.run_unit_trials import Setting, run_forward


class _ShapesOfRanks:
    """One of several ranks, whose collectives on fake tensors give the right shapes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> None:
        """Leaves the tensor, of any shape, as it is."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of this rank, of any shape, for each rank."""
        return [tensor.detach() for _ in range(self.size)]

    def exchange(self, blocks: list[Tensor], shapes: list[Any]) -> list[Tensor]:
        """Tensors of these shapes."""
        return [blocks[0].new_empty(shape) for shape in shapes]


def unsharded_trace(unit: nn.Module, example: Example, *, training: bool) -> ShapeTrace:
    """The trace of a unit of fake tensors, unsharded."""
    trace = ShapeTrace()
    with FAKE_MODE, quiet_fake_kernels():
        run_forward(unit.train(training), example, Setting(training), trace)
    return trace


def sharded_trace(unit: nn.Module, plan: UnitPlan, example: Example, *, training: bool, last: bool) -> ShapeTrace:
    """The trace of a unit of fake tensors on the first or the last rank of a plan.

    Raises:
        ValueError: The sequence was not sharded although the plan shards it.
    """
    context_size = plan.context if plan.positions is not None and plan.positions.by != "tensor" else 1
    ranks: ExchangingRanks = _ShapesOfRanks((plan.size - 1) * last, plan.size)
    context: ExchangingRanks = _ShapesOfRanks((context_size - 1) * last, context_size)
    local: dict[str, Tensor] = {}
    for fqn, tensor in (*unit.named_parameters(), *unit.named_buffers()):
        with FAKE_MODE:
            shard = shard_tensor(tensor.detach(), plan.placements[fqn], ranks.rank, plan.size).clone()
        local[fqn] = shard.requires_grad_(tensor.requires_grad)
    none = contextlib.nullcontext
    runner = ShardedUnit(
        unit, plan, ranks, context=context, tensors=lambda: local, around_draw=none, around_local_draw=none
    )
    trace = ShapeTrace()
    with FAKE_MODE, quiet_fake_kernels(), runner.running():
        run_forward(unit.train(training), example, Setting(training), trace)
    if plan.positions is not None and not runner.num_sharded_sequences:
        raise ValueError("the sequence was not sharded")
    return trace
