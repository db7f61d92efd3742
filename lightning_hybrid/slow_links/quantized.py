"""Sums of gradients in fewer bits: half precision, the largest elements, 8 bits per element, or the sign alone.

Quantized:

    addends of a rank   [row of rank 0 | row of rank 1 | ...]    quantized, block by block, and exchanged (all-to-all)
    sum of a row        on its rank, in full precision           quantized, and gathered (all-gather)

The second line is that of DeepSpeed's 1-bit Adam (Tang et al., arXiv 2102.02888, section 4): N quantized addends are no
quantized sum. What either quantization leaves out is feedback of the rank that quantized. A reduce-scatter is the
first line alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.slow_links.method import Finish, Method, Piece, Traffic

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Quantized(Method):
    """Sends codes of a fixed number of bits and a float32 scale for each block of ``block`` elements."""

    block: int

    def start(self, flat: Tensor, pieces: Sequence[Piece], group: dist.ProcessGroup, *, scatter: bool) -> Finish:
        """Start to sum a flat message by an all-to-all, and without ``scatter`` an all-gather, of quantized rows."""
        size, rank = group.size(), group.rank()
        length = -(-flat.numel() // size)
        rows = F.pad(flat, (0, size * length - flat.numel())).view(size, length)
        sent = self.encode(rows)
        received = torch.empty_like(sent)
        self.traffic.all_to_all(sent, group)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            share = self.decode(sent, length).to(flat.dtype)
            total = self.decode(received, length).sum(0).to(flat.dtype)
            if scatter:
                flat.view(size, length)[rank] = total
                return share.view(-1)
            own = self.encode(total[None])
            gathered = own.new_empty(size, own.shape[1])
            self.traffic.all_gather(own, group)
            all_gather_single(gathered, own, group=group)
            result = self.decode(gathered, length).to(flat.dtype)
            share[rank] += result[rank] - total
            flat.copy_(result.view(-1)[: flat.numel()])
            return share.view(-1)[: flat.numel()]

        return finish

    def encode(self, rows: Tensor) -> Tensor:
        """Quantize rows, of shape (rows, length), to uint8 of shape (rows, bytes of codes + bytes of scales)."""
        blocks = F.pad(rows.float(), (0, -rows.shape[1] % self.block)).view(rows.shape[0], -1, self.block)
        scales = self.scales(blocks, rows.shape[1])
        codes = self.codes(blocks, scales)
        return torch.cat([codes.view(len(rows), -1), scales.contiguous().view(len(rows), -1).view(torch.uint8)], 1)

    def decode(self, message: Tensor, length: int) -> Tensor:
        """Restore float32 values, of shape (rows, length), from what ``encode`` returns."""
        num_blocks = -(-length // self.block)
        codes, scales = message.split([message.shape[1] - 4 * num_blocks, 4 * num_blocks], 1)
        scales = scales.contiguous().view(torch.float32).view(len(message), num_blocks, 1)
        return self.values(codes, scales).reshape(len(message), -1)[:, :length].contiguous()

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(traffic)

    @abstractmethod
    def scales(self, blocks: Tensor, length: int) -> Tensor:
        """Scales (rows, blocks, 1) of blocks (rows, blocks, block); elements of a row beyond ``length`` are padding."""

    @abstractmethod
    def codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """Codes of blocks (rows, blocks, block), in uint8 of shape (rows, blocks, bytes of a block)."""

    @abstractmethod
    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Float32 values (rows, blocks, block) of codes (rows, bytes of a row) and scales (rows, blocks, 1)."""


class Int8(Quantized):
    """Rounds to 255 levels between minus and plus the largest magnitude of a block."""

    block = 256

    def scales(self, blocks: Tensor, length: int) -> Tensor:
        """The distance of two levels of each block, of shape (rows, blocks, 1)."""
        return blocks.abs().amax(2, keepdim=True) / 127

    def codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """The level of each element, an int8 viewed as uint8, of shape (rows, blocks, block)."""
        levels = (blocks / scales).nan_to_num(0.0).round()
        return levels.to(torch.int8).view(torch.uint8)

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Levels times their distance, of shape (rows, blocks, block)."""
        levels = codes.contiguous().view(torch.int8).view(len(codes), scales.shape[1], self.block)
        return levels.float() * scales


class OneBit(Quantized):
    """Sends the sign of each element, and the mean magnitude of each block (Karimireddy et al., arXiv 1901.09847)."""

    block = 1024

    def scales(self, blocks: Tensor, length: int) -> Tensor:
        """The mean magnitude of each block, without padding, of shape (rows, blocks, 1)."""
        counts = torch.full((blocks.shape[1],), float(self.block), device=blocks.device)
        if length % self.block:
            counts[-1] = length % self.block
        return (blocks.abs().sum(2) / counts)[..., None]

    def codes(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """The signs of the elements, eight in each byte, of shape (rows, blocks, block / 8)."""
        bits = (blocks >= 0).view(*blocks.shape[:2], -1, 8).to(torch.uint8)
        return (bits << torch.arange(8, dtype=torch.uint8, device=blocks.device)).sum(-1, dtype=torch.uint8)

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Signs times the mean magnitude, of shape (rows, blocks, block)."""
        bits = (codes[..., None] >> torch.arange(8, dtype=torch.uint8, device=codes.device)) & 1
        return (bits.float() * 2 - 1).view(len(codes), scales.shape[1], self.block) * scales


class LowPrecision(Method):
    """Sends gradients in ``dtype``; what is rounded is not sent again. Ranks sum rows of a reduce-scatter in full."""

    has_feedback = False
    mixes_parameters = False

    def __init__(self, traffic: Traffic, dtype: torch.dtype) -> None:
        super().__init__(traffic)
        self.dtype = dtype

    def compresses(self, dtype: torch.dtype, rows: int, columns: int) -> bool:
        """Whether elements of a gradient take more bytes than elements of the message."""
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
