"""What `Trainer(strategy="hybrid3d")` costs where there is nothing to parallelize: one device, no microbatches.

    python benchmarks/one_device.py

The same GPT through a plain Trainer and through hybrid3d, in one process, taking turns; from batch to batch after
warm-up. The steps of "small" take some tens of milliseconds; those of "tiny" compute next to nothing, so their
difference is what hybrid3d adds to each step, in microseconds.

Must be reached: CPU seconds of hybrid3d <= 1.02 x the plain Trainer, for "small".
"""

from __future__ import annotations

import argparse
from functools import partial

from side_by_side import Turn, Variant, compare, fit, print_table, quartiles, ratios, verdict
from small_gpt import SmallGPT, batch_of


def trainer(turn: Turn, strategy: str, width: int, layers: int, batch: int, length: int) -> None:
    import lightning_hybrid  # registers the strategy  # noqa: F401

    fit(turn, SmallGPT(width, layers, length=length), batch_of(batch, length), strategy=strategy, devices=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=10, help="per turn, of the small model")
    args = parser.parse_args()
    sizes = {
        "small": (dict(width=128, layers=4, batch=4, length=128), args.steps),
        "tiny": (dict(width=16, layers=1, batch=1, length=8), 10 * args.steps),
    }
    for size, (shape, steps) in sizes.items():
        variants = [Variant(name, partial(trainer, strategy=name, **shape)) for name in ("auto", "hybrid3d")]
        plain, ours = results = compare(variants, ranks=1, rounds=args.rounds, steps=steps)
        print_table(f"{size}: {shape}", results)
        if size == "small":
            verdict("CPU, hybrid3d / plain Trainer", ratios(ours.cpu, plain.cpu), at_most=1.02)
        else:
            more = quartiles([1e6 * (a - b) for a, b in zip(ours.cpu, plain.cpu, strict=True)])
            print(f"        hybrid3d adds {more[1]:.0f} [{more[0]:.0f} {more[2]:.0f}] microseconds of CPU to each step")


if __name__ == "__main__":
    main()
