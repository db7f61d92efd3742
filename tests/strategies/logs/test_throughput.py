"""Lightning's ThroughputMonitor: figures per device, and over all devices, under layouts with several devices each."""

from unittest import mock

import pytest
from lightning.pytorch.callbacks import ThroughputMonitor, throughput_monitor
from lightning.pytorch.loggers import CSVLogger

from harness.fits import trainer_of
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from models.command_line_classes import Stack

FLOPS, AVAILABLE, SECONDS, BATCH = 4000, 1000.0, 0.5, 8


class Clock:
    """Half a second passes between two readings."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += SECONDS
        return self.now


class Records(CSVLogger):
    def log_metrics(self, metrics, step=None):
        self.seen = {**getattr(self, "seen", {}), **metrics}


def figures(devices, options, folder):
    ignore_warnings()
    module, logger = Stack(), Records(folder)
    module.flops_per_batch = FLOPS
    monitor = ThroughputMonitor(lambda batch: BATCH, lambda batch: 2 * BATCH, window_size=2)
    trainer = trainer_of(
        devices, Hybrid3DStrategy(**options), [monitor], max_steps=2, logger=logger, log_every_n_steps=1
    )
    clock = mock.patch.object(throughput_monitor, "time", Clock())
    with clock, mock.patch.object(throughput_monitor, "get_available_flops", lambda *_: AVAILABLE):
        trainer.fit(module)
    return {
        name: value
        for name, value in logger.seen.items()
        if name.startswith("train/") and name.endswith(("per_sec", "mfu"))
    }


@pytest.mark.parametrize(
    ("options", "devices", "replicas"),
    [
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 4, 1),
        ({"pipeline_parallel_size": 2, "num_microbatches": 2}, 4, 2),
        pytest.param({"zero_stage": 1}, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_figures_are_per_device_and_over_all(worlds, tmp_path, options, devices, replicas):
    found = worlds.run(devices, figures, devices, options, str(tmp_path))[0]
    over_all = {
        "batches_per_sec": replicas / SECONDS,
        "samples_per_sec": replicas * BATCH / SECONDS,
        "items_per_sec": replicas * 2 * BATCH / SECONDS,
        "flops_per_sec": replicas * FLOPS / SECONDS,
    }
    expected = {f"train/{name}": value for name, value in over_all.items()}
    expected |= {f"train/device/{name}": value / devices for name, value in over_all.items()}
    expected["train/device/mfu"] = over_all["flops_per_sec"] / devices / AVAILABLE
    assert found == pytest.approx(expected)
