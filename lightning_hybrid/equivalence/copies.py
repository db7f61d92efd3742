"""Copies of layers with random weights, on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import torch
from torch import Tensor, nn


def random_copy(unit: nn.Module, generator: torch.Generator, dtype: torch.dtype) -> nn.Module:
    """A copy of a unit with random weights on the CPU; the unit's own weights are not read.

    All weights need gradients: those that are frozen now may be trained later in the run.
    """
    memo: dict[int, Any] = {}
    for parameter in unit.parameters():
        drawn = _random(parameter, generator, dtype)
        memo[id(parameter)] = nn.Parameter(drawn, requires_grad=drawn.is_floating_point() or drawn.is_complex())
    for buffer in unit.buffers():
        memo[id(buffer)] = _buffer(buffer, generator, dtype)
    for module in unit.modules():
        for value in vars(module).values():
            # Such as the weight that torch.nn.utils.weight_norm computes before each forward.
            if isinstance(value, Tensor) and (value.grad_fn is not None or value.device.type not in ("cpu", "meta")):
                memo.setdefault(id(value), value.detach().to("cpu", copy=True))
    twin: nn.Module = copy.deepcopy(unit, memo)
    return twin


def _random(parameter: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if parameter.is_complex():
        return torch.randn(parameter.shape, dtype=dtype.to_complex(), generator=generator)
    if not parameter.is_floating_point():  # quantized weights, or indices
        return torch.randint(2, parameter.shape, dtype=parameter.dtype, generator=generator)
    if parameter.dim() < 2:  # weights and biases of norms and linears, away from zero
        return torch.rand(parameter.shape, dtype=torch.float64, generator=generator).to(dtype) + 0.5
    bound = (3 / parameter[0].numel()) ** 0.5 if len(parameter) else 1.0  # evenly spread numbers are cheapest to draw
    seed = int(torch.randint(2**62, (), generator=generator))
    drawn = numpy.random.default_rng(seed).random(tuple(parameter.shape))  # in a third of the time torch takes
    return torch.from_numpy(drawn).sub_(0.5).mul_(2 * bound).to(dtype)


def _buffer(buffer: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    floating = buffer.is_floating_point()
    if type(buffer) is Tensor and not buffer.is_meta:
        return buffer.detach().to("cpu", dtype if floating else buffer.dtype, copy=True)
    if floating:
        return torch.rand(buffer.shape, dtype=torch.float64, generator=generator).to(dtype) + 0.5
    return torch.ones(buffer.shape, dtype=buffer.dtype)
