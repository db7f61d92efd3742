"""Random numbers in tensor-parallel regions: each rank draws different ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

AroundDraw = Callable[[], AbstractContextManager[Any]]


class RankDraws:
    """Random numbers that differ by rank in sharded regions, for dropout; those outside stay equal.

    The region's generator state is separate from the default one, which therefore advances equally on all ranks.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        """Takes the number of this rank, and the device on which regions draw."""
        self._rank, self._device = rank, device
        self._state: Tensor | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context around one draw."""
        generator = torch.default_generator
        if self._device.type == "cuda":
            generator = torch.cuda.default_generators[self._device.index or 0]
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
