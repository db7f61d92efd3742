"""How long training stands still for a checkpoint: one file, a folder, and a folder that is written beside training.

    python benchmarks/checkpoint.py

A GPT over two stages, with AdamW. In one run of a real Trainer the three kinds take turns, a step between them;
a checkpoint that is written beside training is waited for before the next turn, and how long that takes is shown too.
Seconds are those of `trainer.save_checkpoint` on the first rank, barrier included.

Must be reached: a folder beside training blocks for less than 0.15 of what the folder takes that training waits for.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import Result, quartiles, ratios, verdict
from small_gpt import SmallGPT, batch_of
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy

RANKS = 2
KINDS = {"one file": (False, False), "folder": (True, False), "folder beside training": (True, True)}


class Turns(Callback):
    """Saves after each step, in one way after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocked: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.behind: list[float] = []
        self.steps: list[float] = []
        self.bytes: dict[str, int] = {}
        self._begin = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.steps.append(time.perf_counter() - self._begin)
        strategy: Any = trainer.strategy
        kind = list(KINDS)[batch_idx % len(KINDS)]
        path = self.folder / f"{kind.replace(' ', '-')}.ckpt"
        saves_folder, saves_beside = KINDS[kind]
        files = strategy._files
        files._options = dataclasses.replace(
            files._options, save_distributed_checkpoint=saves_folder, async_checkpoint=saves_beside
        )
        connector = trainer._checkpoint_connector
        given = files.local_state if saves_folder else strategy.lightning_module_state_dict
        connector._get_lightning_module_state_dict = given
        strategy.barrier()
        begin = time.perf_counter()
        trainer.save_checkpoint(path)
        end = time.perf_counter()
        files.wait()
        strategy.barrier()
        self.blocked[kind].append(end - begin)
        if saves_beside:
            self.behind.append(time.perf_counter() - end)
        if trainer.is_global_zero:
            files = path.iterdir() if path.is_dir() else [path]
            self.bytes[kind] = sum(file.stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9, help="without the first, which is not counted")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder if none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = Hybrid3DStrategy(
        pipeline_parallel_size=RANKS, num_microbatches=2, save_distributed_checkpoint=True, async_checkpoint=True
    )
    folder = Path(args.folder or tempfile.gettempdir()) / "hybrid3d-benchmark-checkpoint"
    turns = Turns(folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=1,
    )
    model = SmallGPT(args.width, args.layers, length=32)
    batches = [batch_of(2, 32)] * (len(KINDS) * (args.rounds + 1))
    trainer.fit(model, DataLoader(batches, batch_size=None))
    if not trainer.is_global_zero:
        return
    shutil.rmtree(folder, ignore_errors=True)
    results = [Result(kind, wall=seconds[1:]) for kind, seconds in turns.blocked.items()]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{num_parameters / 1e6:.1f} million parameters, {args.rounds} rounds; seconds blocked: median [quartiles]")
    for result in results:
        low, middle, high = quartiles(result.wall)
        print(f"  {result.name:24} {middle:7.3f} [{low:.3f} {high:.3f}]  {turns.bytes[result.name] / 1e6:.0f} MB")
    low, middle, high = quartiles(turns.behind[1:])
    print(f"  {'written behind it in':24} {middle:7.3f} [{low:.3f} {high:.3f}]; a training step takes", end=" ")
    print(f"{quartiles(turns.steps)[1]:.3f}")
    one_file, folders, beside = results
    verdict("blocked, folder beside training / folder", ratios(beside.wall, folders.wall), at_most=0.15)
    low, middle, high = ratios(folders.wall, one_file.wall)
    print(f"  folder / one file: {middle:.3f} [{low:.3f} {high:.3f}]")


if __name__ == "__main__":
    main()
