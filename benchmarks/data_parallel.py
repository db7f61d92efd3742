"""Two replicas: hybrid3d against Lightning's own DDPStrategy, both over gloo and through the Trainer.

    python benchmarks/data_parallel.py

One training step of a GPT on two ranks, one computing thread each, from batch to batch after warm-up.

Must be reached: wall and CPU seconds of hybrid3d <= 1.02 x DDPStrategy.
"""

from __future__ import annotations

import argparse
from functools import partial

from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of

RANKS = 2


def ddp(turn: Turn, args: argparse.Namespace) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    _fit(turn, args, DDPStrategy(process_group_backend="gloo"))


def hybrid3d(turn: Turn, args: argparse.Namespace) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    _fit(turn, args, Hybrid3DStrategy(data_parallel_size=RANKS, process_group_backend="gloo"))


def _fit(turn: Turn, args: argparse.Namespace, strategy: object) -> None:
    model = SmallGPT(args.width, args.layers, length=args.length)
    fit(turn, model, batch_of(args.batch, args.length), strategy=strategy, devices=RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="samples per step and replica")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="per turn")
    args = parser.parse_args()
    variants = [Variant("DDPStrategy", partial(ddp, args=args)), Variant("hybrid3d", partial(hybrid3d, args=args))]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    print_table(f"GPT of {args.layers} blocks of width {args.width}, {RANKS} replicas", results)
    theirs, ours = results
    verdict("wall, hybrid3d / DDPStrategy", ratios(ours.wall, theirs.wall), at_most=1.02)
    verdict("CPU, hybrid3d / DDPStrategy", ratios(ours.cpu, theirs.cpu), at_most=1.02)


if __name__ == "__main__":
    main()
