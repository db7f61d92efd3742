"""Modules built with parameters on the meta device, and no record of their values: plans need shapes only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_LARGE_NUMEL = 2**24
_MADE = (torch.empty, torch.rand, torch.randn)  # functions that take a size and a device


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put each parameter that a module registers inside on the meta device; buffers stay real.

    Initial values are neither computed nor kept: a module that reads values of its parameters while it is built fails.
    """
    handle = nn.modules.module.register_module_parameter_registration_hook(_move_to_meta)
    try:
        with _LargeOnMeta():
            yield
    finally:
        handle.remove()


class _LargeOnMeta(TorchFunctionMode):
    """A function mode in which large tensors without values, or of random ones, have no storage.

    The host may refuse to reserve it, and random numbers of a wide layer take seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MADE and kwargs.get("device") is None and "out" not in kwargs:
            sizes = {name: value for name, value in kwargs.items() if name != "generator"}
            meta = func(*args, **{**sizes, "device": "meta"})
            if meta.numel() > _LARGE_NUMEL:
                return meta
        return func(*args, **kwargs)


def _move_to_meta(module: nn.Module, name: str, parameter: Any) -> None:
    if type(parameter) is not nn.Parameter or is_lazy(parameter) or parameter.layout != torch.strided:
        return
    if parameter.is_meta:
        return
    with _disable_current_modes():
        meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        # The user's object stays the same, since other modules or an optimizer may refer to it.
        torch._C._swap_tensor_impl(parameter, nn.Parameter(meta, parameter.requires_grad))
