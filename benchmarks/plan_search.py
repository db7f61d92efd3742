"""How long the search for the plan of one layer takes: what a run pays once for each distinct layer.

    python benchmarks/plan_search.py
    python benchmarks/plan_search.py --profile both       cProfile of one of the searches

A block of Hugging Face's GPT-2 (from a config, nothing is downloaded) of width 768, called with 4 x 128 positions, is
planned by `plan_unit` over two tensor ranks (`sequence`: with `sequence_parallel`), two context ranks, and both (`all`:
with `sequence_parallel`). Wall time, in which each rank of a trial has a thread, and CPU-seconds of the process, which
other processes disturb less. The searches take turns; what is printed is the median of `--times` after one that warms
up, and the quartiles.

Must be reached: 2 s each.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
import warnings
from typing import Any

import torch
from side_by_side import quartiles, verdict
from torch import nn

from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.search.unit_search import plan_unit

SEARCHES: dict[str, dict[str, Any]] = {
    "tensor": {"size": 2},
    "sequence": {"size": 2, "sequence_parallel": "tensor"},
    "context": {"size": 1, "context": 2},
    "both": {"size": 2, "context": 2},
    "all": {"size": 2, "context": 2, "sequence_parallel": "tensor"},
}
BOUND = 2.0


def block(width: int) -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=width, n_head=width // 64)
    config._attn_implementation = "sdpa"
    return GPT2Block(config)


def search(unit: nn.Module, width: int, options: dict[str, Any]) -> tuple[float, float, UnitPlan]:
    """CPU seconds of one search, its wall time, and the plan."""
    x = torch.randn(4, 128, width, requires_grad=True)
    cpu, wall = time.process_time(), time.perf_counter()
    plan = plan_unit(unit, (x,), {}, **options)
    return time.process_time() - cpu, time.perf_counter() - wall, plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--profile", choices=SEARCHES)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    unit = block(args.width)
    if args.profile:
        search(unit, args.width, SEARCHES[args.profile])
        profile = cProfile.Profile()
        profile.runcall(search, unit, args.width, SEARCHES[args.profile])
        pstats.Stats(profile).sort_stats("tottime").print_stats(30).sort_stats("cumulative").print_stats(40)
        return
    cpu: dict[str, list[float]] = {name: [] for name in args.searches}
    wall: dict[str, list[float]] = {name: [] for name in args.searches}
    for turn in range(args.times + 1):
        for name in args.searches:
            computed, passed, plan = search(unit, args.width, SEARCHES[name])
            if turn == 0:
                print(f"{name}: {plan.num_trials} trials\n    " + "\n    ".join(plan.lines()))
            else:
                cpu[name].append(computed)
                wall[name].append(passed)
    for name in args.searches:
        low, middle, high = (f"{value:.2f}" for value in quartiles(cpu[name]))
        print(f"{name:10} {statistics.median(wall[name]):.2f} s, {middle} [{low} {high}] CPU-seconds")
    for name in args.searches:
        verdict(f"{name}: wall time of one search", quartiles(wall[name]), at_most=BOUND)
        verdict(f"{name}: CPU-seconds of one search", quartiles(cpu[name]), at_most=BOUND)


if __name__ == "__main__":
    main()
