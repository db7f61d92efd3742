"""Predicted against measured step times on this machine's CPU ranks, for a GPT under 13 layouts of at most two ranks.

    lightning-hybrid hardware measure --output here.toml
    PYTHONPATH=. python benchmarks/planner_times_here.py here.toml

The model and the layouts are those of `planner_memory_here.py` (those that two cores can run). Each layout trains in
processes of its own; the time of a step is the median of steps 3 to 6, and of the rounds. Layouts take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from memory_table import BATCH, GPT, LENGTH, VOCABULARY, adamw, run_apart
from planner_memory_here import CASES, SHAPE, Case
from scipy.stats import spearmanr
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.predict.costs.transformer import transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS
from lightning_hybrid.predict.time import predict_time

STEPS, FIRST = 6, 2


class _StepTimes(Callback):
    """Writes the median seconds between ends of steps to a file, on the first rank."""

    def __init__(self, path: str) -> None:
        self.path, self.ends = path, list[float]()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            seconds = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]
            Path(self.path).write_text(json.dumps(statistics.median(seconds[FIRST - 1 :])))


def train(case: Case, result: str) -> None:
    """Train under a layout."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=case.devices,
        strategy=Hybrid3DStrategy(**case.options),
        max_steps=STEPS,
        callbacks=[_StepTimes(result)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    text = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH + 1))
    trainer.fit(GPT(adamw), DataLoader(text, batch_size=BATCH // case.layout.data))


def main() -> None:
    """Print the table and the rank correlation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", nargs="?", default="cpu", help="a preset, or a file of `hardware measure`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        train(next(case for case in CASES if case.title == args.run), args.result)
        return
    cases, hardware = [case for case in CASES if case.devices <= 2], load_hardware(args.hardware)
    costs = transformer_costs(SHAPE)
    found: dict[str, list[float]] = {case.title: [] for case in cases}
    for _ in range(args.rounds):
        for case in cases:
            found[case.title].append(run_apart(__file__, case.title))
    measured = [statistics.median(found[case.title]) for case in cases]
    predicted = [predict_time(costs, case.layout, FORMATS["32-true"], hardware).seconds for case in cases]
    print("| layout | predicted s | measured s | rounds |\n|---|---|---|---|")
    for case, seconds, real in zip(cases, predicted, measured, strict=True):
        spread = f"{min(found[case.title]):.2f} to {max(found[case.title]):.2f}"
        print(f"| {case.title} | {seconds:.2f} | {real:.2f} | {spread} |")
    print(f"\nrank correlation {spearmanr(predicted, measured)[0]:.2f} of {len(cases)} layouts")


if __name__ == "__main__":
    main()
