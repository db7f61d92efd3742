"""Four ranks for two stages, one of which takes three times as long: three ranks and one, or two replicas of two.

    python benchmarks/stage_widths.py

The stages sleep, as in `bubble.py`, so cores do not matter. The module is an unmodified LightningModule. Wall time is
from batch to batch of the same samples.

Must be reached: bound / measured >= 0.93 for widths 3 + 1, where the bound is the makespan of
`lightning_hybrid.schedule.simulate` with the sleeps as they turned out; and <= 0.7 for equal stages.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from bubble import WIDTH, SleepingStage, means_of_turn
from lightning.pytorch import LightningModule
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from torch import Tensor, nn

from lightning_hybrid.schedule import chain, make_schedule, simulate

RANKS, WIDTHS = 4, (3, 1)


class Uneven(LightningModule):
    """A slow part before a fast one."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.slow, self.fast = SleepingStage(3 * seconds), SleepingStage(seconds)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of rows ``(samples, width)``."""
        return self.head(self.fast(self.slow(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def widths(turn: Turn, microbatches: int, seconds: float) -> None:
    """Three ranks for the slow stage."""
    train(turn, microbatches, seconds, stage_widths=list(WIDTHS), num_microbatches=microbatches)


def replicas(turn: Turn, microbatches: int, seconds: float) -> None:
    """Two replicas, each with half of the samples."""
    train(turn, microbatches // 2, seconds, pipeline_parallel_size=2, num_microbatches=microbatches // 2)


def train(turn: Turn, samples: int, seconds: float, **options) -> None:
    """Train on batches of so many samples per replica."""
    from lightning_hybrid import Hybrid3DStrategy

    strategy = Hybrid3DStrategy(pipeline_cuts=["fast"], **options)
    turn.note = means_of_turn
    fit(turn, Uneven(seconds), torch.ones(samples, WIDTH), strategy=strategy, devices=RANKS)


def bound_seconds(microbatches: int, means: list[tuple[float, float]]) -> float:
    """What the schedule takes if each stage takes what it took in the mean of one turn."""
    slow = [sum(column) / WIDTHS[0] for column in zip(*means[: WIDTHS[0]], strict=True)]
    forward, backward = zip(slow, means[-1], strict=True)
    schedule = make_schedule("1f1b", RANKS, microbatches, widths=WIDTHS)
    return simulate(schedule, chain(2), forward_seconds=forward, backward_seconds=backward).makespan_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.02, help="of the fast stage's forward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="per turn")
    args = parser.parse_args()
    options = {"microbatches": args.microbatches, "seconds": args.seconds}
    variants = [
        Variant("widths 3 + 1", partial(widths, **options)),
        Variant("2 replicas", partial(replicas, **options)),
    ]
    wide, equal = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    print_table(f"stages that sleep {3000 * args.seconds:.0f} and {1000 * args.seconds:.0f} ms forward", [wide, equal])
    bounds = [bound_seconds(args.microbatches, means) for means in wide.notes]
    verdict("bound / measured, widths 3 + 1", ratios(bounds, wide.wall), at_least=0.93)
    verdict("the same bound / measured, 2 replicas of equal stages", ratios(bounds, equal.wall), at_most=0.7)


if __name__ == "__main__":
    main()
