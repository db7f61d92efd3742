"""Optimizer states on the host or in a file, and steps in the backward, against states in place: time of a step.

    python benchmarks/offload.py --folder /tmp/states
    python benchmarks/offload.py --accelerator gpu --width 2048 --layers 12 --batch 32 --length 1024

One process, AdamW, a GPT whose states are larger than its activations. On a CPU one thread computes, and "on the host"
is where the states are in any case. On a GPU the host has all its cores, wall time counts, and peak memory is printed.

Must be reached: a step with states on the host takes at most 1.3 x that of states in place on a CPU, 1.25 x on a GPU.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of

MIB = 2.0**20


class GPUTurn:
    """A turn whose steps end when the GPU has finished; notes the bytes allocated within a step."""

    def __init__(self, turn: Turn) -> None:
        import torch

        self._turn, self._cuda = turn, torch.cuda
        turn.note = self._peak
        self._before = 0

    def _peak(self) -> float:
        return (self._cuda.max_memory_allocated() - self._before) / MIB

    def border(self) -> None:
        """Stand between two steps."""
        self._cuda.synchronize()
        self._turn.border()
        self._before = self._cuda.memory_allocated()
        self._cuda.reset_peak_memory_stats()


def one(turn: Turn, args: argparse.Namespace, **options: Any) -> None:
    import torch

    from lightning_hybrid import Hybrid3DStrategy

    is_gpu = args.accelerator == "gpu"
    if is_gpu:
        torch.set_num_threads(os.cpu_count() or 1)
    model = SmallGPT(args.width, args.layers, length=args.length)
    batch = batch_of(args.batch, args.length)
    trainer: dict[str, Any] = {"accelerator": args.accelerator, "devices": 1}
    trainer |= {"precision": "bf16-mixed"} if is_gpu else {}
    strategy = Hybrid3DStrategy(**options)
    border: Any = GPUTurn(turn) if is_gpu else turn
    fit(border, model, batch, strategy=strategy, **trainer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="per turn")
    parser.add_argument("--folder", help="for states in files; none without it")
    args = parser.parse_args()
    host = {"optimizer_states": "cpu"}
    options: dict[str, dict[str, Any]] = {
        "in place": {},
        "in place, in the backward": {"optimizer_in_backward": True},
        "on the host": {"offload": host},
        "on the host, in the backward": {"offload": host, "optimizer_in_backward": True},
    }
    if args.folder:
        file = {"optimizer_states": f"disk:{args.folder}"}
        options["in a file"] = {"offload": file}
        options["in a file, in the backward"] = {"offload": file, "optimizer_in_backward": True}
    variants = [Variant(name, partial(one, args=args, **each)) for name, each in options.items()]
    results = compare(variants, ranks=1, rounds=args.rounds, steps=args.steps)
    print_table(f"{args.accelerator}: GPT of {args.layers} blocks of width {args.width}, AdamW", results)
    bound = 1.25 if args.accelerator == "gpu" else 1.3
    in_place, *others = results
    for result in others:
        at_most = None if "host" not in result.name else bound
        for kind in ("wall", "cpu"):
            value = ratios(getattr(result, kind), getattr(in_place, kind))
            if at_most is not None and (kind == "wall" or args.accelerator == "cpu"):
                verdict(f"{kind}, {result.name} / in place", value, at_most=at_most)
            else:
                low, middle, high = value
                print(f"        {kind}, {result.name} / in place: {middle:.3f} [{low:.3f} {high:.3f}]")
    if args.accelerator == "gpu":
        for result in results:
            print(f"        {result.name}: {max(note[0] for note in result.notes):,.0f} MiB allocated within a step")


if __name__ == "__main__":
    main()
