"""Muon and Adafactor over two ranks that hold shards: full parameters at one owner each, or on every rank.

    python benchmarks/optimizer_steps.py
    python benchmarks/optimizer_steps.py --layout tp2
    python benchmarks/optimizer_steps.py --quantized    # AdamW with 8-bit states of bitsandbytes instead

One training step of a GPT on two ranks, one computing thread each, from batch to batch after warm-up. "Every rank" is
a subclass with a step of its own, as users write them: it may combine parameters, so every rank gathers all of them.

Must be reached: CPU seconds of owners less than of full parameters on every rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of
from torch.optim import Optimizer

RANKS = 2
LAYOUTS: dict[str, dict[str, Any]] = {"zero3": {"zero_stage": 3}, "tp2": {"tensor_parallel_size": 2}}


class OwnMuon(torch.optim.Muon):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnAdafactor(torch.optim.Adafactor):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class MatricesGPT(SmallGPT):
    """Its matrices alone are trained, as Muon's parameters are."""

    def __init__(self, kind: Callable[..., Optimizer], width: int, layers: int, length: int) -> None:
        super().__init__(width, layers, length=length)
        self.kind = kind
        for p in self.parameters():
            p.requires_grad_(p.dim() == 2)

    def configure_optimizers(self) -> Optimizer:
        return self.kind([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def adamw_8bit(parameters: Any, lr: float) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=lr)


def own_adamw_8bit(parameters: Any, lr: float) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    class OwnAdamW8bit(AdamW8bit):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    return OwnAdamW8bit(parameters, lr=lr)


def step_by(turn: Turn, args: argparse.Namespace, kind: Callable[..., Optimizer]) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    model = MatricesGPT(kind, args.width, args.layers, args.length)
    strategy = Hybrid3DStrategy(**LAYOUTS[args.layout], process_group_backend="gloo")
    fit(turn, model, batch_of(args.batch, args.length), strategy=strategy, devices=RANKS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, default="zero3")
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, Callable[..., Optimizer]] = {
        "Muon, owners": torch.optim.Muon,
        "Muon, every rank": OwnMuon,
        "Adafactor, owners": torch.optim.Adafactor,
        "Adafactor, every rank": OwnAdafactor,
    }
    if args.quantized:
        kinds = {"AdamW8bit, owners": adamw_8bit, "AdamW8bit, every rank": own_adamw_8bit}
    variants = [Variant(name, partial(step_by, args=args, kind=kind)) for name, kind in kinds.items()]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    print_table(f"GPT of {args.layers} blocks of width {args.width}, 2 ranks, {args.layout}", results)
    for owners, everywhere in zip(results[::2], results[1::2], strict=True):
        verdict(f"wall, {owners.name} / every rank", ratios(owners.wall, everywhere.wall), at_most=1.0)
        verdict(f"CPU, {owners.name} / every rank", ratios(owners.cpu, everywhere.cpu), at_most=1.0)


if __name__ == "__main__":
    main()
