"""Random numbers in tensor-parallel regions: each rank draws different ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.randomness.generators import draws

AroundDraw = Callable[[], AbstractContextManager[Any]]


class RankDraws:
    """Random numbers that differ by rank in sharded regions, for dropout; those outside stay equal.

    The region's generator state, on ``device``, is separate from the default one, which advances equally on all ranks.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._state: Tensor | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context around one draw."""
        generator = _generator_of(self._device)
        before = generator.get_state()
        if self._state is None:
            generator.manual_seed((generator.initial_seed() * 1_000_003 + self._rank + 1) % 2**63)
        else:
            generator.set_state(self._state)
        try:
            yield
        finally:
            self._state = generator.get_state()
            generator.set_state(before)


class KeyedDraws:
    """Random numbers that differ by rank in sharded regions, on ``device``, and depend on the draw's key alone."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context around one draw."""
        generator = _generator_of(self._device)
        # The same number on each rank, whether the draw is keyed or goes on from the one before.
        key = int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
        before = generator.get_state()
        generator.manual_seed(hash((key, self._rank + 1)) & 0x7FFFFFFFFFFFFFFF)
        try:
            yield
        finally:
            generator.set_state(before)


def _generator_of(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


class LocalPositionDraws(TorchFunctionMode):
    """The function mode by which ranks draw different random numbers for their positions, and equal ones elsewhere."""

    def __init__(self, is_local: Callable[[], bool], around_draw: AroundDraw) -> None:
        """Takes whether the running code works on local positions, and a context that makes draws differ by rank."""
        super().__init__()
        self._is_local, self._around_draw = is_local, around_draw

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_local() and draws(getattr(func, "__name__", ""), args, kwargs):
            with self._around_draw():
                return func(*args, **kwargs)
        return func(*args, **kwargs)
