"""How long the recording of a step takes, against the depth of the model.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --profile        cProfile of planning the deepest models

A GPT of 6 to 48 layers, hand-written and Hugging Face's GPT-2 (from a config, nothing is downloaded), narrow, since
recording computes nothing. `StagePlan` plans its stages as the strategy lets it, on one of `--stages` ranks: it records
the step, once or as often as it needs to balance the cut, and assigns homes.
Median of `--times` after one that warms up; CPU seconds of one thread, which other processes disturb less than wall.

Must be reached, at 48 layers: one recording < 1 s, and all of planning < 1 s.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
from lightning.pytorch import LightningModule
from side_by_side import quartiles, verdict
from small_gpt import SmallGPT, batch_of
from torch import Tensor

from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.pipeline.stages.recording import record_variant
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.recording.record import Recipe

WIDTH, LENGTH = 64, 32


class HuggingFaceGPT(LightningModule):
    def __init__(self, layers: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=WIDTH, n_layer=layers, n_head=4)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        text, _ = batch
        return self.model(input_ids=text, labels=text).loss


def plan(module: LightningModule, stages: int) -> tuple[float, list[float], int]:
    """CPU seconds of planning, those of each recording, and the number of operations found."""
    recordings: list[float] = []
    original = Recipe.record

    def timed(*args: object, **kwargs: object) -> object:
        begin = time.thread_time()
        try:
            return original(*args, **kwargs)
        finally:
            recordings.append(time.thread_time() - begin)

    pipeline = SimpleNamespace(size=lambda: stages, rank=lambda: 0)
    batch = batch_of(2, LENGTH)
    with mock.patch.object(Recipe, "record", timed):
        begin = time.thread_time()
        stage_plan = StagePlan(module, pipeline, KeyedRandomness(1, torch.device("cpu")))
        recipe = stage_plan.recipe("training_step", lambda: module.training_step(batch, 0), trains=True)
        variant = record_variant(stage_plan, recipe)
        seconds = time.thread_time() - begin
    return seconds, recordings, len(variant.assignment.graph.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    models = {"hand-written": lambda n: SmallGPT(WIDTH, n, length=LENGTH), "Hugging Face GPT-2": HuggingFaceGPT}
    print(f"{'':20} {'layers':>6} {'operations':>10} {'recordings':>10} {'each, ms':>9} {'planning, ms':>12}")
    deepest = {}
    for name, build in models.items():
        for layers in args.layers:
            module = build(layers)
            plan(module, args.stages)
            rows = [plan(module, args.stages) for _ in range(args.times)]
            each = [seconds for _, recordings, _ in rows for seconds in recordings]
            total = [seconds for seconds, _, _ in rows]
            print(
                f"{name:20} {layers:6} {rows[0][2]:10} {len(rows[0][1]):10} {1000 * statistics.median(each):9.1f}"
                f" {1000 * statistics.median(total):12.1f}"
            )
            deepest[name] = each, total
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(plan, module, args.stages)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30).sort_stats("cumulative").print_stats(40)
    for name, (each, total) in deepest.items():
        verdict(f"{name}, {args.layers[-1]} layers: seconds of one recording", quartiles(each), at_most=1.0)
        verdict(f"{name}, {args.layers[-1]} layers: seconds of planning", quartiles(total), at_most=1.0)


if __name__ == "__main__":
    main()
