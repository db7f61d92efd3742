"""A step of a monitor is a batch, or accumulated ones, whatever optimizers step in it, as for the loggers."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.fits import trainer_of
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import (
    ActivationCompression,
    ExpertLoadMonitor,
    MemoryMonitor,
    PipelineTimeline,
    RunPlot,
    ThroughputMonitor,
)
from lightning_hybrid.experts.moe.layer import MoE
from models.regression import Manual

BATCHES = 6


class TwoOptimizers(Manual):
    """Steps both optimizers in each batch, one after the other, as a GAN does."""

    def __init__(self):
        super().__init__()
        self.experts, self.last = MoE(4, 8, num_experts=2, top_k=1), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward((self.last(self.experts(x)[0]) - y).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.experts, self.last)]


class Records(CSVLogger):
    """Keeps the numbers with their steps."""

    def __init__(self, folder):
        super().__init__(folder)
        self.seen = {}

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.seen.setdefault(name, {})[step] = float(value)


def fit(callback, folder, epochs=1, further=(), **options):
    ignore_warnings()
    torch.manual_seed(0)
    logger = Records(folder)
    x = torch.randn(BATCHES * 4 * dist.get_world_size(), 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    arguments = {"logger": logger, "max_epochs": epochs, "log_every_n_steps": 1, **options}
    trainer_of(dist.get_world_size(), Hybrid3DStrategy(), [callback, *further], **arguments).fit(
        TwoOptimizers(), loader
    )
    return logger.seen


@pytest.mark.world(2)
def test_messages_are_counted_over_one_batch_at_each_logged_step(tmp_path):
    sent = {}
    for every in (1, 2, 3):
        seen = fit(ThroughputMonitor(window_size=2), tmp_path, log_every_n_steps=every)
        sent[every] = seen.get("train/sent_bytes/data", {})
    if dist.get_rank():
        return
    for every, values in sent.items():
        assert list(values) == list(range(every - 1, BATCHES, every))  # as Lightning numbers them, from 0
        assert list(values.values()) == pytest.approx([sent[1][1]] * len(values), abs=100)  # flags of gradients
    parameters = sum(p.nbytes for p in TwoOptimizers().parameters())
    assert 2 * parameters <= sent[1][1] < 3 * parameters  # two backwards


@pytest.mark.world(2)
def test_each_monitor_measures_the_steps_that_were_requested(tmp_path):
    memory = MemoryMonitor(step=2, every_n_steps=2)
    fit(memory, tmp_path)
    loads = ExpertLoadMonitor(every_n_steps=4)
    fit(loads, tmp_path)
    plot = RunPlot(tmp_path / "run.svg")
    fit(plot, tmp_path)
    timeline = PipelineTimeline(tmp_path / "timeline.svg", step=3)
    fit(timeline, tmp_path)
    assert loads.history.steps == [4, 6]
    assert plot.steps == [1, 2, 3, 4, 5, 6]
    if dist.get_rank() == 0:
        assert [step for step, _ in memory.series["memory/peak"]] == [2, 4, 6]
        assert (tmp_path / "timeline.svg").exists()


@pytest.mark.world(1)
def test_compression_is_measured_every_n_steps_of_the_run(tmp_path):
    """Not of each epoch, whose batches are counted anew."""
    measured = []

    class Watched(ActivationCompression):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            before = trainer.strategy.run.activations.error._number
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            measured.append(trainer.strategy.run.activations.error._number > before)

    fit(Watched(min_bytes=16, every_n_steps=4), tmp_path, epochs=2)
    assert [step for step, is_measured in enumerate(measured, 1) if is_measured] == [1, 5, 9]


@pytest.mark.world(2)
def test_one_rank_that_stops_does_not_wait_for_the_others(tmp_path):
    """Lightning logs its step, whatever the number is; all ranks stop after the same batch."""

    class Stops(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1 and dist.get_rank() == 0:
                trainer.should_stop = True

    fit(ThroughputMonitor(window_size=2), tmp_path, further=[Stops()], log_every_n_steps=50)
