"""Column-parallel products in whose backward the ranks' sum of the input's gradient runs under the weight's product.

    forward     y = x @ weight.T        and x itself, for further readers
    backward    dx = dy @ weight.T + what the other readers give
                launch the sum of dx over the ranks
                dweight = dy.T @ x      meanwhile
                wait for dx

The first reader of a value in a forward is the last one in the backward, so there is one sum for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.step.tracing.deferral import computes_now
from lightning_hybrid.tensor.collectives import Ranks, leave
from lightning_hybrid.tensor.plan import LinearLike

_torch_linear = torch._C._nn.linear


class Product:
    """The product of a linear with the local shard of its weight."""

    def __init__(self, module: torch.nn.Module, linear: LinearLike) -> None:
        self._module, self._is_transposed = module, linear.out_dim != 0

    def __call__(self, x: Tensor, with_bias: bool) -> Tensor:
        """Multiplies ``(..., in features)`` by the weight, and adds the bias to ``(..., out features)``."""
        return F.linear(x, self._weight(), self._module._parameters.get("bias") if with_bias else None)

    def _weight(self) -> Tensor:
        weight = self._module._parameters["weight"]
        assert weight is not None
        return weight.t() if self._is_transposed else weight

    def can_enter(self, x: Tensor, ranks: Ranks) -> bool:
        """Whether the value, of any shape, may enter the ranks' region by this product."""
        return (
            ranks.overlaps
            and torch.is_grad_enabled()
            and type(x) is Tensor
            and x.requires_grad
            and x.dim() > 1
            and (weight := self._weight()).requires_grad
            # A split backward replaces it, and may make the weight's product later.
            and (F.linear is _torch_linear or computes_now(x, weight))
        )

    def enter(self, x: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """The product with bias, ``(..., out features)``, and the value in the region for further readers."""
        out, inside = _EnterByProduct.apply(x, self._weight(), self._module._parameters.get("bias"), ranks)
        return out, inside


class _EnterByProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """Of shapes ``(..., in features)``, (out, in) and (out,)."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.ranks, ctx.bias_dtype = ranks, weight.dtype if bias is None else bias.dtype
        return _torch_linear(x, weight, bias), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_others: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, of the same shapes; autocast may have narrowed the output's."""
        x, weight = ctx.saved_tensors
        addends = [] if grad is None else [grad.matmul(weight.to(grad.dtype)).to(x.dtype)]
        addends += [] if of_others is None else [of_others.clone() if grad is None else of_others]
        if not addends:
            return None, None, None, None
        total = (addends[0] if len(addends) == 1 else addends[0] + addends[1]).contiguous()
        if torch.is_grad_enabled():  # these gradients are differentiated
            return leave(total, ctx.ranks), *_of_parameters(ctx, grad, x, weight.dtype), None
        arriving = ctx.ranks.start_all_reduce(total)
        of_parameters = _of_parameters(ctx, grad, x, weight.dtype)
        return arriving.wait(), *of_parameters, None


def _of_parameters(ctx: Any, grad: Tensor | None, x: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, (out, in) and (out,)."""
    if grad is None:
        return None, None
    rows = grad.flatten(0, -2)
    of_weight = rows.t().mm(x.to(grad.dtype).flatten(0, -2)).to(dtype)
    return of_weight, rows.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
