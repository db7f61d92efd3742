"""Forwards of sharded linears that `torch.compile` can trace: one graph for the full unit.

They compute what `parallel_forwards_of_linears_and_attentions` does, without a region mode and with full sequences.
Their collectives are torch's functional ones, which are nodes of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from lightning_hybrid.tensor.plan import UnitPlan


def why_not_compiled(unit: nn.Module, plan: UnitPlan) -> str:
    """The reason why a unit that is sharded by a plan cannot be compiled; empty if it can."""
    if "forward" in unit.__dict__:
        return "its forward is an attribute of the instance"
    if plan.positions is not None:
        return "its sequence is sharded over ranks"
    if plan.watched:
        return "its operations are watched in Python: it writes full sizes, or draws random numbers in a region"
    if plan.vocabulary or "vocabulary" in plan.roles.values():
        return "its weights are sharded along their vocabulary"
    if plan.summed or plan.outputs or any(role == "attention" for role in plan.roles.values()):
        return "it is not sharded at linears alone"
    if "" in plan.roles or any(plan.linears[fqn].is_convolution for fqn in plan.roles):
        return "convolutions and single linears gain nothing"
    if any(tensor.is_complex() for tensor in (*unit.parameters(), *unit.buffers())):
        return "complex numbers"
    return ""


class CompiledRegionInputs:
    """The values that have entered a region in the current call, each once, however many linears read it."""

    def __init__(self) -> None:
        self.known: list[tuple[Tensor, Tensor]] = []

    def enter(self, tensor: Tensor, group: str) -> Tensor:
        """Lets a replicated value of any shape enter the region of a group: its gradient is summed over the ranks."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        # A value written in place between two linears is refused by autograd, which has saved it for the first.
        for outside, inside in self.known:
            if tensor is inside or tensor is outside:
                return inside
        inside = _Enter.apply(tensor, group)
        self.known.append((tensor, inside))
        return inside


class CompiledLinear:
    """A sharded linear: its methods replace the module's forward while a compiled unit runs."""

    def __init__(
        self, module: nn.Module, plan: UnitPlan, fqn: str, group: dist.ProcessGroup, inputs: CompiledRegionInputs
    ) -> None:
        """Reads the plan of the linear ``fqn`` of a unit; ``inputs`` are shared by the linears of the unit."""
        linear = plan.linears[fqn]
        self.module, self.inputs = module, inputs
        self.group, self.rank, self.size = group.group_name, group.rank(), group.size()
        self.is_transposed, self.feature_dim = linear.out_dim != 0, linear.feature_dim
        self.has_bias = linear.has_bias

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight: Any = self.module.weight
        return F.linear(x, weight.t() if self.is_transposed else weight, bias)

    def _bias(self) -> Tensor | None:
        return self.module.bias if self.has_bias else None  # type: ignore[return-value]

    def column(self, x: Tensor) -> Tensor:
        """Column-parallel: ``(..., in)`` to this rank's output features ``(..., out / ranks)``."""
        return self._product(self.inputs.enter(x, self.group), self._bias())

    def row(self, x: Tensor) -> Tensor:
        """Row-parallel: ``(..., in / ranks)`` to the sum ``(..., out)`` over ranks, to which the bias is added once."""
        out = _Leave.apply(self._product(x, None), self.group)
        bias = self._bias()
        return out if bias is None else out + bias.to(out.dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """Column-parallel with gathered output: ``(..., in)`` to ``(..., out)``."""
        out = self._product(self.inputs.enter(x, self.group), self._bias())
        return _Gather.apply(out, self.rank, self.size, self.group)


def compiled_forwards(
    modules: Mapping[str, nn.Module], plan: UnitPlan, group: dist.ProcessGroup, inputs: CompiledRegionInputs
) -> dict[str, Callable[..., Tensor]]:
    """Makes the forwards, ``(..., features)`` to ``(..., features)``, of sharded linears, by FQN inside the unit."""
    linears = {fqn: CompiledLinear(modules[fqn], plan, fqn, group, inputs) for fqn in plan.roles}
    return {fqn: getattr(linears[fqn], role) for fqn, role in plan.roles.items()}


def _sum(tensor: Tensor, group: Any) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "sum", group))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int, size: int, group: Any) -> Tensor:
        ctx.rank, ctx.size = rank, size
        full = collectives.wait_tensor(collectives.all_gather_tensor(tensor.contiguous(), 0, group))
        return torch.cat(full.chunk(size), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.chunk(ctx.size, -1)[ctx.rank].contiguous(), None, None, None
