"""Ring attention against the exchange of positions for heads, and against one process: attention alone, with gradients.

    python benchmarks/ring_attention.py
    python benchmarks/ring_attention.py --ranks 4 --heads 8 --key-heads 2

    one process   torch's attention to the full sequence
    exchange      all-to-all to all positions of the local heads, torch's attention, all-to-all back
    ring          ring attention in the balanced order

All causal. Printed with the times: the bytes that a rank sends in a step, and, without messages, the CPU time of the
blocks of each rank, in the balanced order and with contiguous positions. Nothing must be reached.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import Turn, Variant, compare, print_table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.sequence.kernels import FlashOnCpu, Scores
from lightning_hybrid.sequence.order import Block, RingOrder
from lightning_hybrid.sequence.positions import (
    SequenceSharding,
    to_heads,
    to_positions,
)
from lightning_hybrid.sequence.ring import ring_attention
from lightning_hybrid.tensor.collectives import GroupRanks


class CountingRanks(GroupRanks):
    """Counts the bytes that a rank sends to others."""

    sent = 0

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        self.sent += sum(block.nbytes for rank, block in enumerate(blocks) if rank != self.rank)
        return super().exchange(blocks, shapes)

    def sent_since(self) -> int:
        sent, self.sent = self.sent, 0
        return sent


def inputs_of(args: argparse.Namespace, length: int) -> list[Tensor]:
    heads = (args.heads, args.key_heads, args.key_heads)
    return [torch.randn(1, number, length, args.features, requires_grad=True) for number in heads]


def one_process(turn: Turn, args: argparse.Namespace) -> None:
    tensors = inputs_of(args, args.length)
    while True:
        turn.border()
        out = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=args.heads != args.key_heads)
        torch.autograd.grad(out.sum(), tensors)


def exchange(turn: Turn, args: argparse.Namespace) -> None:
    ranks = CountingRanks(dist.new_group())
    turn.note = ranks.sent_since
    tensors = inputs_of(args, args.length // ranks.size)
    sharding = SequenceSharding(1, args.length, ranks)

    def features(heads: int) -> Shard:
        return Shard.evenly(-1, heads * args.features, ranks.size)

    while True:
        turn.border()
        local = []
        for tensor in tensors:
            flat = tensor.transpose(1, 2).flatten(2)
            local.append(to_heads(flat, sharding, features(tensor.shape[1])).unflatten(2, (-1, args.features)))
        q, k, v = (tensor.transpose(1, 2) for tensor in local)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out = to_positions(out.transpose(1, 2).flatten(2), sharding, features(args.heads))
        torch.autograd.grad(out.sum(), tensors)


def ring(turn: Turn, args: argparse.Namespace) -> None:
    ranks = CountingRanks(dist.new_group())
    turn.note = ranks.sent_since
    tensors = inputs_of(args, args.length // ranks.size)
    sharding = SequenceSharding(2, args.length, ranks)
    while True:
        turn.border()
        torch.autograd.grad(ring_attention(*tensors, sharding, is_causal=True).sum(), tensors)


def seconds_of_blocks(args: argparse.Namespace, rank: int, *, balanced: bool) -> float:
    """CPU time of the attention of one rank, forward and backward, without messages."""
    order, local = RingOrder(args.length, args.ranks, True), args.length // args.ranks
    kernel: Any = FlashOnCpu()
    q, k, v, grad = (torch.randn(1, args.heads, local, args.features) for _ in range(4))
    everything = slice(None)
    blocks = [order.block(rank, other) for other in range(args.ranks)]
    if not balanced:
        blocks = [Block(everything, everything, is_causal=other == rank) for other in range(rank + 1)]
    begin = time.process_time()
    for block in blocks:
        tensors = q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys]
        scores = Scores(args.features**-0.5, block.is_causal)
        out, lse = kernel.forward(*tensors, scores)
        kernel.backward(grad[:, :, block.queries], *tensors, out, lse, scores)
    return time.process_time() - begin


def print_balance(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rounds: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(args.rounds):
        for balanced, found in rounds.items():
            found.append([seconds_of_blocks(args, rank, balanced=balanced) for rank in range(args.ranks)])
    for balanced, found in rounds.items():
        medians = [sorted(column)[len(column) // 2] for column in zip(*found, strict=True)]
        order = RingOrder(args.length, args.ranks, True)
        scores = [sum(sum(range(a, b)) + b - a for a, b in order.ranges(rank)) for rank in range(args.ranks)]
        most = max(medians) / (sum(medians) / len(medians))
        name = "balanced" if balanced else "contiguous"
        print(
            f"{name:10} CPU seconds by rank {[round(each, 3) for each in medians]}, the largest {most:.2f} of the mean"
        )
        if balanced:
            print(f"           scores by rank {scores}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096, help="positions of the full sequence")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--features", type=int, default=64, help="of a head")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    variants = [Variant("one process", partial(one_process, args=args), ranks=1)]
    if args.heads % args.ranks == args.key_heads % args.ranks == 0:
        variants.append(Variant("exchange", partial(exchange, args=args)))
    variants.append(Variant("ring", partial(ring, args=args)))
    results = compare(variants, ranks=args.ranks, rounds=args.rounds, steps=1)
    print_table(f"{args.ranks} ranks, {args.length} positions, {args.heads} heads, {args.key_heads} of keys", results)
    for result in results[1:]:
        print(f"{result.name}: {max(result.notes[-1]) / 2**20:.2f} MiB sent by a rank in a step")
    print_balance(args)


if __name__ == "__main__":
    main()
