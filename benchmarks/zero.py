"""ZeRO-3 over two replicas: hybrid3d against FSDP2 through Lightning's ModelParallelStrategy, and DeepSpeed, over gloo.

    python benchmarks/zero.py

One training step of a GPT on two ranks, one computing thread each, from batch to batch after warm-up. FSDP2's module
has a `configure_model` written by hand that shards each block; hybrid3d's has none. DeepSpeed, where it is
installed, runs its own engine without a Trainer, with the settings that it has by itself.

Must be reached: wall and CPU seconds of hybrid3d, by either policy, not worse than FSDP2 by the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from functools import partial

import torch
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of, loss_of, optimizer_of
from torch import Tensor, nn

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


class WithLoss(nn.Module):
    """What DeepSpeed's engine calls."""

    def __init__(self, model: SmallGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        return loss_of(self.model(text), following)


def deepspeed(turn: Turn, args: argparse.Namespace, stage: int) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    model = WithLoss(SmallGPT(args.width, args.layers, length=args.length))
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = optimizer_of(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    batch = batch_of(args.batch, args.length)
    while True:
        turn.border()
        engine.backward(engine(*batch))
        engine.step()


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
    if importlib.util.find_spec("deepspeed") is not None:
        stages = {f"DeepSpeed, stage {stage}": partial(deepspeed, args=args, stage=stage) for stage in (2, 3)}
        variants += [Variant(name, run) for name, run in stages.items()]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    print_table(f"GPT of {args.layers} blocks of width {args.width}, 2 replicas, ZeRO-3", results)
    by_layer, kept, ours_by_layer, ours_by_step, *theirs_of_deepspeed = results
    like = [("by step", ours_by_step), ("by layer", ours_by_layer)]  # stage 2 keeps parameters, stage 3 gathers layers
    for other, (name, ours) in zip(theirs_of_deepspeed, like, strict=False):
        verdict(f"wall, hybrid3d {name} / {other.name}", ratios(ours.wall, other.wall), at_most=1.0)
        verdict(f"CPU, hybrid3d {name} / {other.name}", ratios(ours.cpu, other.cpu), at_most=1.0)
    for name, ours, theirs in (("by layer", ours_by_layer, by_layer), ("by step", ours_by_step, kept)):
        verdict(f"wall, hybrid3d {name} / FSDP2", ratios(ours.wall, theirs.wall), at_most=1.0)
        verdict(f"CPU, hybrid3d {name} / FSDP2", ratios(ours.cpu, theirs.cpu), at_most=1.0)


if __name__ == "__main__":
    main()
