"""ZeRO-3 over two replicas: hybrid3d against FSDP2 through Lightning's ModelParallelStrategy, over gloo.

    python benchmarks/zero.py

One training step of a GPT on two ranks, one computing thread each, from batch to batch after warm-up. FSDP2's module
has a `configure_model` written by hand that shards each block; hybrid3d's has none.

Must be reached: wall and CPU seconds of hybrid3d, by either policy, not worse than FSDP2 by the same.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of

RANKS = 2


class ByHand(SmallGPT):
    """The same module as its user must write it for FSDP2."""

    by_layer = True

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.by_layer)
        fully_shard(self, mesh=mesh, reshard_after_forward=self.by_layer)


def fsdp2(turn: Turn, args: argparse.Namespace, reshard: bool) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    model = ByHand(args.width, args.layers, length=args.length)
    model.by_layer = reshard
    strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend="gloo")
    fit(turn, model, batch_of(args.batch, args.length), strategy=strategy, devices=RANKS)


def hybrid3d(turn: Turn, args: argparse.Namespace, reshard: bool) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    model = SmallGPT(args.width, args.layers, length=args.length)
    strategy = Hybrid3DStrategy(zero_stage=3, reshard_after_forward=reshard, process_group_backend="gloo")
    fit(turn, model, batch_of(args.batch, args.length), strategy=strategy, devices=RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="samples per step and replica")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="per turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    variants = [
        Variant("FSDP2, by layer", partial(fsdp2, args=args, reshard=True)),
        Variant("FSDP2, kept", partial(fsdp2, args=args, reshard=False)),
        Variant("hybrid3d, by layer", partial(hybrid3d, args=args, reshard=True)),
        Variant("hybrid3d, by step", partial(hybrid3d, args=args, reshard=False)),
    ]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    print_table(f"GPT of {args.layers} blocks of width {args.width}, 2 replicas, ZeRO-3", results)
    by_layer, kept, ours_by_layer, ours_by_step = results
    for name, ours, theirs in (("by layer", ours_by_layer, by_layer), ("by step", ours_by_step, kept)):
        verdict(f"wall, hybrid3d {name} / FSDP2", ratios(ours.wall, theirs.wall), at_most=1.0)
        verdict(f"CPU, hybrid3d {name} / FSDP2", ratios(ours.cpu, theirs.cpu), at_most=1.0)


if __name__ == "__main__":
    main()
