"""A deterministic mode, in which the results of two runs of a layer agree to the last digits."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.randomness.generators import draws

# Positions of the dropout probability of attention functions, whose default is 0 or which has none.
DROPOUT_POSITIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_LOWER = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {"float", "half", "bfloat16"}
_ALIGNED = 4


class DeterministicMode(TorchFunctionMode):
    """Makes runs comparable to the last digits: no dropout, one dtype throughout, equal other draws in each run."""

    _lock = threading.Lock()  # torch's generator belongs to the process, and ranks are threads

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0]
        if name in _CASTS:
            return func(*args, **kwargs) if args[0].is_complex() else args[0].to(self._dtype)
        if name == "_grouped_mm" and args[0].dtype is torch.float64 and kwargs.get("bias") is None:
            return grouped_product(args[0], args[1], kwargs.get("offs"))
        if kwargs.get("enable_gqa") and not (args[1] if len(args) > 1 else kwargs["key"]).shape[-3]:
            # torch 2.11 divides by this number before it checks it, and ends the process.
            raise ValueError(f"{name} got no head of keys")
        args, kwargs = _without_dropout(name, args, kwargs)
        if name != "__get__" and name not in DROPOUT_POSITIONS:
            args = tuple(self._dtype if type(a) is torch.dtype and a in _LOWER else a for a in args)
            if kwargs.get("dtype") in _LOWER:
                kwargs = {**kwargs, "dtype": self._dtype}
        if draws(name, args, kwargs):
            self._drawn += 1
            with self._lock, torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._drawn)
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def redrawn_afterwards(self) -> Iterator[None]:
        """Draw the same numbers afterwards as inside."""
        before = self._drawn
        try:
            yield
        finally:
            self._drawn = before


def grouped_product(first: Tensor, second: Tensor, offsets: Tensor | None) -> Tensor:
    """Computes ``torch.nn.functional.grouped_mm``; of fake tensors, a tensor of the right shape.

    An operand without a dim [G] has its rows or columns in groups that end at ``offsets`` [G]; what comes after
    the last group is 0 in the result.

    Raises:
        RuntimeError: Rows of an operand are no multiples of 16 bytes, which torch refuses too.
    """
    for each in (first, second):
        # As torch's kernels, which read 16 bytes at once, of numbers of at most 4 bytes.
        row, column = each.stride()[-2:]
        if (row if column == 1 else column) % _ALIGNED:
            raise RuntimeError("strides should be multiple of 16 bytes")
    dims = first.dim(), second.dim()
    if dims == (3, 3) or offsets is None:
        return torch.bmm(first, second)
    if any(isinstance(each, FakeTensor) for each in (first, second, offsets)):
        product = (first if dims[0] == 2 else first[0]) @ (second if dims[1] == 2 else second[0])
        return product.expand(*offsets.shape, *product.shape) if dims == (2, 2) else product
    sizes = [stop - start for start, stop in itertools.pairwise([0, *offsets.tolist()])]
    if dims == (2, 2):
        columns, rows = first[:, : sum(sizes)].split(sizes, 1), second[: sum(sizes)].split(sizes)
        return torch.stack([one @ other for one, other in zip(columns, rows, strict=True)])
    if dims == (2, 3):
        rest = first.shape[0] - sum(sizes)
        *groups, after = first.split([*sizes, rest])
        products = [rows @ weight for rows, weight in zip(groups, second.unbind(), strict=True) if len(rows)]
        return torch.cat([*products, after.new_zeros(rest, second.shape[-1])])
    rest = second.shape[-1] - sum(sizes)
    *groups, after = second.split([*sizes, rest], 1)
    products = [weight @ columns for weight, columns in zip(first.unbind(), groups, strict=True)]
    return torch.cat([*products, after.new_zeros(first.shape[1], rest)], 1)


class WithoutDropoutMode(TorchFunctionMode):
    """Makes dropout, in attention too, return its input; modules stay in training mode, and other draws remain."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        args, kwargs = _without_dropout(name, args, kwargs)
        return func(*args, **kwargs)


def _without_dropout(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a function; of attention, without its dropout."""
    position = DROPOUT_POSITIONS.get(name)
    if position is None:
        return args, kwargs
    args = args[:position] + (0.0,) * (len(args) > position) + args[position + 1 :]
    return args, {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
