"""How long the search for the plan of one layer takes: what a run pays once for each distinct layer.

    python benchmarks/plan_search.py
    python benchmarks/plan_search.py --profile both       cProfile of one of the searches
    python benchmarks/plan_search.py --llama 8b           a layer of that width, and its memory; 70b too
    python benchmarks/plan_search.py --llama 8b --full-width    without its narrow copy

A block of Hugging Face's GPT-2 (from a config, nothing is downloaded) of width 768, called with 4 x 128 positions, is
planned by `plan_unit` over two tensor ranks (`sequence`: with `sequence_parallel`), two context ranks, and both (`all`:
with `sequence_parallel`). Wall time, in which each rank of a trial has a thread, and CPU-seconds of the process, which
other processes disturb less. The searches take turns; what is printed is the median of `--times` after one that warms
up, and the quartiles.

Must be reached: 2 s each; 5 s for the layer of Llama 8B and 15 s for that of 70B (without weights, called with 1 x 128
positions), in no more memory than their weights in float32, in each search over at most two ranks of an axis.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import statistics
import time
import warnings
from typing import Any, NamedTuple

import torch
from side_by_side import quartiles, verdict
from torch import nn

from lightning_hybrid.tensor.plan import UnitPlan
from lightning_hybrid.tensor.proof import narrow
from lightning_hybrid.tensor.search.unit import plan_unit

SEARCHES: dict[str, dict[str, Any]] = {
    "tensor": {"size": 2},
    "sequence": {"size": 2, "sequence_parallel": "tensor"},
    "context": {"size": 1, "context": 2},
    "both": {"size": 2, "context": 2},
    "all": {"size": 2, "context": 2, "sequence_parallel": "tensor"},
}
BOUND = 2.0
LLAMA = {"8b": (4096, 14336, 32, 8, 5.0), "70b": (8192, 28672, 64, 8, 15.0)}  # with the bound in seconds


class Call(NamedTuple):
    """A layer, and the arguments of a call of it."""

    unit: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def llama(name: str) -> Call:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    width, hidden, heads, kv_heads, _ = LLAMA[name]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        unit = LlamaDecoderLayer(config, 0)
    x = torch.randn(1, 128, width, requires_grad=True)
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(128)[None])
    return Call(unit, (x,), {"position_embeddings": positions, "attention_mask": None})


def block(width: int) -> Call:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=width, n_head=width // 64)
    config._attn_implementation = "sdpa"
    return Call(GPT2Block(config), (torch.randn(4, 128, width, requires_grad=True),), {})


def search(call: Call, options: dict[str, Any]) -> tuple[float, float, UnitPlan]:
    """CPU seconds of one search, its wall time, and the plan."""
    cpu, wall = time.process_time(), time.perf_counter()
    plan = plan_unit(call.unit, call.args, call.kwargs, **options)
    return time.process_time() - cpu, time.perf_counter() - wall, plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--profile", choices=SEARCHES)
    parser.add_argument("--llama", choices=LLAMA)
    parser.add_argument("--full-width", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.full_width:
        narrow.LEAST_NUMEL = 10**12
    call = llama(args.llama) if args.llama else block(args.width)
    bound = LLAMA[args.llama][-1] if args.llama else BOUND
    if args.profile:
        search(call, SEARCHES[args.profile])
        profile = cProfile.Profile()
        profile.runcall(search, call, SEARCHES[args.profile])
        pstats.Stats(profile).sort_stats("tottime").print_stats(30).sort_stats("cumulative").print_stats(40)
        return
    cpu: dict[str, list[float]] = {name: [] for name in args.searches}
    wall: dict[str, list[float]] = {name: [] for name in args.searches}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(args.times + 1):
        for name in args.searches:
            computed, passed, plan = search(call, SEARCHES[name])
            if turn == 0:
                print(f"{name}: {plan.num_trials} trials\n    " + "\n    ".join(plan.lines()))
            else:
                cpu[name].append(computed)
                wall[name].append(passed)
    for name in args.searches:
        low, middle, high = (f"{value:.2f}" for value in quartiles(cpu[name]))
        print(f"{name:10} {statistics.median(wall[name]):.2f} s, {middle} [{low} {high}] CPU-seconds")
    copies = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    copies /= 4 * sum(parameter.numel() for parameter in call.unit.parameters())
    print(f"largest memory: {copies:.2f} times the weights in float32")
    for name in args.searches:
        verdict(f"{name}: wall time of one search", quartiles(wall[name]), at_most=bound)
        verdict(f"{name}: CPU-seconds of one search", quartiles(cpu[name]), at_most=bound)


if __name__ == "__main__":
    main()
