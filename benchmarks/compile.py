"""Layers compiled against layers as they are: `compile="units"` over two pipeline stages and over two tensor ranks.

    python benchmarks/compile.py                   two stages
    python benchmarks/compile.py --tensor          two tensor ranks
    python benchmarks/compile.py --compile-time    seconds until 12 like layers have run once, forward and backward

One training step of a GPT through a real Trainer, all after warm-up, one computing thread per rank. The first turn of a
variant compiles.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from side_by_side import Turn, Variant, compare, fit, print_table, ratios
from small_gpt import SmallGPT, batch_of

RANKS = 2


def hybrid3d(turn: Turn, args: argparse.Namespace, compile: Any) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    sizes = {"tensor_parallel_size" if args.tensor else "pipeline_parallel_size": RANKS}
    strategy = Hybrid3DStrategy(**sizes, num_microbatches=args.microbatches, compile=compile)
    model = SmallGPT(args.width, args.layers, length=args.length)
    fit(turn, model, batch_of(args.batch, args.length), strategy=strategy, devices=RANKS)


def compile_time(args: argparse.Namespace) -> None:
    """In this process, without the Trainer: what the strategy does to layers."""
    from torch._dynamo.utils import counters

    from lightning_hybrid.techniques.compile import CompiledUnits

    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    x = torch.randn(2, args.length, args.width, requires_grad=True)
    torch.compile(torch.sin)(x).sum().backward()  # what torch loads once
    for layers in (1, 12):
        torch.compiler.reset()
        counters.clear()
        model = SmallGPT(args.width, layers, length=args.length)
        units = CompiledUnits(model, {}, torch.device("cpu"), in_microbatches=False)
        units.choose({f"blocks.{index}": block for index, block in enumerate(model.blocks)})
        start = time.perf_counter()
        with units.running():
            out = x
            for block in model.blocks:
                out = block(out)
            out.sum().backward()
        graphs = counters["stats"]["unique_graphs"]
        print(
            f"{layers:3} layers: {time.perf_counter() - start:5.1f} s, {graphs} graph{'s' * (graphs > 1)}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="samples per step, of all microbatches")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--tensor", action="store_true")
    parser.add_argument("--compile-time", action="store_true")
    args = parser.parse_args()
    if args.compile_time:
        compile_time(args)
        return
    ways = {"as it is": None, "compiled": "units", "aot_eager": {"backend": "aot_eager"}}
    variants = [Variant(name, partial(hybrid3d, args=args, compile=compile)) for name, compile in ways.items()]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    over = "tensor ranks" if args.tensor else "stages"
    print_table(f"GPT of {args.layers} blocks of width {args.width} over {RANKS} {over}", results)
    for what in ("wall", "cpu"):
        low, middle, high = ratios(getattr(results[1], what), getattr(results[0], what))
        print(f"  {what}, compiled / as it is: {middle:.3f} [{low:.3f} {high:.3f}]")


if __name__ == "__main__":
    main()
