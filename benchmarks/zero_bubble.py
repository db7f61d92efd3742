"""The measured bubbles of schedules with split backwards beside that of 1F1B, with layers that sleep.

    python benchmarks/zero_bubble.py
    python benchmarks/zero_bubble.py --ranks 4 --microbatches 8 --seconds 0.05 --rounds 3

Each layer sleeps one and the same time for its forward, for the gradient of its input and for the gradient of its
weight, and hardly computes. So cores do not matter, and the figures are about the schedules and their execution alone:
what a model gains depends on how much of its backward are gradients of weights. All schedules run the same module of
two layers per rank through the Trainer; those with two stages per rank have one layer in each stage.

The bubble is the one that `PipelineTimeline` shows, measured on real ranks: the idle share of rank-time from the first
forward to the last backward of a step, transfers and dispatch included. Beside it stands the bubble of the schedule's
own order, with the times that the same actions took.

Must be reached: the bubble of `zero_bubble_v` is below 1F1B's, on 2 and on 4 ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from side_by_side import Turn, Variant, compare, fit, print_table, quartiles, ratios, verdict
from torch import Tensor, nn
from torch.nn import functional

from lightning_hybrid.pipeline.runtime import split_backward
from lightning_hybrid.schedule import chain, make_schedule, simulate, stages_of_each_rank

WIDTH = 8
SCHEDULES = ("1f1b", "zero_bubble", "zero_bubble_v", "dualpipe_v", "zero_bubble_searched")
SLEEP = {"seconds": 0.0}  # of this process

_linear, _product = functional.linear, split_backward._product


class SleepingLinear(torch.autograd.Function):
    """A linear whose gradient of the weight takes a fixed time."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        return of_x, sleeping_product(gradient, x), gradient.flatten(0, -2).sum(0)


def sleeping_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return SleepingLinear.apply(x, weight, bias)


def sleeping_product(gradient: Tensor, x: Tensor) -> Tensor:
    time.sleep(SLEEP["seconds"])
    return _product(gradient, x)


def sleep_for_weights(seconds: float) -> None:
    """From now on gradients of weights take this long in this process, deferred or not, and all can be deferred."""
    SLEEP["seconds"] = seconds
    split_backward.MIN_PRODUCTS_TO_DEFER["cpu"] = 0
    split_backward._product = sleeping_product
    functional.linear = split_backward._torch_linear = sleeping_linear


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(SLEEP["seconds"])
        return x + weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(SLEEP["seconds"])
        return gradient, gradient.sum(0)


class SleepingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Sleep.apply(x, self.shift))


class Sleeper(LightningModule):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepingLayer() for _ in range(num_layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Bubbles(Callback):
    """The bubbles of the steps of a turn, measured and by the schedule's own order; gathered on the first rank."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        from lightning_hybrid.callbacks.actions import gather_step

        step = gather_step(trainer.strategy, "first")
        if step is not None and step.bubbles is not None:
            self.rows.append(step.bubbles)

    def of_turn(self) -> tuple[float, float] | None:
        """The means of the turn."""
        rows, self.rows = self.rows, []
        return (statistics.fmean(row[0] for row in rows), statistics.fmean(row[1] for row in rows)) if rows else None


def hybrid3d(turn: Turn, schedule: str, each: int, ranks: int, microbatches: int, seconds: float) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    sleep_for_weights(seconds)
    # Sleeping costs no floating-point operations, so the cuts are given.
    layers, stages = 2 * ranks, each * ranks
    cuts = [f"layers.{layers * stage // stages}" for stage in range(1, stages)]
    strategy = Hybrid3DStrategy(
        pipeline_parallel_size=ranks,
        num_microbatches=microbatches,
        schedule=schedule,
        stages_per_rank=each,
        pipeline_cuts=cuts,
    )
    bubbles = Bubbles()
    turn.note = bubbles.of_turn
    fit(turn, Sleeper(layers), torch.ones(microbatches, WIDTH), strategy=strategy, devices=ranks, callbacks=[bubbles])


def simulated_bubble(schedule: str, each: int, ranks: int, microbatches: int) -> float:
    """The bubble if every layer takes exactly what it should, and nothing else any time."""
    order = make_schedule(schedule, ranks, microbatches, each)
    costs = {"forward_seconds": 2 / each, "backward_seconds": 4 / each}
    return simulate(order, chain(order.num_stages), **costs).bubble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each of the three parts of a layer")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), help="1f1b first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    args = parser.parse_args()
    m, seconds = args.microbatches, args.seconds
    for ranks in args.ranks:
        each = {name: stages_of_each_rank(name, 1) for name in args.schedules}
        variants = [
            Variant(name, partial(hybrid3d, schedule=name, each=v, ranks=ranks, microbatches=m, seconds=seconds))
            for name, v in each.items()
        ]
        results = compare(variants, ranks=ranks, rounds=args.rounds, steps=args.steps)
        print_table(f"{ranks} ranks, {m} microbatches, layers that sleep 3 x {1000 * seconds:.0f} ms", results)
        bubbles = {result.name: [notes[0] for notes in result.notes] for result in results}
        print(f"  {'bubble: measured [quartiles]':>50}  {'of the same order and times':>28}  {'simulated':>10}")
        for name, rows in bubbles.items():
            low, middle, high = quartiles([row[0] for row in rows])
            own = statistics.median(row[1] for row in rows)
            simulated = simulated_bubble(name, each[name], ranks, m)
            print(f"  {name:22} {middle:9.1%} [{low:.1%} {high:.1%}]  {own:28.1%}  {simulated:10.1%}")
        measured = {name: [row[0] for row in rows] for name, rows in bubbles.items()}
        for name in args.schedules[1:]:
            what = f"bubble of {name} / {args.schedules[0]}, p={ranks}, m={m}"
            verdict(what, ratios(measured[name], measured[args.schedules[0]]), at_most=1.0)


if __name__ == "__main__":
    main()
