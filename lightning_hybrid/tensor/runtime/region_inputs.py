"""Inputs of tensor-parallel regions: each enters once, however many linears read it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_hybrid.tensor.collectives.rank_collectives import Ranks, Readers, enter
from lightning_hybrid.tensor.collectives.sequence_collectives import OwnPositions


class Entrances:
    """What has entered in the forward under way; one sum over ranks in the backward for each value."""

    def __init__(self, ranks: Ranks, every: Ranks, *, gathers: bool) -> None:
        """Say who shares regions.

        Args:
            ranks: The tensor ranks.
            every: These, or tensor ranks times context ranks where these exchange positions.
            gathers: Whether a value whose positions are gathered has entered over the tensor ranks by that.
        """
        self._ranks, self._every, self._gathers = ranks, every, gathers
        self._entered: dict[tuple[int, int], tuple[Tensor, int, Tensor, Readers]] = {}  # by id and number of ranks

    @contextlib.contextmanager
    def of_forward(self) -> Iterator[None]:
        """Inside is another forward, in which nothing has entered yet."""
        outer, self._entered = self._entered, {}
        try:
            yield
        finally:
            self._entered = outer

    def enter(self, tensor: Tensor, ranks: Ranks, *, fresh: bool = False) -> Tensor:
        """The value inside of a region of some ranks, for one more reader; ``fresh`` as of `Readers`."""
        if isinstance(tensor, OwnPositions):  # entered over the ranks that share positions
            inside = tensor.entered()
            return inside if self._gathers else self.enter(inside, self._ranks)
        if not tensor.requires_grad or not torch.is_grad_enabled() or ranks.size == 1:
            return tensor
        known = self._entered.get((id(tensor), ranks.size))
        if known is not None and known[0] is tensor and known[1] == tensor._version:
            known[3].fresh &= fresh
            return known[2]
        readers = Readers(fresh)
        inside = enter(tensor, ranks, readers)
        self._entered[id(tensor), ranks.size] = (tensor, tensor._version, inside, readers)
        self.remember(inside)
        return inside

    def remember(self, inside: Tensor) -> None:
        """This value is inside already."""
        for ranks in (self._ranks, self._every):
            self._entered[id(inside), ranks.size] = (inside, inside._version, inside, Readers())
