"""The interface of a compression method, and the count of the bytes that it sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Finish = Callable[[], Tensor | None]


@dataclass(frozen=True)
class Piece:
    """The gradient of one parameter in a message."""

    name: str  # FQN of the parameter
    matrix: Tensor  # the gradient, of shape (rows, columns): its first dimension, and all others
    write: Callable[[Tensor], object]  # writes a matrix of this shape in its place into the message


class Traffic:
    """Bytes that this rank sends to average gradients, with and without compression.

    A ring is assumed, as in docs/communication.md: of n bytes over k ranks, an all-reduce sends ``2 n (k - 1) / k``
    bytes per rank, an all-to-all ``n (k - 1) / k``, and an all-gather of n bytes of each rank ``n (k - 1)``.

    Attributes:
        sent: Bytes sent.
        uncompressed: Bytes that the same gradients take in their own dtype.
    """

    def __init__(self) -> None:
        self.sent = self.uncompressed = 0.0

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Count an all-reduce of a tensor of any shape."""
        self.sent += all_reduce_bytes(tensor.nbytes, group.size())

    def all_to_all(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Count an all-to-all of a tensor of shape (ranks, ...), a row for each rank."""
        self.sent += tensor.nbytes * (group.size() - 1) / group.size()

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Count an all-gather of a tensor of any shape from each rank."""
        self.sent += tensor.nbytes * (group.size() - 1)

    def instead_of(self, num_bytes: int, group: dist.ProcessGroup, *, scatter: bool) -> None:
        """Count the all-reduce, or with ``scatter`` the reduce-scatter, that is replaced."""
        self.uncompressed += all_reduce_bytes(num_bytes, group.size()) / (2 if scatter else 1)


def all_reduce_bytes(num_bytes: float, size: int) -> float:
    """Bytes that each of ``size`` ranks in a ring sends to all-reduce ``num_bytes``."""
    return 2 * num_bytes * (size - 1) / size


class Method(ABC):
    """A compression method, which sums a message of gradients over ranks.

    Attributes:
        has_feedback: Whether what a message leaves out is added to the next one.
        mixes_parameters: Whether the result of a parameter depends on the others in the message. Ranks that hold copies
            of a parameter, and other parameters beside it, would get different results.
        needs_matrices: Whether it needs the matrix of each gradient, and not only the elements of a message.
    """

    has_feedback = True
    mixes_parameters = True
    needs_matrices = False

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def compresses(self, dtype: torch.dtype, rows: int, columns: int) -> bool:
        """Whether the gradient of a parameter of this full size is compressed: no vectors, which take few bytes."""
        return min(rows, columns) > 1

    @abstractmethod
    def start(self, flat: Tensor, pieces: Sequence[Piece], group: dist.ProcessGroup, *, scatter: bool) -> Finish:
        """Start to sum a message over ranks; does not wait.

        ``flat`` is the addend of this rank; with ``scatter`` one row after the other for each rank, of which each needs
        its own.

        Returns:
            A function that waits and writes the sum to ``flat``, or to its row. It returns this rank's share of the
            sum, flat and of the length of ``flat``: the shares of all ranks add up to the sum. None without feedback.
        """
