"""GoodputMonitor: the noise scale of a known quadratic, equal under layouts; efficiency and advice."""

import pickle

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.fits import trainer_of
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import AdaScale, GoodputMonitor
from lightning_hybrid.callbacks.monitors.goodput import GoodputRow

SINGLE, SAMPLES, DIM = 2, 64, 4


class Quadratic(LightningModule):
    """The loss of a sample x is |theta - x|^2 / 2, with theta in two layers; a rate of 0 keeps it where it is."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(1, DIM // 2, bias=False), nn.Linear(1, DIM // 2, bias=False)
        nn.init.ones_(self.left.weight)
        nn.init.ones_(self.right.weight)

    def training_step(self, batch, batch_idx=0):
        (x,) = batch
        one = torch.ones(len(x), 1, dtype=x.dtype)
        halves = self.left(one) - x[:, : DIM // 2], self.right(one) - x[:, DIM // 2 :]
        return sum(half.square().sum(1).mean() for half in halves) / 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Records(CSVLogger):
    def log_metrics(self, metrics, step=None):
        self.seen = {**getattr(self, "seen", {}), **metrics}


def data():
    return torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def expected_noise_scale(single_batches):
    """From the means of single batches, step by step: unbiased estimates, averaged over the steps, in samples."""
    steps = data().view(-1, single_batches, SINGLE, DIM)
    gradients = 1 - steps.mean(2)  # [steps, single batches, parameters]
    small, large = gradients.square().sum(2).mean(1), gradients.mean(1).square().sum(1)
    variance = (small - large) * single_batches / (single_batches - 1)  # of the gradient of a single batch
    square = large - variance / single_batches
    # As AdaScale's, estimates are clipped and averaged with weights of the past.
    smoothing, weights = 1 - single_batches / 1000, torch.zeros(len(steps), dtype=torch.float64)
    for step in range(len(steps)):
        weights *= smoothing
        weights[step] = 1 - smoothing
    mean = lambda values: (weights * values.clamp(min=0)).sum()  # noqa: E731
    return float(SINGLE * mean(variance) / mean(square))


def fit(devices, options, accumulated, folder, monitor=None, further=()):
    ignore_warnings()
    monitor, logger = monitor or GoodputMonitor(base_batch_size=1), Records(folder)
    samples = data()
    if devices > 1 and "pipeline_parallel_size" not in options:  # replica r has the r-th single batch of each step
        samples = samples.view(-1, devices, SINGLE, DIM)[:, dist.get_rank()].reshape(-1, DIM)
    loader = DataLoader(TensorDataset(samples), batch_size=SINGLE)
    strategy = Hybrid3DStrategy(**options)
    trainer = trainer_of(
        devices,
        strategy,
        [monitor, *further],
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulated,
        use_distributed_sampler=False,
    )
    trainer.fit(Quadratic().double(), loader)
    return monitor.rows, getattr(logger, "seen", {})


@pytest.mark.parametrize("accumulated", [2, 4])
def test_noise_scale_of_a_quadratic(tmp_path, accumulated):
    monitor = GoodputMonitor(tmp_path / "goodput.svg", base_batch_size=1)
    rows, seen = fit(1, {}, accumulated, tmp_path, monitor)
    batch, noise = SINGLE * accumulated, expected_noise_scale(accumulated)
    assert rows[-1].noise_scale == pytest.approx(noise)
    assert rows[-1].batch_size == batch and len(rows) == SAMPLES / batch
    assert seen["goodput/noise_scale"] == pytest.approx(noise)
    assert seen["goodput/efficiency"] == pytest.approx((noise + 1) / (noise + batch))
    assert seen["goodput/goodput"] == pytest.approx(seen["goodput/samples_per_sec"] * seen["goodput/efficiency"])
    assert seen["goodput/gain_of_doubling"] == pytest.approx(2 * (noise + batch) / (noise + 2 * batch))
    assert (tmp_path / "goodput.svg").exists()
    assert pickle.loads(pickle.dumps(monitor)).rows == rows


LAYOUTS = [(2, {}, 1), (2, {"zero_stage": 3}, 1), (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}, 2)]


@pytest.mark.parametrize(("devices", "options", "accumulated"), LAYOUTS, ids=str)
def test_noise_scale_is_equal_under_layouts(worlds, tmp_path, devices, options, accumulated):
    rows, _ = worlds.run(devices, fit, devices, options, accumulated, str(tmp_path))[0]
    assert rows[-1].noise_scale == pytest.approx(expected_noise_scale(2))
    assert rows[-1].batch_size == 2 * SINGLE


def test_a_larger_batch_stops_paying_at_the_noise_scale(tmp_path, caplog):
    assert GoodputRow(1, 8.0, 8, 1.0, 1.0).gain_of_doubling == pytest.approx(4 / 3)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        rows, _ = fit(1, {}, 4, tmp_path)
    exceeds = [row.step for row in rows if row.batch_size > row.noise_scale]
    found = [record.message for record in caplog.records if "larger batch no longer pays" in record.message]
    assert len(found) == 1 and f"at step {exceeds[0]}:" in found[0]


def test_two_observers_and_single_batches_are_refused(tmp_path):
    with pytest.raises(ValueError, match="GoodputMonitor and AdaScale"):
        fit(1, {}, 2, tmp_path, further=[AdaScale()])
    with pytest.raises(ValueError, match="GoodputMonitor needs more than one batch"):
        fit(1, {}, 1, tmp_path)


@pytest.mark.parametrize("options", [{"path": "a.txt"}, {"base_batch_size": 0}, {"smoothing": 1.0}], ids=str)
def test_refused_values(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GoodputMonitor(**options)
