"""Sums in half precision, as torch's DDP hooks ``fp16_compress_hook`` and ``bf16_compress_hook``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.gradient_compression.method import Finish, Method, Piece, Traffic


class LowPrecision(Method):
    """Sends gradients in ``dtype``; what is rounded is not sent again. Ranks sum rows of a reduce-scatter in full."""

    has_feedback = False
    mixes_parameters = False

    def __init__(self, traffic: Traffic, dtype: torch.dtype) -> None:
        super().__init__(traffic)
        self.dtype = dtype

    def compresses(self, dtype: torch.dtype, rows: int, columns: int) -> bool:
        """Whether elements of a gradient take more bytes than those of the message."""
        return dtype.itemsize > self.dtype.itemsize

    def start(self, flat: Tensor, pieces: Sequence[Piece], group: dist.ProcessGroup, *, scatter: bool) -> Finish:
        """Start to sum a flat message in ``dtype``: an all-reduce, or with ``scatter`` an all-to-all of rows."""
        sent = flat.to(self.dtype)
        if not scatter:
            self.traffic.all_reduce(sent, group)
            work = dist.all_reduce(sent, group=group, async_op=True)

            def finish() -> None:
                work.wait()
                flat.copy_(sent)

            return finish
        rows = sent.view(group.size(), -1)
        received = torch.empty_like(rows)
        self.traffic.all_to_all(rows, group)
        exchange = dist.all_to_all_single(received, rows, group=group, async_op=True)

        def finish_row() -> None:
            exchange.wait()
            flat.view(group.size(), -1)[group.rank()] = received.to(flat.dtype).sum(0)

        return finish_row
