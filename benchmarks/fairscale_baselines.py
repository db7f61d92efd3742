"""FairScale 0.4 on the same machine: what its parts take today, as baselines for ours.

    python benchmarks/fairscale_baselines.py

"Pipe": one training step of a GPT with 8 microbatches: a plain loop in one process, FairScale's Pipe (two partitions on
"cpu", a thread each, in one process; activations kept, and with its default checkpointing), hybrid3d with two stages.
On a CPU Pipe's partitions overlap in the forward only: autograd has one thread for the whole backward.

"Recomputation" and "experts" have no counterpart of ours yet. Their rows are only baselines: blocks as they are and in
`checkpoint_wrapper`; and one MOELayer (Top2Gate, 4 experts on each of two ranks), forward and backward, against the
arithmetic of its experts alone.

Must be reached: wall and CPU seconds of hybrid3d <= Pipe (with the activations kept, which is the faster one).
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from pipeline import hybrid3d, one_process
from side_by_side import Turn, Variant, compare, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of, loss_of, optimizer_of, train_alone
from torch import nn

EXPERTS = 4


def pipe(turn: Turn, args: argparse.Namespace, checkpoint: str) -> None:
    from fairscale.nn import Pipe

    model = SmallGPT(args.width, args.layers, length=args.length)
    whole = nn.Sequential(model.embed, *model.blocks, model.norm, model.head)
    half = args.layers // 2
    model = Pipe(
        whole,
        balance=[1 + half, half + 2],
        devices=["cpu", "cpu"],
        chunks=args.microbatches,
        checkpoint=checkpoint,
    )
    optimizer = optimizer_of(model.parameters())
    text, following = batch_of(args.batch, args.length)
    while True:
        turn.border()
        optimizer.zero_grad()
        loss_of(model(text), following).backward()
        optimizer.step()


def blocks(turn: Turn, args: argparse.Namespace, wrapped: bool) -> None:
    from fairscale.nn import checkpoint_wrapper

    model = SmallGPT(args.width, args.layers, length=args.length)
    if wrapped:
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    train_alone(turn, model, batch_of(args.batch, args.length), args.microbatches)


def experts(turn: Turn, args: argparse.Namespace, layer: bool) -> None:
    from fairscale.nn.moe import MOELayer, Top2Gate

    torch.manual_seed(1)
    width = args.width
    members = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(EXPERTS)
    )
    x = torch.randn(args.batch, args.length, width, requires_grad=True)
    moe = MOELayer(Top2Gate(width, 2 * EXPERTS), members) if layer else None
    while True:
        turn.border()
        if moe is not None:
            (moe(x).square().mean() + moe.l_aux).backward()
        else:
            # Top2Gate's capacity is twice its tokens: each expert computes all its places, filled or not.
            tokens = x.flatten(0, 1)
            sum(
                expert(part).square().mean()
                for expert, part in zip(members, (tokens.repeat(2, 1)).chunk(EXPERTS), strict=True)
            ).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="per turn")
    args = parser.parse_args()
    variants = [
        Variant("one process", partial(one_process, args=args), ranks=1),
        Variant("Pipe, checkpoint='never'", partial(pipe, args=args, checkpoint="never"), ranks=1),
        Variant("Pipe, checkpoint='except_last'", partial(pipe, args=args, checkpoint="except_last"), ranks=1),
        Variant("hybrid3d", partial(hybrid3d, args=args)),
        Variant("blocks in checkpoint_wrapper", partial(blocks, args=args, wrapped=True), ranks=1),
    ]
    results = compare(variants, ranks=2, rounds=args.rounds, steps=args.steps)
    print_table("Pipe and recomputation", results)
    _, theirs, _, ours, _ = results
    verdict("wall, hybrid3d / Pipe", ratios(ours.wall, theirs.wall), at_most=1.0)
    verdict("CPU, hybrid3d / Pipe", ratios(ours.cpu, theirs.cpu), at_most=1.0)

    variants = [
        Variant("experts alone", partial(experts, args=args, layer=False)),
        Variant("MOELayer", partial(experts, args=args, layer=True)),
    ]
    print_table("Experts", compare(variants, ranks=2, rounds=args.rounds, steps=2 * args.steps))


if __name__ == "__main__":
    main()
