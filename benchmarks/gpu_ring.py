"""The blocks of ring attention on one GPU against one call of torch's attention: what splitting the sequence costs.

    PYTHONPATH=. python benchmarks/gpu_ring.py

Causal attention in bfloat16, forward and backward, of all ranks one after the other and without messages. Nothing must
be reached.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from lightning_hybrid.sequence.kernels import Scores, kernel_for
from lightning_hybrid.sequence.order import RingOrder

HEADS, FEATURES = 16, 128


def milliseconds(run: Callable[[], None], device: torch.device, rounds: int) -> float:
    found = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found[2:])


def tensors_of(count: int, length: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, length, FEATURES, dtype=torch.bfloat16, device=device) for _ in range(count)]


def full(length: int, device: torch.device, rounds: int) -> float:
    inputs = [tensor.requires_grad_() for tensor in tensors_of(3, length, device)]
    [grad] = tensors_of(1, length, device)

    def run() -> None:
        torch.autograd.grad(scaled_dot_product_attention(*inputs, is_causal=True), inputs, grad)

    return milliseconds(run, device, rounds)


def blocks(length: int, ranks: int, device: torch.device, rounds: int) -> float:
    order = RingOrder(length, ranks, True)
    q, k, v, grad = tensors_of(4, length // ranks, device)
    kernel = kernel_for(q, v, None)

    def run() -> None:
        for rank in range(ranks):
            for other in range(ranks):
                block = order.block(rank, other)
                tensors = q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys]
                scores = Scores(FEATURES**-0.5, block.is_causal)
                out, lse = kernel.forward(*tensors, scores)
                kernel.backward(grad[:, :, block.queries], *tensors, out, lse, scores)

    return milliseconds(run, device, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--length", type=int, default=32768, help="positions of the full sequence")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = torch.device("cuda" if args.accelerator == "gpu" else "cpu")
    one = full(args.length, device, args.rounds)
    print(f"{args.length:,} positions, {HEADS} heads of {FEATURES}: {one:.2f} ms in one call")
    for ranks in (2, 4, 8):
        found = blocks(args.length, ranks, device, args.rounds)
        print(f"{ranks} ranks: {found:.2f} ms in blocks, {found / one:.3f} of one call")


if __name__ == "__main__":
    main()
