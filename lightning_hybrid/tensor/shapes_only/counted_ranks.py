"""Ranks that are not there: one rank's collectives return tensors of the right shapes, and are counted."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["all_reduce", "all_gather", "all_to_all"]


class Collective(NamedTuple):
    """One collective of a rank.

    Attributes:
        kind: Its name.
        nbytes: Of the tensor that the rank puts in.
    """

    kind: Kind
    nbytes: int


class CountedRanks:
    """One of several ranks, with the collectives of the protocol `ExchangingRanks`; the others are not there.

    Attributes:
        rank: The number of this rank.
        size: The number of ranks.
        done: The collectives so far.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.done: list[Collective] = []

    def all_reduce(self, tensor: Tensor) -> None:
        """Count an all-reduce; the tensor, of any shape, stays as it is."""
        self._add("all_reduce", tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Count an all-gather; the tensor of each rank, of the same shape."""
        self._add("all_gather", tensor)
        return [tensor.detach()] * self.size

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Count an all-to-all; a tensor from each rank, in these shapes."""
        if self.size > 1:
            self.done.append(Collective("all_to_all", sum(block.nbytes for block in blocks)))
        return [blocks[0].new_empty(shape) for shape in shapes]

    def _add(self, kind: Kind, tensor: Tensor) -> None:
        if self.size > 1:
            self.done.append(Collective(kind, tensor.nbytes))
