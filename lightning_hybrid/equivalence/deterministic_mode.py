"""Copies of layers with random weights, and a deterministic mode in which results agree to the last digits."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.randomness.keyed_draws import draws

_LOWER = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {"float", "half", "bfloat16"}
# Positions of the dropout probability of attention functions, whose default is 0 or which has none.
_DROPOUT_POSITIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}


def random_copy(unit: nn.Module, generator: torch.Generator, dtype: torch.dtype) -> nn.Module:
    """A copy of a unit with random weights on the CPU; the unit's own weights are not read."""
    memo: dict[int, Any] = {}
    for parameter in unit.parameters():
        memo[id(parameter)] = nn.Parameter(_random(parameter, generator, dtype), requires_grad=parameter.requires_grad)
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
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
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
        position = _DROPOUT_POSITIONS.get(name)
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
