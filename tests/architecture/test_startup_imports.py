"""Rooms that a run does not use are not imported: the start of each rank costs what the run asks for."""

import json
import subprocess
import sys

MOST_MODULES = 290  # of 690; of a run on two replicas
UNUSED_ROOMS = {"tensor", "experts", "verify", "slow_links", "cli", "equivalence"}
UNUSED = (
    "params.reads",
    "predict.search",
    "predict.time",
    "pipeline.staged",
    "step.recording.record_step",
)

PROGRAM = """
import json, sys
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_hybrid

class Report(pl.Callback):
    def on_train_end(self, trainer, module):
        ours = [name for name in sys.modules if name.startswith("lightning_hybrid.")]
        if trainer.global_rank == 0:
            print(json.dumps([ours, "torch.distributed.checkpoint" in sys.modules]))

trainer = pl.Trainer(
    strategy="hybrid3d_fork", devices=2, accelerator="cpu", max_steps=1, callbacks=[Report()], logger=False,
    limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(BoringModel())
"""


def test_two_replicas_import_no_room_that_they_do_not_use():
    run = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    ours, has_torch_checkpoints = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("[[")))
    names = [name.removeprefix("lightning_hybrid.") for name in ours]
    assert not [name for name in names if name.split(".")[0] in UNUSED_ROOMS or name.startswith(UNUSED)]
    assert len(names) < MOST_MODULES and not has_torch_checkpoints
