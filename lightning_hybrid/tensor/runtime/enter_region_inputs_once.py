"""Inputs of tensor-parallel regions: each enters once, however many linears read it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_hybrid.tensor.collectives.collectives_over_rank_groups import Ranks
from lightning_hybrid.tensor.collectives.collectives_over_sharded_features import Readers, enter
from lightning_hybrid.tensor.collectives.sequence_shard_tensor import SequenceShard


class RegionInputs:
    """The values that have entered in the current forward; the backward sums over ranks once for each."""

    def __init__(self, ranks: Ranks, every: Ranks, *, gathers: bool) -> None:
        """Takes the ranks of regions.

        Args:
            ranks: The tensor ranks.
            every: The tensor ranks, or tensor ranks times context ranks where the latter exchange positions.
            gathers: Whether gathering the positions of a value lets it enter over the tensor ranks.
        """
        self._ranks, self._every, self._gathers = ranks, every, gathers
        self._entered: dict[tuple[int, int], tuple[Tensor, int, Tensor, Readers]] = {}  # by id and number of ranks

    @contextlib.contextmanager
    def of_forward(self) -> Iterator[None]:
        """A context around one forward, in which no value has entered yet."""
        outer, self._entered = self._entered, {}
        try:
            yield
        finally:
            self._entered = outer

    def enter(self, tensor: Tensor, ranks: Ranks, *, fresh: bool = False) -> Tensor:
        """The value, of the same shape, in a region of ``ranks``, for one more reader (``fresh``: as in `Readers`)."""
        if isinstance(tensor, SequenceShard):  # it enters over the ranks that the sequence is sharded over
            inside = tensor.entered()
            return inside if self._gathers else self.enter(inside, self._ranks)
        if not tensor.requires_grad or not torch.is_grad_enabled() or ranks.size == 1:
            return tensor
        cached = self._entered.get((id(tensor), ranks.size))
        if cached is not None and cached[0] is tensor and cached[1] == tensor._version:
            cached[3].fresh &= fresh
            return cached[2]
        readers = Readers(fresh)
        inside = enter(tensor, ranks, readers)
        self._entered[id(tensor), ranks.size] = (tensor, tensor._version, inside, readers)
        self.remember(inside)
        return inside

    def remember(self, inside: Tensor) -> None:
        """Registers a value, of any shape, that is in the region already."""
        for ranks in (self._ranks, self._every):
            self._entered[id(inside), ranks.size] = (inside, inside._version, inside, Readers())
