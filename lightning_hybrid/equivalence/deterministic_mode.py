"""A deterministic mode, in which the results of two runs of a layer agree to the last digits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_hybrid.equivalence.grouped_products_in_float64 import grouped_product
from lightning_hybrid.randomness.random_number_ops import draws

# Positions of the dropout probability of attention functions, whose default is 0 or which has none.
DROPOUT_POSITIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_LOWER = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {"float", "half", "bfloat16"}


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
        position = DROPOUT_POSITIONS.get(name)
        if kwargs.get("enable_gqa") and not (args[1] if len(args) > 1 else kwargs["key"]).shape[-3]:
            # torch 2.11 divides by this number before it checks it, and ends the process.
            raise ValueError(f"{name} got no head of keys")
        if position is not None:
            args = args[:position] + (0.0,) * (len(args) > position) + args[position + 1 :]
            kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
        elif name != "__get__":
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
