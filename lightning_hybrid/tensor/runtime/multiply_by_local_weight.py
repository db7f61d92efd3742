"""Partial products of sharded linears and convolutions: the local shard of the weight, with or without the bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.tensor.plan.unit_plan import LinearLike


def product_of(module: nn.Module, linear: LinearLike, x: Tensor, with_bias: bool) -> Tensor:
    """Multiplies ``(..., in features)`` by the module's local shard of the weight."""
    weight = module._parameters["weight"]
    assert weight is not None
    bias = module._parameters.get("bias") if with_bias else None
    return F.linear(x, weight if linear.out_dim == 0 else weight.t(), bias)


def convolution_of(module: nn.Module) -> Callable[..., Tensor]:
    """Makes a function that calls a convolution, with or without its bias."""
    forward = module.forward

    def run(x: Tensor, with_bias: bool, *args: Any, **kwargs: Any) -> Tensor:
        if with_bias:
            return forward(x, *args, **kwargs)
        bias, module._parameters["bias"] = module._parameters["bias"], None
        try:
            return forward(x, *args, **kwargs)
        finally:
            module._parameters["bias"] = bias

    return run
