"""Perturbation of the weights, whose effect on a run is the noise floor of its arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

# Relative perturbation that changes the last digits of numbers, by precision.
_PERTURBATION = {"64-true": 1e-15, "32-true": 1e-7, "16-true": 2.0**-11, "bf16-true": 2.0**-9}


def perturbation(precision: str) -> float:
    """The relative perturbation of the initial weights for the noise floor of a run: the last digits of operations."""
    return _PERTURBATION.get(precision.replace("mixed", "true"), 2.0**-9)


def perturbation_of_weights(precision: str) -> float:
    """The relative perturbation of the weights for one step: their last digits; float32 under mixed precision."""
    return _PERTURBATION.get(precision, 1e-7)


def perturb(module: nn.Module, size: float) -> None:
    """Multiply every weight elementwise by 1 + ``size`` * standard normal noise, in place."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                factor = (1 + size * noise).to(parameter.device)
                parameter.copy_((parameter.double() * factor).to(parameter.dtype))


@contextlib.contextmanager
def perturbed(module: nn.Module, size: float) -> Iterator[None]:
    """Context in which the weights are perturbed by a relative ``size``."""
    weights = [parameter.detach().to("cpu", copy=True) for parameter in module.parameters()]
    try:
        perturb(module, size)
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(module.parameters(), weights, strict=True):
                parameter.copy_(weight)
