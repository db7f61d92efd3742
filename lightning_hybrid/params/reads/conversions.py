"""Conversions of modules by the user (``self.net.to(self.device)``) that skip parameters of other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_hybrid.patching import around
from lightning_hybrid.step.standins.absent_tensors import is_absent


def skip_absent_parameters(root: nn.Module) -> Callable[[], None]:
    """Let ``to``, ``float`` and the like skip absent parameters; returns a function that undoes it.

    torch would swap each stand-in for another, which is impossible; and in a hook, these methods' queries of parameters
    are no reads of the model.
    """
    undo = contextlib.ExitStack()
    for module in root.modules():
        apply = partial(_apply_without_absent, module)
        undo.callback(around(module, "_apply", apply, reason="no conversion of absent tensors"))
    return undo.close


def _apply_without_absent(
    module: nn.Module, original: Callable[..., nn.Module], *args: Any, **kwargs: Any
) -> nn.Module:
    absent = {name: p for name, p in module._parameters.items() if p is not None and is_absent(p)}
    module._parameters.update(dict.fromkeys(absent))
    try:
        with torch._C.DisableTorchFunction():
            original(*args, **kwargs)
    finally:
        module._parameters.update(absent)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return module
