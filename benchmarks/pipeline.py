"""Two pipeline stages against one process, against torch's own pipeline, and against what the machine can do.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --profile        cProfile of rank 0 of the hybrid3d run instead

One training step of a GPT with 8 microbatches, all after warm-up, one computing thread per rank:

    one process   a plain torch loop over the microbatches, then AdamW
    hybrid3d      the unmodified LightningModule through a real Trainer, batch to batch
    --also NAME   the same with other schedules: "zero_bubble", "eager_1f1b"
    torch 1F1B    torch.distributed.pipelining, the model cut by hand into two PipelineStages
    halves        two processes that know nothing of each other, each with its stage's arithmetic for all
                  microbatches: the ceiling, with whatever two busy cores take from each other
    with pauses   halves that sleep as long as a pipeline waits, a piece before each forward and backward: what waiting
                  itself costs on this machine, whoever waits (a virtual core that sleeps has to be given back to it)

Must be reached, with m microbatches and p stages:
    CPU seconds of hybrid3d <= 1.05 x one process
    wall of halves / wall of hybrid3d >= 0.92 x m / (m + p - 1), the rest being the bubble that 1F1B has by itself
    hybrid3d no slower than torch's pipeline, wall and CPU
    CPU seconds of hybrid3d <= 1.05 x halves with pauses, where waiting costs
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of, loss_of, optimizer_of, train_alone
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STAGES = 2


def one_process(turn: Turn, args: argparse.Namespace) -> None:
    train_alone(turn, _model(args), batch_of(args.batch, args.length), args.microbatches)


def hybrid3d(turn: Turn, args: argparse.Namespace, schedule: str = "1f1b") -> None:
    from lightning_hybrid import Hybrid3DStrategy

    sizes = {"pipeline_parallel_size": STAGES, "num_microbatches": args.microbatches}
    strategy = Hybrid3DStrategy(**sizes, schedule=schedule)
    fit(turn, _model(args), batch_of(args.batch, args.length), strategy=strategy, devices=STAGES)


def torch_1f1b(turn: Turn, args: argparse.Namespace) -> None:
    module = _model(args).stages(STAGES)[turn.rank]
    stage = PipelineStage(module, turn.rank, STAGES, torch.device("cpu"), group=dist.new_group(range(STAGES)))
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss_of)
    optimizer = optimizer_of(module.parameters())
    text, following = batch_of(args.batch, args.length)
    while True:
        turn.border()
        optimizer.zero_grad()
        if turn.rank == 0:
            schedule.step(text)
        else:
            schedule.step(target=following, losses=[])
        optimizer.step()


def halves(turn: Turn, args: argparse.Namespace, *, pauses: bool = False) -> None:
    module = _model(args).stages(STAGES)[turn.rank]
    optimizer = optimizer_of(module.parameters())
    text, following = batch_of(args.batch, args.length)
    inner = torch.randn(args.batch, args.length, args.width)
    n = args.microbatches
    pause = 0.0
    while True:
        turn.border()
        begin = time.perf_counter()
        optimizer.zero_grad()
        for part, given, target in zip(text.chunk(n), inner.chunk(n), following.chunk(n), strict=True):
            if pause:
                time.sleep(pause)
            if turn.rank == 0:
                out, gradient = module(part), given
            else:
                out, gradient = loss_of(module(given.clone().requires_grad_()), target) / n, None
            if pause:
                time.sleep(pause)
            out.backward(gradient)
        optimizer.step()
        if pauses and not pause:  # of 1F1B's bubble; known after the first step, which warms up
            pause = (time.perf_counter() - begin) * (STAGES - 1) / n / (2 * n)


def _model(args: argparse.Namespace) -> SmallGPT:
    return SmallGPT(args.width, args.layers, length=args.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="samples per step, of all microbatches")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--also", nargs="+", default=[], metavar="SCHEDULE", help="other schedules to run beside 1F1B")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.profile:
        variant = Variant("hybrid3d", partial(hybrid3d, args=args))
        [result] = compare([variant], ranks=STAGES, rounds=args.rounds, steps=args.steps, profile=True)
        print_table("Under cProfile", [result])
        print(result.profile)
        return
    variants = [
        Variant("one process", partial(one_process, args=args), ranks=1),
        Variant("hybrid3d", partial(hybrid3d, args=args)),
        Variant("torch 1F1B", partial(torch_1f1b, args=args)),
        Variant("halves", partial(halves, args=args), mean_of_ranks=True),
        Variant("with pauses", partial(halves, args=args, pauses=True), mean_of_ranks=True),
    ]
    variants += [Variant(name, partial(hybrid3d, args=args, schedule=name)) for name in args.also]
    results = compare(variants, ranks=STAGES, rounds=args.rounds, steps=args.steps)
    print_table(f"GPT of {args.layers} blocks of width {args.width}, {args.microbatches} microbatches", results)
    alone, ours, torchs, ceiling, paused, *others = results
    bound = args.microbatches / (args.microbatches + STAGES - 1)
    verdict("CPU, hybrid3d / one process", ratios(ours.cpu, alone.cpu), at_most=1.05)
    verdict(
        f"halves / hybrid3d, wall (1F1B's own bound {bound:.3f})",
        ratios(ceiling.wall, ours.wall),
        at_least=0.92 * bound,
    )
    verdict("wall, hybrid3d / torch 1F1B", ratios(ours.wall, torchs.wall), at_most=1.0)
    verdict("CPU, hybrid3d / torch 1F1B", ratios(ours.cpu, torchs.cpu), at_most=1.0)
    verdict("CPU, hybrid3d / halves with pauses", ratios(ours.cpu, paused.cpu), at_most=1.05)
    for other in others:
        verdict(f"wall, {other.name} / hybrid3d", ratios(other.wall, ours.wall), at_most=1.0)


if __name__ == "__main__":
    main()
