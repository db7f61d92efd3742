"""Rooms that a run does not use are not imported: the start of each rank costs what the run asks for."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_hybrid"
MOST_MODULES = 290  # of 690; of a run on two replicas
UNUSED_ROOMS = {"tensor", "experts", "verify", "slow_links", "cli", "equivalence"}
UNUSED = (
    "params.reads",
    "predict.search",
    "predict.time",
    "pipeline.staged",
    "step.recording.record",
)
UNUSED_BY_STAGES = ("tensor", "experts", "logits", "verify", "cli", "zero", "predict.search")

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
    strategy=lightning_hybrid.Hybrid3DStrategy(start_method="fork", **json.loads(sys.argv[1])), devices=2,
    accelerator="cpu", max_steps=1, callbacks=[Report()], logger=False,
    limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
module = BoringModel()
module.layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 2))
trainer.fit(module)
"""


def imported(**options):
    """The modules that a run of two ranks has imported, and whether torch's checkpoints are among them."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    line = next(line for line in run.stdout.splitlines() if line.startswith("[["))
    (ours, has_torch_checkpoints), _ = json.JSONDecoder().raw_decode(line)  # another rank may print behind it
    return [name.removeprefix("lightning_hybrid.") for name in ours], has_torch_checkpoints


def test_two_replicas_import_no_room_that_they_do_not_use():
    names, has_torch_checkpoints = imported()
    assert not [name for name in names if name.split(".")[0] in UNUSED_ROOMS or name.startswith(UNUSED)]
    assert len(names) < MOST_MODULES and not has_torch_checkpoints


def test_two_stages_import_no_technique_that_they_do_not_use():
    names, _ = imported(pipeline_parallel_size=2)
    assert "pipeline.staged" in names
    assert not [name for name in names if name.startswith(UNUSED_BY_STAGES)]


def test_what_must_not_be_imported_exists():
    for name in (*UNUSED_ROOMS, *UNUSED, *UNUSED_BY_STAGES):
        path = PACKAGE / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


REFERENCE = """
import sys
from models.regression import Dropping, regression_data
from lightning_hybrid.verify import Experiment, Layout
from lightning_hybrid.verify.references import data_split_of, run_pieces, run_plain

experiment = Experiment(make_module=Dropping, make_data=regression_data, steps=1)
split = data_split_of(experiment, Layout("dp2 x pp2", 4, {"pipeline_parallel_size": 2}))
plain = run_plain(experiment, split)
pieces = run_pieces(experiment, split, plain, False, False)
assert plain.draws and plain.observed.checkpoint and pieces.failure is None
runners = "pipeline", "run", "strategies", "techniques", "zero", "tensor", "checkpoint.convert"
print([name for name in sys.modules if name.startswith(tuple(f"lightning_hybrid.{room}" for room in runners))])
"""


def test_a_reference_runs_without_the_runner():
    """Nor is any of it imported while the reference runs."""
    command, environment = [sys.executable, "-c", REFERENCE], {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert run.stdout.splitlines()[-1] == "[]"
