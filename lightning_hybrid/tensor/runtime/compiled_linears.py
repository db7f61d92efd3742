"""Forwards of sharded linears in a form that a compiler can follow: one graph for the whole unit.

They do what those of `apply` do where nothing is watched and no positions are dealt. Exchanges are torch's functional
collectives, which are nodes of a graph like others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from lightning_hybrid.tensor.plan.unit_plan import UnitPlan


def why_not_traced(unit: nn.Module, plan: UnitPlan) -> str:
    """Why a sharded unit cannot be compiled; empty if it can.

    Args:
        unit: The user's module.
        plan: How it is cut.
    """
    if "forward" in unit.__dict__:
        return "its forward is the instance's own"
    if plan.positions is not None:
        return "its positions are dealt to ranks"
    if plan.watched:
        return "its operations are watched in Python: it writes sizes of the whole, or draws in a region"
    if plan.vocabulary or "vocabulary" in plan.roles.values():
        return "its weights are cut by their vocabulary"
    if plan.summed or plan.outputs or any(role == "attention" for role in plan.roles.values()):
        return "its code is not cut at linears alone"
    if "" in plan.roles or any(plan.linears[fqn].is_convolution for fqn in plan.roles):
        return "convolutions and single linears gain nothing"
    if any(tensor.is_complex() for tensor in (*unit.parameters(), *unit.buffers())):
        return "complex numbers"
    return ""


class Entered:
    """The values that have entered a region in the call under way, each once, however many linears read it."""

    def __init__(self) -> None:
        """None has."""
        self.known: list[tuple[Tensor, Tensor]] = []

    def enter(self, tensor: Tensor, group: str) -> Tensor:
        """As `ranks.enter`."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        # One that was written in place between two linears is refused by autograd, which has saved it for the first.
        for outside, inside in self.known:
            if tensor is inside or tensor is outside:
                return inside
        inside = _Enter.apply(tensor, group)
        self.known.append((tensor, inside))
        return inside


class Traced:
    """A linear that is cut: its forward takes the place of the module's own while a compiled unit runs."""

    def __init__(self, module: nn.Module, plan: UnitPlan, fqn: str, group: dist.ProcessGroup, entered: Entered) -> None:
        """Args: module: the linear. plan: of its unit. fqn: inside of it. group: the ranks. entered: of the unit."""
        linear = plan.linears[fqn]
        self.module, self.entered = module, entered
        self.group, self.rank, self.size = group.group_name, group.rank(), group.size()
        self.is_transposed, self.feature_dim = linear.out_dim != 0, linear.feature_dim
        self.has_bias = linear.has_bias

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight: Any = self.module.weight
        return F.linear(x, weight.t() if self.is_transposed else weight, bias)

    def _bias(self) -> Tensor | None:
        return self.module.bias if self.has_bias else None  # type: ignore[return-value]

    def column(self, x: Tensor) -> Tensor:
        """Cut by output features."""
        return self._product(self.entered.enter(x, self.group), self._bias())

    def row(self, x: Tensor) -> Tensor:
        """Cut by input features, then summed; the bias is added once, to the sum."""
        out = _Leave.apply(self._product(x, None), self.group)
        bias = self._bias()
        return out if bias is None else out + bias.to(out.dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """Cut by output features, and gathered."""
        out = self._product(self.entered.enter(x, self.group), self._bias())
        return _Gather.apply(out, self.rank, self.size, self.group)


def traced_forwards(
    modules: Mapping[str, nn.Module], plan: UnitPlan, group: dist.ProcessGroup, entered: Entered
) -> dict[str, Callable[..., Tensor]]:
    """The forwards to put in place, by FQN inside the unit.

    Args:
        modules: Of the unit, by FQN.
        plan: One for which `why_not_traced` finds no reason.
        group: The tensor ranks.
        entered: Cleared at the end of each call.
    """
    made = {fqn: Traced(modules[fqn], plan, fqn, group, entered) for fqn in plan.roles}
    return {fqn: getattr(made[fqn], role) for fqn, role in plan.roles.items()}


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
        whole = collectives.wait_tensor(collectives.all_gather_tensor(tensor.contiguous(), 0, group))
        return torch.cat(whole.chunk(size), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.chunk(ctx.size, -1)[ctx.rank].contiguous(), None, None, None
