"""What fits on one GPU and how fast: a GPT of 125M and of 1.3B parameters under each technique that saves memory.

    PYTHONPATH=. python benchmarks/gpu.py --call 1 --out gpu.jsonl    recomputation, states on the host
    PYTHONPATH=. python benchmarks/gpu.py --call 2 --out gpu.jsonl    offload of activations by width, float8, ring
                                                                      attention, the largest model
    PYTHONPATH=. python benchmarks/gpu.py --list
    PYTHONPATH=. python benchmarks/gpu.py --only "125M none" "125M budget"
    PYTHONPATH=. python benchmarks/gpu.py --tiny --accelerator cpu --limit 300

A call takes at most six minutes. Every variant trains in a process of its own, through a real Trainer on one device:
tokens that are on the device already, fused AdamW, the same seed. Times are medians of the steps after warm-up, each
until the device has finished. TFLOP/s count 6 FLOPs per parameter and token, and 12 x layers x width x length per token
for attention; what is recomputed does not count. MFU is the share of the dense bf16 peak. Peaks are bytes of tensors
within steps after warm-up; on a CPU all tensors are counted (not under `compile`), and times then mean nothing.

A budget is a share of the peak of "none", or the middle between "full" and "none" where the share is below "full".

Must be reached on a GPU: states on the host take at most 1.25 x the step of "none".
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from gpu_variants import BY_TITLE, FIRST, SECOND, SIZES, TINY, Size, Variant
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from small_gpt import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

GIB = 2.0**30
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}  # dense bf16, by part of the device's name
LEAST_SECONDS = 15.0  # in which a variant is still worth starting


# --- the model -------------------------------------------------------------------------------------------------------


class GPT(LightningModule):
    """As GPT-2: learned positions, the head's weight is that of the embedding."""

    def __init__(self, size: Size, optimizer: str = "torch.optim.AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        module, _, name = self.optimizer.rpartition(".")
        fused = {"fused": True} if module == "torch.optim" else {}
        return getattr(importlib.import_module(module), name)(self.parameters(), lr=1e-4, **fused)


# --- one variant, in a process of its own ----------------------------------------------------------------------------


class StepTimes(Callback):
    """When each step has finished on the device, and the peak of those after warm-up."""

    def __init__(self, warm_up: int, steps: int, live: Any) -> None:
        self.warm_up, self.steps, self.live = warm_up, steps, live
        self.ends: list[float] = []
        self.start_peak: int | None = None
        self.peak: int | None = None
        self.loss = float("nan")

    def begin_interval(self) -> int | None:
        """Return the peak since the last call."""
        if self.live is not None:
            return self.live.begin_interval()
        if not torch.cuda.is_available():
            return None
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.warm_up:
            self.start_peak = self.begin_interval()
        if len(self.ends) == self.warm_up + self.steps:
            self.peak = self.begin_interval()
            self.loss = float(outputs["loss"] if isinstance(outputs, dict) else outputs)

    def seconds(self) -> list[float]:
        ends = self.ends[self.warm_up - 1 :]
        return [after - before for before, after in itertools.pairwise(ends)]


def strategy_of(variant: Variant, budget: str) -> Any:
    if variant.options is None:
        return "auto"
    from lightning_hybrid import Hybrid3DStrategy

    options = dict(variant.options)
    if options.get("recompute") == "budget":
        options["recompute"] = budget
    return Hybrid3DStrategy(**options)


def precision_of(variant: Variant, size: Size) -> dict[str, Any]:
    """Arguments of the Trainer."""
    if not variant.precision:
        return {"precision": size.precision}
    from lightning_hybrid import HybridPrecision
    from lightning_hybrid.precision import Float8

    options = dict(variant.precision)
    if options.get("float8"):
        options["float8"] = Float8(exclude=["head"])
    return {"plugins": [HybridPrecision(size.precision, **options)]}


def counted(device: torch.device, variant: Variant, module: nn.Module) -> Any:
    """A counter of live tensors on a CPU; None on a GPU, whose allocator counts, and for compiled layers and steps."""
    if device.type == "cuda" or "compile" in (variant.options or {}) or variant.optimizer.startswith("torchao."):
        return None
    from lightning_hybrid.memory.live import LiveBytes

    live = LiveBytes(device)
    live.track(module.parameters())
    return live


def train(variant: Variant, size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Train the variant here; returns its figures."""
    seed_everything(1, verbose=False)
    device = torch.device("cuda", 0) if args.accelerator == "gpu" else torch.device("cpu")
    with device:  # a large model is initialized there too
        module = GPT(size, variant.optimizer)
        batches = [torch.randint(size.vocabulary, (size.batch, size.length + 1)) for _ in range(4)]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    live = counted(device, variant, module)
    times = StepTimes(args.warm_up, args.steps, live)
    callbacks: list[Callback] = [times]
    if variant.callback:
        # On a CPU saved tensors are on the host already: they go to a folder instead.
        to = {"to": "cpu"} if device.type == "cuda" else {"to": f"disk:{Path(args.result).parent}"}
        callbacks.append(getattr(importlib.import_module("lightning_hybrid.callbacks"), variant.callback)(**to))
    steps = args.warm_up + args.steps
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=1,
        strategy=strategy_of(variant, args.budget),
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **precision_of(variant, size),
    )
    loader = DataLoader([batches[i % 4] for i in range(steps)], batch_size=None)
    with live or contextlib.nullcontext():
        trainer.fit(module, loader)
    return figures(size, parameters, times, device)


def figures(size: Size, parameters: int, times: StepTimes, device: torch.device) -> dict[str, Any]:
    seconds = times.seconds()
    median = statistics.median(seconds)
    tokens = size.batch * size.length
    flops = 6 * parameters * tokens + 12 * size.layers * size.width * size.length * tokens
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    peak_tflops = next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
    tflops = flops / median / 1e12
    return {
        "device": name,
        "torch": torch.__version__,
        "parameters": parameters,
        "tokens_per_step": tokens,
        "precision": size.precision,
        "seconds": median,
        "seconds_of_steps": [round(each, 6) for each in seconds],
        "tokens_per_second": tokens / median,
        "tflops": tflops,
        "mfu": None if peak_tflops is None else tflops / peak_tflops,
        "peak_bytes": times.peak,
        "peak_bytes_of_warm_up": times.start_peak,
        "loss": times.loss,
    }


def run_here(args: argparse.Namespace) -> None:
    """Train one variant in this process; write its figures, or its error, into a file."""
    variant = BY_TITLE[args.run]
    size = (TINY if args.tiny else SIZES)[variant.size]
    if args.batch:
        size = Size(**{**size.__dict__, "batch": args.batch})
    try:
        result = train(variant, size, args)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(args.result).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(1 if "error" in result else 0)  # an exit that waits for nothing: the figures are written


# --- all variants, one after the other -------------------------------------------------------------------------------


def run_apart(variant: Variant, args: argparse.Namespace, budget: str, limit: float) -> dict[str, Any]:
    """Train a variant in a process of its own; returns its figures, or an error."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        command = [sys.executable, str(Path(__file__).resolve()), "--run", variant.title, "--result", str(result)]
        command += ["--accelerator", args.accelerator, "--budget", budget, "--warm-up", str(args.warm_up)]
        command += ["--steps", str(args.steps), "--batch", str(args.batch)] + ["--tiny"] * args.tiny
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait(limit)
                error = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                error = f"not finished in {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # its compile workers too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if args.verbose:
            print(log.read_text())
        found = json.loads(result.read_text()) if result.exists() else {"error": error}
        if "error" in found:
            found["log"] = log.read_text()[-4000:]
        return found


def budget_of(variant: Variant, results: dict[str, dict[str, Any]], share: float) -> str | None:
    """The budget for a variant, from the peaks that were measured; None without that of "none"."""
    none, full = (results.get(f"{variant.size} {name}", {}).get("peak_bytes") for name in ("none", "full"))
    if none is None:
        return None
    budget = share * none
    if full is not None and budget < full:
        budget = (none + full) / 2
    return f"{int(budget / 1024)}KiB"


def selected(args: argparse.Namespace) -> list[Variant]:
    """The variants to run; "none" is among them where a budget needs it, callbacks are where they exist."""
    callbacks = importlib.import_module("lightning_hybrid.callbacks")
    calls = {0: list(BY_TITLE.values()), 1: FIRST, 2: SECOND}
    chosen = [v for v in calls[args.call] if not args.only or v.title in args.only]
    needed = {f"{v.size} none" for v in chosen if v.name == "budget"}
    titles = {v.title for v in chosen} | needed
    return [v for v in BY_TITLE.values() if v.title in titles and (not v.callback or hasattr(callbacks, v.callback))]


def run_all(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    begin = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    for variant in selected(args):
        left = args.seconds - (time.monotonic() - begin)
        started = time.monotonic()
        budget: str | None = ""
        if (variant.options or {}).get("recompute") == "budget":
            budget = budget_of(variant, results, args.share)
        if left < LEAST_SECONDS:
            result: dict[str, Any] = {"error": f"not run: the {args.seconds:.0f} s of --seconds are used"}
        elif budget is None:
            result = {"error": 'not run: a budget needs the peak of "none", which was not measured'}
        else:
            result = run_apart(variant, args, budget, min(args.limit, left))
        result = {"variant": variant.title, "budget": budget or None, **result}
        result["seconds_of_process"] = round(time.monotonic() - started, 1)
        results[variant.title] = result
        print(row(result, results), flush=True)
        if args.out:
            with open(args.out, "a") as out:
                out.write(json.dumps(result) + "\n")
    return results


# --- the report ------------------------------------------------------------------------------------------------------

HEADER = (
    f"{'variant':30} {'ms/step':>9} {'of none':>8} {'tokens/s':>10} {'TFLOP/s':>8} {'MFU':>6} {'peak GiB':>9} "
    f"{'of none':>8} {'loss':>8} {'process s':>9}"
)


def row(result: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    title = result["variant"]
    if "error" in result:
        return f"{title:30} {' '.join(result['error'].split())[:200]}"
    none = results.get(f"{title.split()[0]} none", {})

    def over(key: str) -> str:
        return f"{result[key] / none[key]:.3f}" if none.get(key) and result[key] else "-"

    mfu = "-" if result["mfu"] is None else f"{result['mfu']:.1%}"
    peak = "-" if result["peak_bytes"] is None else f"{result['peak_bytes'] / GIB:.3f}"
    text = (
        f"{title:30} {1e3 * result['seconds']:9.2f} {over('seconds'):>8} {result['tokens_per_second']:10,.0f} "
        f"{result['tflops']:8.2f} {mfu:>6} {peak:>9} {over('peak_bytes'):>8} {result['loss']:8.4f} "
        f"{result['seconds_of_process']:9.1f}"
    )
    return text + (f"  budget {result['budget']}" if result["budget"] else "")


def print_report(results: dict[str, dict[str, Any]], accelerator: str) -> None:
    print(f"\n{HEADER}")
    for result in results.values():
        print(row(result, results))
    measured = [result for result in results.values() if "error" not in result]
    if measured:
        print(f"\n{measured[0]['device']}, torch {measured[0]['torch']}")
    for result in measured:
        size, name = result["variant"].split()
        none = results.get(f"{size} none", {})
        if accelerator == "gpu" and name == "host-states" and "seconds" in none:
            ratio = result["seconds"] / none["seconds"]
            print(f"{size}: states on the host {ratio:.3f} of none (1.25): {'reached' if ratio <= 1.25 else 'missed'}")
        if result["budget"] and result["peak_bytes"]:
            share = result["peak_bytes"] / 1024 / int(result["budget"].removesuffix("KiB"))
            reached = "reached" if 0.95 <= share <= 1 else "missed"
            print(f"{size}: peak {share:.4f} of the budget (0.95 to 1): {reached}")


def run_others(args: argparse.Namespace, end: float) -> None:
    """Run ring attention and the search for the largest model, until a time."""
    here = Path(__file__).resolve().parent
    small = ["--length", "256"] if args.tiny else []
    largest = ["--width", "64", "--layers", "2"] if args.tiny else []
    for name, options in (("gpu_ring.py", small), ("gpu_largest.py", [*largest, "--only", "optimizer_in_backward"])):
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{name}: not run: the {args.seconds:.0f} s of --seconds are used")
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            command = [sys.executable, str(here / name), "--accelerator", args.accelerator, *options]
            subprocess.run(command, timeout=left, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", nargs="+", choices=list(BY_TITLE), metavar="VARIANT", help="titles; see --list")
    parser.add_argument("--call", type=int, choices=(0, 1, 2), default=0, help="which variants; 0 for all")
    parser.add_argument("--list", action="store_true", help="print the titles of the variants, and end")
    parser.add_argument("--seconds", type=float, default=340, help="for all; what is left then is not run")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one variant")
    parser.add_argument("--share", type=float, default=0.6, help='of the peak of "none", as the budget')
    parser.add_argument("--tiny", action="store_true", help="models of toy size")
    parser.add_argument("--batch", type=int, default=0, help="sequences; 0 for 16 of 125M, and 8 of 1.3B")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15, help="that are measured")
    parser.add_argument("--out", help="a file to which each variant's figures are appended, a line of JSON each")
    parser.add_argument("--verbose", action="store_true", help="print what each process printed")
    for internal in ("--run", "--result", "--budget"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        print("\n".join(BY_TITLE))
    elif args.run:
        run_here(args)
    else:
        begin = time.monotonic()
        print(HEADER, flush=True)
        print_report(run_all(args), args.accelerator)
        if args.call == 2:
            run_others(args, begin + args.seconds)


if __name__ == "__main__":
    main()
