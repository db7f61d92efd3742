"""Shapes of grouped matrix products (``torch.nn.functional.grouped_mm``), whose kernels without data need bfloat16.

Kernels of the CPU take float32 and float16 too, so layers of experts run where their stand-ins would not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.step.standins.absent_tensors import make_absent

_KERNEL = torch.ops.aten._grouped_mm.default
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class GroupedProductShapes(TorchDispatchMode):
    """Inside, grouped products of meta tensors run in each dtype of the CPU's kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = None
        if func is _KERNEL and args[0].is_meta:
            known = absent_grouped_mm(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if known is None else known


def absent_grouped_mm(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a grouped matrix product without data: on the meta device, or absent if an argument is.

    Matrices are [M, K] and [K, N], of which some have a first dim of groups. Of two without, K is in groups.

    Args:
        func: A kernel.
        args: Its arguments, on the meta device or absent.
        kwargs: Its keyword arguments.

    Returns:
        None for another kernel, and for arguments that the kernel of the CPU refuses.
    """
    if func is not _KERNEL or len(args) < 2 or kwargs.get("out_dtype") or any(each is not None for each in args[3:]):
        return None
    first, second = args[:2]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    if first.dtype != second.dtype or first.dtype not in _DTYPES or first.shape[-1] != second.shape[-2]:
        return None
    groups: tuple[int, ...] = ()
    if first.dim() == second.dim() == 3:
        groups = tuple(first.shape[:1])
    elif first.dim() == second.dim() == 2 and isinstance(offsets, Tensor):
        groups = tuple(offsets.shape)
    with torch._C._DisableTorchDispatch():
        like = torch.empty((*groups, first.shape[-2], second.shape[-1]), dtype=first.dtype, device="meta")
    absent = next((each for each in (first, second) if isinstance(each, FakeTensor)), None)
    return like if absent is None else make_absent(like, device=absent.fake_device, requires_grad=False)
