"""Products with local shards of weights that also communicate, each in one autograd function.

    column: a value enters the region by its first product
    forward     y = x @ weight.T        and x itself, for further readers
    backward    dx = dy @ weight.T + what the other readers give
                launch the sum of dx over the ranks
                dweight = dy.T @ x      meanwhile
                wait for dx

    row: the product leaves the region
    forward     y = sum over the ranks of x @ weight.T, + bias
    backward    dx = dy @ weight, dweight = dy.T @ x

The first reader of a value in a forward is the last one in the backward, so there is one sum for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from lightning_hybrid.step.tracing.deferral import computes_now
from lightning_hybrid.tensor.collectives import Ranks, enter, leave
from lightning_hybrid.tensor.plan import LinearLike

_torch_linear = torch._C._nn.linear
_saving_hooks: Callable[[bool], Any] = _top_saved_tensors_default_hooks


class Product:
    """The product of a linear with the local shard of its weight."""

    def __init__(self, module: torch.nn.Module, linear: LinearLike) -> None:
        self._module, self._is_transposed = module, linear.out_dim != 0

    def __call__(self, x: Tensor, with_bias: bool) -> Tensor:
        """Multiplies ``(..., in features)`` by the weight, and adds the bias to ``(..., out features)``."""
        weight, bias = self._operands()
        return F.linear(x, self.of_columns(weight), bias if with_bias else None)

    def _operands(self) -> tuple[Tensor, Tensor | None]:
        weight = self._module._parameters["weight"]
        assert weight is not None
        return weight, self._module._parameters.get("bias")

    def of_columns(self, weight: Tensor) -> Tensor:
        """The weight as (out, in)."""
        return weight.t() if self._is_transposed else weight

    def of_weight(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the weight as the module has it, to the bit as torch's; from (rows, in) and (rows, out)."""
        return x.t().mm(grad) if self._is_transposed else grad.t().mm(x)

    def _in_one(self, x: Tensor) -> bool:
        """Whether one autograd function may multiply a value, of any shape, and communicate."""
        weight, bias = self._operands()
        return (
            torch.is_grad_enabled()
            and type(x) is Tensor
            and x.requires_grad
            and x.dim() > 1
            and weight.requires_grad
            # A split backward replaces it, and may make the weight's product later.
            and (F.linear is _torch_linear or computes_now(x, self.of_columns(weight)))
            and not torch.compiler.is_compiling()
            # `direct` has no support of torch.func: neither for its transforms, nor for tensors that they leave behind.
            and not torch._C._are_functorch_transforms_active()
            and not is_functorch_wrapped_tensor(x)
            and not is_functorch_wrapped_tensor(weight)
            and not (bias is not None and is_functorch_wrapped_tensor(bias))
        )

    def can_enter(self, ranks: Ranks, x: Tensor) -> bool:
        """Whether the value, of any shape, may enter the ranks' region by this product."""
        return ranks.overlaps and self._in_one(x)

    def enter(self, ranks: Ranks, x: Tensor) -> tuple[Tensor, Tensor]:
        """The product with bias, ``(..., out features)``, and the value in the region for further readers."""
        out, inside = _enter_by_product(x, *self._operands(), self, ranks)
        return out, inside

    def leave(self, ranks: Ranks, x: Tensor) -> Tensor:
        """The sum of the ranks' products, ``(..., out features)``, to which the bias is added once."""
        # Where a forward may run again, that ends at the last tensor that is saved: before the sum, if it is its own.
        if not _saving_hooks(False) and self._in_one(x):
            return _leave_by_product(x, *self._operands(), self, ranks)
        return add_bias(leave(self(x, False), ranks), self._operands()[1])


def add_bias(total: Tensor, bias: Tensor | None) -> Tensor:
    """Adds a bias, if there is one, in place to a sum over ranks, of any shape that it broadcasts to."""
    return total if bias is None else total.add_(bias if bias.dtype is total.dtype else bias.to(total.dtype))


class _EnterByProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        """Of shapes ``(..., in features)``, (out, in) as the module has it, and (out,)."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.ranks, ctx.bias_dtype = product, ranks, None if bias is None else bias.dtype
        return _torch_linear(x, product.of_columns(weight), bias), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_others: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, of the same shapes; autocast may have narrowed the output's."""
        x, weight = ctx.saved_tensors
        addends = [] if grad is None else [_of_input(ctx, grad, x, weight)]
        addends += [] if of_others is None else [of_others.clone() if grad is None else of_others]
        if not addends:
            return None, None, None, None, None
        total = (addends[0] if len(addends) == 1 else addends[0] + addends[1]).contiguous()
        if torch.is_grad_enabled():  # these gradients are differentiated, and the value is outside of the region
            return leave(total, ctx.ranks), *_of_parameters(ctx, grad, enter(x, ctx.ranks), weight), None, None
        arriving = ctx.ranks.start_all_reduce(total)
        of_parameters = _of_parameters(ctx, grad, x, weight)
        return arriving.wait(), *of_parameters, None, None


class _LeaveByProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, ranks: Ranks) -> Tensor:
        """Of shapes ``(..., in features)``, (out, in) as the module has it, and (out,)."""
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.ranks, ctx.bias_dtype = product, ranks, None if bias is None else bias.dtype
        total = _torch_linear(x, product.of_columns(weight)).contiguous()
        ranks.all_reduce(total)
        return add_bias(total, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, of the same shapes."""
        x, weight = ctx.saved_tensors
        inside = enter(grad, ctx.ranks) if torch.is_grad_enabled() else grad  # they may be differentiated
        # All ranks have the bias, which is added outside of the region.
        of_weight, of_bias = _of_weight(ctx, inside, x, weight), _of_bias(ctx, grad)
        return _of_input(ctx, inside, x, weight), of_weight, of_bias, None, None


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its apply, without the Python of torch around it: 5 us less among other code."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


_enter_by_product, _leave_by_product = direct(_EnterByProduct), direct(_LeaveByProduct)


def _of_input(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input, of its shape."""
    return grad.matmul(ctx.product.of_columns(weight).to(grad.dtype)).to(x.dtype)


def _of_parameters(ctx: Any, grad: Tensor | None, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, of their shapes."""
    return (None, None) if grad is None else (_of_weight(ctx, grad, x, weight), _of_bias(ctx, grad))


def _of_weight(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight, of its shape."""
    return ctx.product.of_weight(x.to(grad.dtype).flatten(0, -2), grad.flatten(0, -2)).to(weight.dtype)


def _of_bias(ctx: Any, grad: Tensor) -> Tensor | None:
    """The gradient of the bias, of its shape."""
    return grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
