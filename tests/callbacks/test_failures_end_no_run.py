"""A table, a picture, an estimate or a monitor that fails is a warning: made to fail one after the other."""

import warnings
from unittest import mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy, soft_failures
from lightning_hybrid.callbacks import ExpertLoadMonitor, GoodputMonitor, MemoryMonitor, PipelineTimeline, RunPlot
from lightning_hybrid.callbacks.monitors.throughput import ThroughputMonitor
from lightning_hybrid.experts.moe.layer import MoE
from models.regression import Sequential

CALLBACKS, DESCRIPTION = "lightning_hybrid.callbacks.", "lightning_hybrid.run.description."
MONITORS = f"{CALLBACKS}monitors."
FAIL = {
    f"{DESCRIPTION}table.describe_run": "the start table",
    f"{DESCRIPTION}table.memory_of_stages": "the estimated memory",
    f"{DESCRIPTION}monitors._flops_per_sample": "the FLOPs of a step",
    f"{DESCRIPTION}monitors.memory_of_stages": "the estimated memory of a rank",
    "lightning_hybrid.run.execution.steps.bytes_saved_behind": "the measured size",
    f"{CALLBACKS}actions.Timeline": "the record of a step",
    f"{CALLBACKS}pictures.write_picture": "PipelineTimeline",
    f"{CALLBACKS}timeline.batch_size_of": "PipelineTimeline",
    f"{CALLBACKS}timeline.write_lost_time": "PipelineTimeline",
    f"{CALLBACKS}timeline.write_measured_costs": "the file of measured costs",
    f"{CALLBACKS}timeline.elements_per_sample": "the file of measured costs",
    f"{CALLBACKS}timeline.checksum_of_names": "PipelineTimeline",
    f"{CALLBACKS}lost_time.steps.MeasuredSteps.proposal": "the proposal of other pipeline_cuts",
    f"{CALLBACKS}plot.batch_size_of": "RunPlot",
    f"{CALLBACKS}plot.logged_panels": "RunPlot",
    f"{MONITORS}throughput.batch_size_of": "ThroughputMonitor",
    f"{MONITORS}throughput.keep_series": "ThroughputMonitor",
    f"{MONITORS}throughput.StepFlopCounter.start": "ThroughputMonitor",
    "lightning_hybrid.step.standins.counts._flops_of_kernel": "the number of FLOPs",
    f"{MONITORS}memory.find_holders": "MemoryMonitor",
    f"{MONITORS}memory.PeakMeter.stop": "MemoryMonitor",
    f"{MONITORS}memory.memory_table": "MemoryMonitor",
    f"{MONITORS}goodput.batch_size_of": "GoodputMonitor",
    f"{MONITORS}goodput._draw": "GoodputMonitor",
    f"{CALLBACKS}expert_load._of_report": "ExpertLoadMonitor",
    f"{CALLBACKS}expert_load.entropy_of_load": "ExpertLoadMonitor",
    f"{CALLBACKS}expert_load.draw_loads": "ExpertLoadMonitor",
}


class Experts(Sequential):
    def __init__(self):
        super().__init__()
        self.experts = MoE(4, 8, num_experts=2, top_k=1)

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        return super().training_step((self.experts(x)[0], y))


class Fails(Exception):
    pass


def fails(*_, **__):
    raise Fails("on purpose")


def fit(folder, world_size=1, draws=""):
    """Parameters after a fit with all monitors, and the warnings; pictures that take long are drawn if asked for."""
    torch.manual_seed(0)
    module = Experts()
    x = torch.randn(32, 4)
    monitors = [
        PipelineTimeline(folder / "timeline.svg", step=2, every_n_steps=1, rebalance=True),
        ThroughputMonitor(window_size=2),
        MemoryMonitor(),
        GoodputMonitor(folder / "goodput.svg" if "goodput" in draws else None),
        ExpertLoadMonitor(folder / "experts.svg" if "draw_loads" in draws else None, every_n_steps=2),
        RunPlot(folder / "run.svg"),
    ]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = trainer_of(
            world_size,
            Hybrid3DStrategy(),
            monitors,
            accumulate_grad_batches=2,
            log_every_n_steps=2,
            logger=CSVLogger(folder),
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4))
    return [p.detach().clone() for p in module.parameters()], [str(each.message) for each in seen]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    parameters, seen = fit(tmp_path_factory.mktemp("undisturbed"))
    assert not [text for text in seen if "the run goes on without" in text]
    return parameters


@pytest.mark.parametrize("what", FAIL)
def test_what_fails_is_one_warning(tmp_path, monkeypatch, undisturbed, what):
    monkeypatch.setattr(RunPlot, "_draw", lambda *_: mock.Mock())
    monkeypatch.setattr(what, fails)
    monkeypatch.setattr(soft_failures, "_warned", set())
    parameters, seen = fit(tmp_path, draws=what)
    assert all(map(torch.equal, parameters, undisturbed))
    found = [text for text in seen if "the run goes on without: Fails: on purpose" in text]
    assert found and found[0].startswith(FAIL[what]), found
    assert len(found) == len(set(found)), "the same warning twice"


def fit_where_one_rank_fails(folder, rank):
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == rank:
            for name in ("memory.find_holders", "throughput.batch_size_of"):
                patch.setattr(f"{MONITORS}{name}", fails)
            patch.setattr(f"{CALLBACKS}plot.find_loss", fails)
        return [text for text in fit(folder, 2)[1] if "on purpose" in text]


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_waits_for_one_that_fails(worlds, tmp_path, rank):
    found = worlds.run(2, fit_where_one_rank_fails, tmp_path, rank, timeout=120)
    assert [bool(texts) for texts in found] == [number == rank for number in range(2)], found
