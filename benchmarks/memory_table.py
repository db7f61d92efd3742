"""Memory of one model under each technique: the table in docs/memory.md.

    PYTHONPATH=. python benchmarks/memory_table.py                 all rows, as Markdown
    PYTHONPATH=. python benchmarks/memory_table.py --only "two stages" "zero_stage=3"

A GPT of 8 layers of width 256 with a vocabulary of 4,096 and AdamW trains 4 steps of 16 sequences of 256 tokens on CPU
ranks. `MemoryMonitor` measures the fourth. Each row is a Trainer of its own; figures are those of the rank with the
highest peak, in MiB (2^20 bytes). The global batch is the same in all rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from small_gpt import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

WIDTH, LAYERS, HEADS, LENGTH, VOCABULARY, BATCH, STEPS = 256, 8, 4, 256, 4096, 16, 4
MIB = 2.0**20
COLUMNS = ("parameters", "gradients", "optimizer_states", "rest", "peak")


class GPT(LightningModule):
    """GPT whose head is not tied to the embedding."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        text = batch[:, :-1]
        x = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-3)


def adamw_8bit(parameters: Any) -> torch.optim.Optimizer:
    return importlib.import_module("torchao.optim").AdamW8bit(parameters, lr=1e-4)


@dataclass(frozen=True)
class Row:
    """A technique: the arguments of the strategy and the Trainer by which it is chosen."""

    title: str
    devices: int = 1
    options: dict[str, Any] | None = field(default_factory=dict)  # None: Lightning alone
    trainer: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)  # arguments of HybridPrecision
    callback: tuple[str, dict[str, Any]] | None = None  # of lightning_hybrid.callbacks
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw


ROWS = [
    Row("Lightning alone", options=None),
    Row("`num_microbatches=4`", options={"num_microbatches": 4}),
    Row('`recompute="selective"`', options={"recompute": "selective"}),
    Row('`recompute="full"`', options={"recompute": "full"}),
    Row('`recompute="500MiB"`', options={"recompute": "500MiB"}),
    Row("`ActivationOffload()` to a file", callback=("ActivationOffload", {"to": "disk:{folder}"})),
    Row("`ActivationCompression(bits=8)`", callback=("ActivationCompression", {"bits": 8})),
    Row("`optimizer_in_backward=True`", options={"optimizer_in_backward": True}),
    Row('`offload={"optimizer_states": "disk:..."}`', options={"offload": {"optimizer_states": "disk:{folder}"}}),
    Row('`precision="bf16-true"`', trainer={"precision": "bf16-true"}),
    Row("`bf16-true`, `master_weights=True`", precision={"precision": "bf16-true", "master_weights": True}),
    Row("`bf16-true`, `stochastic_rounding=True`", precision={"precision": "bf16-true", "stochastic_rounding": True}),
    Row("`torch.optim.Adafactor`", optimizer=adafactor),
    Row("`torchao.optim.AdamW8bit`", optimizer=adamw_8bit),
    Row("`chunked_loss=True`", options={"chunked_loss": True}),
    Row(
        '`recompute="full"`, `chunked_loss=True`, `optimizer_in_backward=True`',
        options={"recompute": "full", "chunked_loss": True, "optimizer_in_backward": True},
    ),
    Row("two replicas", devices=2),
    Row("two replicas, `zero_stage=1`", devices=2, options={"zero_stage": 1}),
    Row("two replicas, `zero_stage=2`", devices=2, options={"zero_stage": 2}),
    Row("two replicas, `zero_stage=3`", devices=2, options={"zero_stage": 3}),
    Row(
        "two replicas, `zero_stage=3, reshard_after_forward=True`",
        devices=2,
        options={"zero_stage": 3, "reshard_after_forward": True},
    ),
    Row("two stages, 4 microbatches", devices=2, options={"pipeline_parallel_size": 2, "num_microbatches": 4}),
    Row("two tensor ranks", devices=2, options={"tensor_parallel_size": 2}),
    Row("two context ranks", devices=2, options={"context_parallel_size": 2}),
]


def filled(value: Any, folder: str) -> Any:
    """The value with the folder in the place of "{folder}"."""
    if isinstance(value, dict):
        return {key: filled(each, folder) for key, each in value.items()}
    return value.replace("{folder}", folder) if isinstance(value, str) else value


def train(row: Row, folder: str) -> list[dict[str, int]]:
    """Train by the row's Trainer; returns the bytes of each rank by kind."""
    callbacks = importlib.import_module("lightning_hybrid.callbacks")
    seed_everything(1, verbose=False)
    monitor = callbacks.MemoryMonitor(step=STEPS)
    added = [] if row.callback is None else [getattr(callbacks, row.callback[0])(**filled(row.callback[1], folder))]
    arguments = dict(row.trainer)
    if row.options is not None:
        strategy = importlib.import_module("lightning_hybrid").Hybrid3DStrategy
        arguments["strategy"] = strategy(**filled(row.options, folder))
    if row.precision:
        arguments["plugins"] = [importlib.import_module("lightning_hybrid").HybridPrecision(**row.precision)]
    trainer = Trainer(
        accelerator="cpu",
        devices=row.devices,
        max_steps=STEPS,
        callbacks=[monitor, *added],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        **arguments,
    )
    replicas = 1 if row.options is None else row.devices
    for name in ("pipeline_parallel_size", "tensor_parallel_size", "context_parallel_size"):
        replicas //= (row.options or {}).get(name, 1)
    text = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH + 1))
    trainer.fit(GPT(row.optimizer), DataLoader(text, batch_size=BATCH // replicas))
    return monitor.measured


def run_apart(script: str, title: str) -> Any:
    """Run a script with ``--run TITLE --result FILE`` in a process of its own; returns the content of the file."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, str(Path(script).resolve()), "--run", title, "--result", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if not result.exists():
            raise RuntimeError(f"{title} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="parts of the titles of rows")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        row = next(row for row in ROWS if row.title == args.run)
        Path(args.result).write_text(json.dumps(train(row, str(Path(args.result).parent))))
        return
    print("| technique | ranks | parameters | gradients | states | rest | peak |\n|---|---|---|---|---|---|---|")
    for row in ROWS:
        if args.only and not any(part in row.title for part in args.only):
            continue
        highest = max(run_apart(__file__, row.title), key=lambda sizes: sizes["peak"])
        figures = " | ".join(f"{highest[kind] / MIB:.1f}" for kind in COLUMNS)
        print(f"| {row.title} | {row.devices} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
