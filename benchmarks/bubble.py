"""How much of the time that a schedule allows is lost to carrying it out: stages that sleep instead of computing.

    python benchmarks/bubble.py
    python benchmarks/bubble.py --ranks 4 --microbatches 16 --seconds 0.05

Each stage sleeps a fixed time in its forward and twice that in its backward, so cores do not matter and every second
beyond the schedule's own is overhead: dispatch, transfers, sharing of the loss, the optimizer, Lightning's loop. The
module is an unmodified LightningModule, run by hybrid3d through the Trainer, and the same stages are run by
torch.distributed.pipelining (Schedule1F1B). Wall time is from batch to batch.

Must be reached: bound / measured >= 0.96, where the bound is the makespan of `lightning_hybrid.schedule.simulate` with
the same costs: the mean of the sleeps of each stage as they turned out in the same turn (a sleep is always a little
longer than asked for, more so on a busy machine). What is lost does not grow with the sleeps, so it is also printed in
milliseconds: shorter stages lose a larger share of their time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_hybrid.schedule import chain, make_schedule, simulate

WIDTH = 8
SLEPT: dict[str, list[float]] = {"forward": [], "backward": []}  # seconds, of this process in this turn


def sleep(kind: str, seconds: float) -> None:
    begin = time.perf_counter()
    time.sleep(seconds)
    SLEPT[kind].append(time.perf_counter() - begin)


def means_of_turn() -> tuple[float, float]:
    """Mean seconds of a forward and a backward on this rank since the last call."""
    means = tuple(statistics.fmean(taken) if taken else 0.0 for taken in SLEPT.values())
    for taken in SLEPT.values():
        taken.clear()
    return means


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        sleep("forward", seconds)
        return x + weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        sleep("backward", 2 * ctx.seconds)
        return gradient, gradient.sum(0), None


class SleepingStage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, self.seconds)


class Sleeper(LightningModule):
    def __init__(self, num_stages: int, seconds: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(SleepingStage(seconds) for _ in range(num_stages))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for part in self.parts:
            batch = part(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def hybrid3d(turn: Turn, ranks: int, microbatches: int, seconds: float) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    # Sleeping costs no floating-point operations, so the cuts are given.
    cuts = [f"parts.{stage}" for stage in range(1, ranks)]
    strategy = Hybrid3DStrategy(pipeline_parallel_size=ranks, num_microbatches=microbatches, pipeline_cuts=cuts)
    turn.note = means_of_turn
    fit(turn, Sleeper(ranks, seconds), torch.ones(microbatches, WIDTH), strategy=strategy, devices=ranks)


def torch_1f1b(turn: Turn, ranks: int, microbatches: int, seconds: float) -> None:
    module = SleepingStage(seconds)
    stage = PipelineStage(module, turn.rank, ranks, torch.device("cpu"), group=dist.new_group(range(ranks)))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    batch = torch.ones(microbatches, WIDTH)
    turn.note = means_of_turn
    while True:
        turn.border()
        optimizer.zero_grad()
        if turn.rank == 0:
            schedule.step(batch)
        elif turn.rank == ranks - 1:
            schedule.step(target=torch.zeros_like(batch), losses=[])
        else:
            schedule.step()
        optimizer.step()


def bound_seconds(ranks: int, microbatches: int, means: list[tuple[float, float]]) -> float:
    """What the schedule takes if each stage takes what it took in the mean of one turn."""
    forward, backward = zip(*means, strict=True)
    schedule = make_schedule("1f1b", ranks, microbatches)
    return simulate(schedule, chain(ranks), forward_seconds=forward, backward_seconds=backward).makespan_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.02, 0.05], help="of a forward")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="per turn")
    args = parser.parse_args()
    for ranks, seconds in itertools.product(args.ranks, args.seconds):
        variants = [
            Variant(f"{function.__name__}, m={m}", partial(function, ranks=ranks, microbatches=m, seconds=seconds))
            for m in args.microbatches
            for function in (torch_1f1b, hybrid3d)
        ]
        results = compare(variants, ranks=ranks, rounds=args.rounds, steps=args.steps)
        print_table(f"{ranks} stages that sleep {1000 * seconds:.0f} ms forward", results)
        for result, m in zip(results, [m for m in args.microbatches for _ in range(2)], strict=True):
            bounds = [bound_seconds(ranks, m, means) for means in result.notes]
            lost = statistics.median(1000 * (wall - bound) for wall, bound in zip(result.wall, bounds, strict=True))
            bound = f"bound {1000 * statistics.median(bounds):.1f} ms / measured (lost {lost:.1f} ms)"
            verdict(f"{result.name}, p={ranks}: {bound}", ratios(bounds, result.wall), at_least=0.96)


if __name__ == "__main__":
    main()
