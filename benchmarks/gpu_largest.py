"""The largest GPT that trains on one GPU, by technique: layers of width 4,096 are added until memory runs out.

    PYTHONPATH=. python benchmarks/gpu_largest.py --out /tmp/largest.jsonl

One sequence of 1,024 tokens, bf16-true, AdamW, three optimizer steps. Each size is tried in a process of its own, at
first the one that the bytes per parameter let expect; then 6 % more layers while it trains, or fewer until it does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu import GIB, GPT
from gpu_variants import Size
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

WIDTH, HEADS, LENGTH, VOCABULARY, STEPS = 4096, 32, 1024, 50304, 3
LAYER = 12 * WIDTH**2  # parameters
RESERVE = 4 * GIB  # of the device: activations, logits, context of CUDA


@dataclass(frozen=True)
class Technique:
    """How a model is trained, and the bytes that a parameter takes on the device and on the host."""

    title: str
    options: dict[str, Any] | None
    device_bytes: float
    host_bytes: float = 0


TECHNIQUES = [
    Technique("Lightning alone", None, 8),
    Technique("recompute=full, optimizer_in_backward", {"recompute": "full", "optimizer_in_backward": True}, 6),
    Technique(
        "the same, optimizer states on the host",
        {"recompute": "full", "optimizer_in_backward": True, "offload": {"optimizer_states": "cpu"}},
        2,
        4.4,
    ),
]


class Seconds(Callback):
    """When each step has finished."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def train(technique: Technique, layers: int, accelerator: str, width: int) -> dict[str, Any]:
    """Train a model of this number of layers here; returns its figures."""
    seed_everything(1, verbose=False)
    size = Size(layers, width, HEADS, batch=1, precision="bf16-true", length=LENGTH, vocabulary=VOCABULARY)
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    with device:
        torch.set_default_dtype(torch.bfloat16)
        module = GPT(size)
        torch.set_default_dtype(torch.float32)
        text = [torch.randint(VOCABULARY, (1, LENGTH + 1)) for _ in range(STEPS)]
    strategy: Any = "auto"
    if technique.options is not None:
        from lightning_hybrid import Hybrid3DStrategy

        strategy = Hybrid3DStrategy(**technique.options)
    seconds = Seconds()
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=strategy,
        precision="bf16-true",
        max_steps=STEPS,
        callbacks=[seconds],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(text, batch_size=None))
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "seconds": seconds.ends[-1] - seconds.ends[-2],
        "peak_bytes": torch.cuda.max_memory_allocated() if accelerator == "gpu" else None,
    }


def try_apart(technique: Technique, layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train in a process of its own; returns its figures, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        command = [sys.executable, __file__, "--run", technique.title, "--layers", str(layers), "--result", str(result)]
        command += ["--accelerator", args.accelerator, "--width", str(args.width)]
        with log.open("w") as output:
            try:
                subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=args.limit)
            except subprocess.TimeoutExpired:
                return {"error": f"not finished in {args.limit:.0f} s"}
        lines = log.read_text().strip().splitlines() or ["no output"]
        reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return json.loads(result.read_text()) if result.exists() else {"error": reason[:200]}


def expected_layers(technique: Technique, device_bytes: int, host_bytes: int) -> int:
    """The number of layers whose parameters fill the device, or the host."""
    fits = (device_bytes - RESERVE) / technique.device_bytes
    if technique.host_bytes:
        fits = min(fits, 0.8 * host_bytes / technique.host_bytes)
    return max(1, int((fits - VOCABULARY * WIDTH) / LAYER))


def find_largest(technique: Technique, start: int, args: argparse.Namespace) -> None:
    """Print each try, and append it to the file of ``--out``."""
    layers, step, trained = start, max(1, round(0.06 * start)), None
    while layers > 0:
        found = {"technique": technique.title, "layers": layers, **try_apart(technique, layers, args)}
        print(json.dumps(found), flush=True)
        if args.out:
            with open(args.out, "a") as out:
                out.write(json.dumps(found) + "\n")
        has_trained = "error" not in found
        if trained is not None and trained != has_trained:
            return  # the border is between the last two
        trained, layers = has_trained, layers + (step if has_trained else -step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", nargs="+", help="parts of the titles of techniques")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one try")
    parser.add_argument("--layers", type=int, default=0, help="at first; 0 for the number that memory lets expect")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--out")
    for internal in ("--run", "--result"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        technique = next(each for each in TECHNIQUES if each.title == args.run)
        Path(args.result).write_text(json.dumps(train(technique, args.layers, args.accelerator, args.width)))
        return
    device_bytes = torch.cuda.mem_get_info()[1] if args.accelerator == "gpu" else 4 * int(GIB)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for technique in TECHNIQUES:
        if not args.only or any(part in technique.title for part in args.only):
            find_largest(technique, args.layers or expected_layers(technique, device_bytes, host_bytes), args)


if __name__ == "__main__":
    main()
