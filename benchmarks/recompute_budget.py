"""Recomputation by a budget against uniform policies.

    python benchmarks/recompute_budget.py                # three budgets, two models
    python benchmarks/recompute_budget.py --compiled     # budgets of layers that inductor compiles, two models

Peaks are those of all tensors that are alive at a time of a forward and backward: parameters, gradients, activations
and what is recomputed. Seconds are CPU-seconds of a forward and backward; all variants take turns in one process, and
ratios are taken round by round. A budget is the peak of a uniform policy, so that they are compared at equal peaks.

Must be reached: the peak of a budget at 0.95 to 1 of it, and at most the CPU-seconds of the fastest uniform policy
whose peak is within the budget.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from side_by_side import _HEAP, quartiles, ratios, verdict
from small_gpt import SmallGPT, batch_of, loss_of
from torch import Tensor, nn

from lightning_hybrid.callbacks.monitors.holders import PeakMeter
from lightning_hybrid.memory.live import LiveBytes
from lightning_hybrid.memory.recompute.budget import BudgetedLayers, BudgetReport
from lightning_hybrid.memory.recompute.layers import Recomputation
from lightning_hybrid.memory.recompute.policies import Recompute, layer_policies
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.modules import find_layers

CPU = torch.device("cpu")
UNIFORM: list[Recompute] = ["keep", 3, 2, 0.8, 0.6, "selective", 0.3, 0.15, "full"]
BUDGETS: list[Recompute] = [3, "selective", 0.15]  # whose peaks are the budgets
Running = Callable[[], AbstractContextManager[None]]


class ConvBlock(nn.Module):
    """As in ConvNeXt: a depthwise convolution, a norm, and an MLP over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class ConvNet(nn.Module):
    def __init__(self, width: int = 128, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Case:
    """A model, its layers, and a loss."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        if name == "GPT":
            self.model: nn.Module = SmallGPT(256, 8, heads=4, length=256)
            text, following = batch_of(size, 256)
            self.loss = lambda: loss_of(self.model(text), following)
        else:
            self.model = ConvNet()
            images = torch.randn(size, 3, 128, 128, generator=torch.Generator().manual_seed(1))
            self.loss = lambda: self.model(images).square().mean()
        self.layers = find_layers(dict(self.model.named_children()))

    def step(self, running: Running, live: LiveBytes | None = None) -> int:
        """A forward and backward; returns the bytes that are alive between them."""
        with running():
            loss = self.loss()
        between = 0 if live is None else live.now
        loss.backward()
        return between

    def bytes_of(self, running: Running) -> tuple[int, int]:
        """The peak, and what is alive between forward and backward besides the parameters."""
        self.model.zero_grad()
        live = LiveBytes(CPU)
        live.track(self.model.parameters())
        weights = live.now
        with live:
            between = self.step(running, live)
        return live.peak, between - weights

    def seconds(self, running: Running) -> float:
        self.model.zero_grad()
        begin = time.process_time()
        self.step(running)
        return time.process_time() - begin

    def uniform(self, policy: Recompute) -> Running:
        running = Recomputation(self.layers, layer_policies(policy, self.layers)).running
        self.step(running)  # selective layers measure their first run, and keep nothing in it
        return running

    def budgeted(self, budget: int) -> Running:
        chosen = BudgetedLayers(CPU, lambda before: budget)
        recomputation = Recomputation(self.layers, dict.fromkeys(self.layers, 0.0), budget=chosen)
        self.model.zero_grad()
        chosen.begin_batch(self.model.parameters())
        self.step(recomputation.running)
        begin = time.process_time()
        chosen.end_batch(has_stepped=True)
        assert chosen.report is not None
        shares = ", ".join(f"{share:.2f}" for share in chosen.report.kept_share.values())
        seconds = time.process_time() - begin
        print(f"  budget {budget:,} (floor {chosen.report.floor:,}): solved in {seconds:.2f} s; kept {shares}")
        return recomputation.running


def take_turns(case: Case, variants: Mapping[str, Running], rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of each variant by round."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken = case.seconds(variants[name])
            if number:  # the first round warms up
                seconds[name].append(taken)
    return seconds


def print_row(name: str, seconds: list[float], first: list[float], nbytes: str) -> None:
    low, middle, high = quartiles(seconds)
    print(f"  {name:24} {nbytes}  {middle:7.3f} s [{low:.3f} {high:.3f}] x{ratios(seconds, first)[1]:.3f}")


def compare_budgets(case: Case, rounds: int) -> None:
    uniform = {f"uniform {policy}": case.uniform(policy) for policy in UNIFORM}
    peaks = {name: case.bytes_of(running)[0] for name, running in uniform.items()}
    budgets = {f"budget of {policy}": peaks[f"uniform {policy}"] for policy in BUDGETS}
    variants = uniform | {name: case.budgeted(budget) for name, budget in budgets.items()}
    peaks |= {name: case.bytes_of(variants[name])[0] for name in budgets}
    seconds = take_turns(case, variants, rounds)
    print(f"\n{case.name}: peak, CPU-seconds of a forward and backward ({rounds} rounds)")
    for name, taken in seconds.items():
        print_row(name, taken, seconds["uniform keep"], f"{peaks[name] / 2**20:8.1f} MiB")
    for name, budget in budgets.items():
        share = peaks[name] / budget
        verdict(f"{name}: peak / budget", (share, share, share), at_least=0.95, at_most=1.0)
        within = [other for other in uniform if peaks[other] <= budget]
        best = min(within, key=lambda other: quartiles(seconds[other])[1])
        verdict(f"{name}: CPU / {best}", ratios(seconds[name], seconds[best]), at_most=1.0)


class CompiledCase(Case):
    """A model whose layers run compiled: peaks are those of what torch's profiler records."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size)
        torch._dynamo.config.recompile_limit = 8 + 4 * len(self.layers)
        self.forwards = {fqn: torch.compile(layer.forward) for fqn, layer in self.layers.items()}

    def compiled(self, recomputation: Recomputation) -> Running:
        @contextmanager
        def running() -> Iterator[None]:
            with (
                replaced_forwards(self.layers, lambda fqn, _: self.forwards[fqn], reason="runs compiled layers"),
                recomputation.running(),
            ):
                yield

        return running

    def peak_of(self, running: Running) -> int:
        self.step(running)  # compiles
        self.model.zero_grad()
        meter = PeakMeter(CPU)
        meter.start()
        self.step(running)
        return meter.stop(sum(parameter.nbytes for parameter in self.model.parameters()))

    def chosen(self, budget: int) -> tuple[Running, BudgetReport]:
        layers = BudgetedLayers(CPU, lambda before: budget, in_full=True)
        running = self.compiled(Recomputation(self.layers, dict.fromkeys(self.layers, 0.0), budget=layers))
        self.model.zero_grad()
        layers.begin_batch(self.model.parameters())
        self.step(running)
        layers.end_batch(has_stepped=True)
        assert layers.report is not None
        return running, layers.report


def compare_compiled(case: CompiledCase, rounds: int) -> None:
    """Budgets at the peaks of uniform policies, all of compiled layers."""
    policies: list[Recompute] = ["keep", 4, 3, 2, "full"]
    uniform = {
        f"uniform {policy}": case.compiled(Recomputation(case.layers, layer_policies(policy, case.layers)))
        for policy in policies
    }
    peaks = {name: case.peak_of(running) for name, running in uniform.items()}
    variants, budgets = dict(uniform), dict[str, int]()
    for policy in (4, 3, 2):
        name, budget = f"budget of {policy}", peaks[f"uniform {policy}"]
        variants[name], report = case.chosen(budget)
        peaks[name], budgets[name] = case.peak_of(variants[name]), budget
        kept = [fqn for fqn, share in report.kept_share.items() if share == 1]
        print(f"  {name}: {budget:,} bytes; expected {report.peak:,}; kept: {', '.join(kept)}")
    seconds = take_turns(case, variants, rounds)
    print(f"\n{case.name}, compiled: peak, CPU-seconds of a forward and backward ({rounds} rounds)")
    for name, taken in seconds.items():
        print_row(name, taken, seconds["uniform keep"], f"{peaks[name] / 2**20:8.1f} MiB")
    for name, budget in budgets.items():
        share = peaks[name] / budget
        verdict(f"{name}: peak / budget", (share, share, share), at_most=1.0)
        within = [other for other in uniform if peaks[other] <= budget]
        best = min(within, key=lambda other: quartiles(seconds[other])[1])
        verdict(f"{name}: CPU / {best}", ratios(seconds[name], seconds[best]), at_most=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--models", nargs="+", choices=("GPT", "ConvNet"), default=["GPT", "ConvNet"])
    args = parser.parse_args()
    if os.environ.get("MALLOC_ARENA_MAX") != "1":  # read when the process starts: freed memory stays with it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_HEAP})
    torch.set_num_threads(1)
    for name in args.models:
        if args.compiled:
            compare_compiled(CompiledCase(name, args.batch), args.rounds)
            continue
        compare_budgets(Case(name, args.batch), args.rounds)


if __name__ == "__main__":
    main()
