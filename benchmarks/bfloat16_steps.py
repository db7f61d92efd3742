"""Optimizer steps of bfloat16 parameters: plain, with float32 master weights, with stochastic rounding.

    python benchmarks/bfloat16_steps.py
    python benchmarks/bfloat16_steps.py --matrices 24 --size 2048

CPU time of a step of AdamW in one process on one thread, per element, the median of steps that alternate. As in a run,
float32 steps on the host are fused.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

from lightning_hybrid import HybridPrecision
from lightning_hybrid.techniques.fused_adam import fuse_steps

OPTIONS = {"plain": {}, "master weights": {"master_weights": True}, "stochastic": {"stochastic_rounding": True}}


def made(dtype: torch.dtype, args: argparse.Namespace) -> torch.optim.AdamW:
    parameters = [nn.Parameter(torch.randn(args.size, args.size).to(dtype)) for _ in range(args.matrices)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return torch.optim.AdamW(parameters, lr=1e-3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=int, default=12)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as until:
        optimizers = {"float32": made(torch.float32, args)}
        fuse_steps(optimizers.values(), until)
        for name, options in OPTIONS.items():
            optimizer = optimizers[f"bfloat16, {name}"] = made(torch.bfloat16, args)
            precision = HybridPrecision("bf16-true", **options)
            if precision.steps_in_float32:
                fuse_steps([optimizer], until)
                names = {id(p): str(n) for n, p in enumerate(optimizer.param_groups[0]["params"])}
                until.callback(precision.step_in_float32([optimizer], names, step=lambda: 0))
        times: dict[str, list[float]] = {name: [] for name in optimizers}
        for _ in range(args.steps + 1):
            for name, optimizer in optimizers.items():
                start = time.process_time()
                optimizer.step()
                times[name].append(time.process_time() - start)
    numel = args.matrices * args.size**2
    for name, seconds in times.items():
        later = sorted(second / numel * 1e9 for second in seconds[1:])
        median = statistics.median(later)
        print(f"{name:26} {median:6.2f} ns per element ({later[0]:.2f} to {later[-1]:.2f})")


if __name__ == "__main__":
    main()
