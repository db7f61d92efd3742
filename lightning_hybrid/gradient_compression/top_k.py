"""Sums of the largest elements of each rank's gradients (Stich et al., arXiv 1809.07599)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.gradient_compression.method import Finish, Method, Piece, Traffic
from lightning_hybrid.gradient_compression.quantized import all_gather_single


class TopK(Method):
    """Sends the share ``ratio`` of the elements of a message that are largest in magnitude, with their indices.

    Each rank chooses by itself, and all ranks gather the choices of all: N ranks send N times as many elements.
    """

    def __init__(self, traffic: Traffic, ratio: float) -> None:
        super().__init__(traffic)
        self.ratio = ratio

    def start(self, flat: Tensor, pieces: Sequence[Piece], group: dist.ProcessGroup, *, scatter: bool) -> Finish:
        """Start to sum a flat message by an all-gather, or with ``scatter`` an all-to-all, of its largest elements."""
        size, rank = group.size(), group.rank()
        rows = flat.view(size if scatter else 1, -1)
        length = rows.shape[1]
        count = max(1, min(length, round(self.ratio * length)))
        indices = rows.abs().topk(count, dim=1, sorted=False).indices
        values = rows.gather(1, indices)
        sent = torch.cat([_bytes(values), _bytes(indices.int())], 1)
        received = sent.new_empty(size, sent.shape[1])
        if scatter:
            self.traffic.all_to_all(sent, group)
            work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        else:
            self.traffic.all_gather(sent, group)
            work = all_gather_single(received, sent, group=group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            share = torch.zeros_like(rows).scatter_(1, indices, values).view(-1)
            all_values, all_indices = received.split([values.element_size() * count, 4 * count], 1)
            total = flat.view(size if scatter else 1, -1)[rank if scatter else 0]
            total.zero_()
            # One rank after the other: the sum must be the same in bits on all ranks.
            for values_of, indices_of in zip(all_values, all_indices, strict=True):
                total.index_add_(0, indices_of.clone().view(torch.int32), values_of.clone().view(flat.dtype))
            return share

        return finish


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
