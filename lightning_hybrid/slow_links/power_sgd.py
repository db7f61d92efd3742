"""PowerSGD: low-rank sums of gradients (Vogels et al., arXiv 1905.13727, algorithms 1 and 2).

    M   gradient and feedback of a rank, [n, m]
    P   M Q, summed over ranks, [n, rank]; its columns are orthonormalized
    Q   M^T P, summed over ranks, [m, rank]; the next step begins with it (warm start)
    result  P Q^T, and on each rank the feedback M - P Q^T / number of ranks

On the same gradients it does what torch's ``powerSGD_hook`` does. Torch's hook sends Q from a callback of P's
all-reduce, on a thread, so that over gloo the messages of two buckets may be exchanged; here all ranks send Q in the
order of the buckets.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.slow_links.method import Finish, Method, Piece, Traffic

Draw = Callable[[str, int, int], Tensor]


class PowerSGD(Method):
    """Sends factors of rank ``rank`` of each matrix for which they are small enough.

    Attributes:
        factors: Q of each parameter, of shape (columns, rank), by FQN: the start of the next step.
    """

    mixes_parameters = False
    needs_matrices = True

    def __init__(
        self,
        traffic: Traffic,
        rank: int,
        *,
        min_compression_rate: float = 2.0,
        warm_start: bool = True,
        draw: Draw | None = None,
    ) -> None:
        """Keep the rank of the factors, and how a first Q is drawn.

        Matrices that factors do not make smaller by more than ``min_compression_rate`` are not compressed; a warm start
        begins with the Q of the step before. ``draw`` returns the first Q, of shape (columns, rank), by FQN, columns
        and rank; equal on all ranks.
        """
        super().__init__(traffic)
        self.rank, self.min_compression_rate, self.warm_start = rank, min_compression_rate, warm_start
        self.factors: dict[str, Tensor] = {}
        self._draw, self._num_drawn = draw or self._normal, 0

    def compresses(self, dtype: torch.dtype, rows: int, columns: int) -> bool:
        """Whether the factors are smaller than the matrix by more than ``min_compression_rate``."""
        rank = min(rows, columns, self.rank)
        return (rows + columns) * rank * self.min_compression_rate < rows * columns

    def start(self, flat: Tensor, pieces: Sequence[Piece], group: dist.ProcessGroup, *, scatter: bool) -> Finish:
        """Start to sum a flat message by all-reduces of its factors; each rank gets the full sum."""
        # Gradients of one shape are multiplied together.
        shapes: dict[torch.Size, list[Piece]] = {}
        for piece in pieces:
            shapes.setdefault(piece.matrix.shape, []).append(piece)
        batches = list(shapes.values())
        exact = torch.promote_types(flat.dtype, torch.float32)  # half precision has no QR
        matrices = [torch.stack([piece.matrix for piece in batch]).to(exact) for batch in batches]
        ps = [m @ _orthonormal(self._first_factors(batch, m)) for batch, m in zip(batches, matrices, strict=True)]
        message = _joined(ps, flat.dtype)
        self.traffic.all_reduce(message, group)
        work = dist.all_reduce(message, group=group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            bases = [_orthonormal(p) for p in _separated(message, ps, exact)]
            qs = [m.mT @ p for m, p in zip(matrices, bases, strict=True)]
            factors = _joined(qs, flat.dtype)
            self.traffic.all_reduce(factors, group)
            dist.all_reduce(factors, group=group)
            for batch, p, q in zip(batches, bases, _separated(factors, qs, exact), strict=True):
                for piece, low_rank, factor in zip(batch, p @ q.mT, q, strict=True):
                    piece.write(low_rank)
                    self._keep(piece.name, factor)
            return flat / group.size()

        return finish

    def _first_factors(self, batch: Sequence[Piece], matrices: Tensor) -> Tensor:
        """Q of each matrix, of shape (matrices, columns, rank)."""
        self._num_drawn += not self.warm_start
        rank = min(*matrices.shape[1:], self.rank)
        first = []
        for piece in batch:
            known = self.factors.get(piece.name)
            if known is None or known.shape != (matrices.shape[2], rank) or not self.warm_start:
                known = self._draw(piece.name, matrices.shape[2], rank)
            first.append(known.to(matrices))
        return torch.stack(first)

    def _keep(self, name: str, factor: Tensor) -> None:
        """Keep Q, unless a gradient was not finite, after which no Q would be."""
        before = self.factors.get(name)
        if before is None or before.shape != factor.shape:
            before = self._draw(name, *factor.shape).to(factor)
        self.factors[name] = torch.where(factor.isfinite().all(), factor, before)

    def _normal(self, name: str, columns: int, rank: int) -> Tensor:
        # By the name, so that the layout does not change it; a new one in each step without a warm start.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}, {self._num_drawn}".encode()))
        return torch.randn(columns, rank, generator=generator)


def _orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormal bases of the columns of matrices, of shape (matrices, rows, rank)."""
    return torch.linalg.qr(matrices).Q


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)


def _separated(message: Tensor, like: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    pieces = message.to(dtype).split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
