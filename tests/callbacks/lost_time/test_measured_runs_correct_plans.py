"""A run on two ranks leaves measured costs, by which the command `plan` predicts its layout as it was measured."""

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import MemoryMonitor, PipelineTimeline
from lightning_hybrid.callbacks.lost_time.files import path_of_measured_costs
from lightning_hybrid.callbacks.timeline import ModelAndMemory
from lightning_hybrid.cli import main
from lightning_hybrid.predict.costs.module import costs_from_parameters
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import PlanLayout, number_format_of
from lightning_hybrid.predict.search import predict_plan
from lightning_hybrid.schedule.measured.seconds import load_measured_costs
from lightning_hybrid.text import timed
from models.command_line_classes import Stack

MODULE = str(Path(__file__).parents[2] / "models" / "command_line_classes.py")


def train(folder, plan=None):
    """Two stages of two microbatches; the steps 4, 5 and 6 are measured."""
    module = Stack()
    timeline = PipelineTimeline(f"{folder}/timeline.svg", step=4, every_n_steps=1)
    callbacks = [timeline, MemoryMonitor(step=2), ModelCheckpoint(folder)]
    strategy = Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=2)
    strategy.predicted_plan = plan
    trainer = trainer_of(2, strategy, callbacks, max_epochs=-1, max_steps=6, enable_checkpointing=True)
    messages = []
    with mock.patch("lightning_hybrid.callbacks.timeline.rank_zero_info", messages.append):
        trainer.fit(module)
    return [row["peak"] for row in callbacks[1].measured], messages


def plan_of(capsys, *arguments):
    status = main(["plan", *arguments, "--hardware", "cpu", "--devices", "2", "--batch", "8", "--json"])
    assert status == 0
    return json.loads(capsys.readouterr().out)


def predicted_by_hand():
    shapes = {name: tuple(parameter.shape) for name, parameter in Stack().named_parameters()}
    costs, layout = costs_from_parameters(shapes), PlanLayout(pipeline=2, microbatch=4, batch=8)
    return predict_plan(costs, layout, number_format_of("32-true"), load_hardware("cpu"))


def test_the_measured_layout_is_predicted_as_measured(worlds, tmp_path, capsys):
    plan = predicted_by_hand()
    (peaks, messages), _ = worlds.run(2, train, str(tmp_path), plan)
    measured = load_measured_costs(tmp_path)
    assert measured.steps == (4, 5, 6) and measured.first_step == 1 and measured.batch_size == 8
    assert measured.peak_memory == tuple(peaks)
    seconds = statistics.median(step.step_seconds for step in measured.step_times)
    [printed] = [message for message in messages if "the error of the prediction is" in message]
    assert (
        f"predicted {timed(plan.time.seconds)} ± {plan.time_error:.0%} of a step, measured {timed(seconds)}: "
        in printed
    )

    content = plan_of(capsys, f"{MODULE}:Stack", "--measured", str(tmp_path), "--why", "pp=2,m=2")
    found = content["why"]
    assert found["fields"]["pipeline"] == 2 and found["fields"]["microbatch"] == 4
    [note] = [note for note in content["model"]["notes"] if "measured" in note]
    assert note.startswith(f"predictions are corrected by the measured costs of {tmp_path}: "), note
    assert found["seconds"] == pytest.approx(seconds, rel=1e-6)
    tensors = [sum(size for name, size in rank.items() if name != "framework") for rank in found["memory_of_ranks"]]
    assert max(tensors) == pytest.approx(max(peaks), rel=1e-6)

    other = plan_of(capsys, f"{MODULE}:Mixture", "--measured", str(tmp_path))
    [note] = [note for note in other["model"]["notes"] if "measured" in note]
    assert "are not used: the measured Stack has" in note and "and the planned Mixture has" in note
    without = plan_of(capsys, f"{MODULE}:Mixture")
    assert other["plans"] == without["plans"]


def test_file_of_a_run_that_begins(tmp_path):
    """Its folder of checkpoints is known where the user has set it, or where there is no logger."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "measured_costs.json").write_text("")

    def path(callbacks, **options):
        trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", callbacks=callbacks, **options)
        return path_of_measured_costs(trainer)

    assert path(ModelCheckpoint(checkpoints)) == checkpoints / "measured_costs.json"
    assert path(None, logger=False) == checkpoints / "measured_costs.json"
    assert path(None, logger=False, enable_checkpointing=False) is None
    assert path(ModelCheckpoint(tmp_path)) is None
    resumed = Trainer(default_root_dir=tmp_path / "other", accelerator="cpu", logger=False)
    assert path_of_measured_costs(resumed) is None
    resumed.ckpt_path = str(checkpoints / "last.ckpt")
    assert path_of_measured_costs(resumed) == checkpoints / "measured_costs.json"


def test_model_without_known_parameters():
    model = ModelAndMemory()
    model.describe(torch.nn.LazyLinear(3))
    assert model.model == {"name": "LazyLinear"}
    model.describe(torch.nn.Linear(4, 3))
    assert model.model["parameters"] == 15 and model.model["names_checksum"]
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), callbacks=[])
    model.begin_step(trainer)
    model.end_step(trainer, (torch.zeros(8, 5), torch.zeros(8)))
    assert model.fields(trainer)["peak_memory"] == () and model.model["sample_elements"] == 6
    model.end_step(trainer, {"no": "tensors"})
    assert model.model["sample_elements"] == 6


def test_peak_of_a_gpu_is_that_of_the_measured_step(monkeypatch):
    """Without a monitor of memory."""
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda:0")), callbacks=[])
    model = ModelAndMemory()
    model.end_step(trainer, torch.zeros(2, 2))  # of a step that did not begin as a measured one
    assert model.peaks == () and not resets
    model.begin_step(trainer)
    model.end_step(trainer, torch.zeros(2, 2))
    assert model.fields(trainer)["peak_memory"] == (123,) and len(resets) == 1
