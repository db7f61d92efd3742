"""Modules that cannot be run in stages or recomputed, whatever their steps do."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn


def scripted_modules(module: nn.Module) -> list[str]:
    """Return the FQNs of the modules of ``torch.jit`` with parameters inside a module."""
    modules = module.named_modules()
    return [fqn for fqn, inner in modules if isinstance(inner, torch.jit.ScriptModule) and [*inner.parameters()]]


def why_no_stages(module: pl.LightningModule) -> str:
    """Return why no step of a module can be run in stages, whatever it does; "" if it can."""
    if not module.automatic_optimization:
        return (
            "the module uses manual optimization, and each of its optimizer steps reads what the previous one has"
            " changed"
        )
    code = getattr(type(module).configure_optimizers, "__code__", None)
    if code is not None and "LBFGS" in code.co_names:
        return (
            "LBFGS reads all parameters and gradients at once, and runs training_step several times for each optimizer"
            " step"
        )
    if scripted := scripted_modules(module):
        return f"{type(module).__name__}.{scripted[0]} is a module of torch.jit, whose layers are not visible"
    return ""


def check_scripted(module: pl.LightningModule) -> None:
    """Refuse to recompute modules of ``torch.jit``, whose calls and layers cannot be traced.

    Raises:
        ValueError: The module contains one with parameters.
    """
    if scripted := scripted_modules(module):
        raise ValueError(
            f"{type(module).__name__}.{scripted[0]} is a module of torch.jit, whose layers are not visible, so that it"
            " cannot be recomputed; use the module that it was made from (with compile='units' for speed), or leave"
            " recompute out"
        )
