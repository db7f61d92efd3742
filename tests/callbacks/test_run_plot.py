"""RunPlot draws the loss and the throughput of a run."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import GoodputMonitor, MemoryMonitor, RunPlot, ThroughputMonitor, pictures
from lightning_hybrid.callbacks import plot as run_plot
from lightning_hybrid.callbacks.plot import PANELS, draw_panel, logged_panels
from models.regression import Sequential


class Losses(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def fit(plot, module, monitors=(), **options):
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4)
    seen = Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=Hybrid3DStrategy(**options),
        max_epochs=1,
        limit_val_batches=1,
        val_check_interval=4,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
        callbacks=[plot, seen, *monitors],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader)
    return seen.seen


@pytest.mark.world(2)
@pytest.mark.parametrize("options", [{}, {"pipeline_parallel_size": 2}], ids=["replicas", "stages"])
def test_losses_are_means_over_replicas_and_samples_are_counted_once(options):
    class Evaluated(Sequential):
        def validation_step(self, batch, batch_idx):
            pass

    plot = RunPlot("there/run.png")
    with mock.patch.object(run_plot, "_ON_DEVICE", 3), mock.patch.object(pictures, "log_picture") as logged:
        own = fit(plot, Evaluated(), **options)
    replicas = [None, None]
    dist.all_gather_object(replicas, own)
    num_batches = len(own)
    assert num_batches == (16 if options else 8)
    assert plot.losses == pytest.approx(torch.tensor(replicas).mean(0).tolist())
    assert plot.steps == [1 + batch // 2 if batch % 2 else batch // 2 for batch in range(num_batches)]
    # The first batch, and that after each validation, have no time.
    assert [math.isnan(rate) for rate in plot.rates] == [batch % 4 == 0 for batch in range(num_batches)]
    if dist.get_rank() == 0:
        assert Path("there/run.png").read_bytes().startswith(b"\x89PNG")
        assert logged.call_args.args[1::2] == ("run", num_batches // 2)


def test_rates_are_samples_over_seconds():
    plot = RunPlot()
    batches = [torch.zeros(size, 2) for size in (4, 4, 6)] + ["no tensor"]
    plot.on_train_start(mock.Mock(), mock.Mock())
    with mock.patch.object(run_plot, "perf_counter", side_effect=[10.0, 12.0, 12.5, 13.0]):
        for step, batch in enumerate(batches, 1):
            outputs = {"loss": torch.tensor(float(step))} if step < 4 else None
            trainer = mock.Mock(accumulate_grad_batches=1, log_every_n_steps=50)
            trainer.fit_loop.epoch_loop = mock.Mock(batch_idx=step - 1, _batches_that_stepped=step - 1)
            plot.on_train_batch_end(trainer, mock.Mock(device="cpu"), outputs, batch, 0)
    plot._to_host()
    assert plot.rates[1:3] == [2.0, 12.0] and math.isnan(plot.rates[0]) and math.isnan(plot.rates[3])
    assert plot.losses[:3] == [1.0, 2.0, 3.0] and math.isnan(plot.losses[3])
    assert run_plot._smoothed([float("nan"), 2.0, 4.0])[1:] == [2.0, 3.0]


def test_another_suffix_is_refused():
    with pytest.raises(ValueError, match=r"path='run.txt' must end in .png, .svg, .pdf; set path='run.png'"):
        RunPlot("run.txt")


@pytest.mark.world(2)
def test_series_of_monitors_are_panels_without_a_logger():
    monitors = [ThroughputMonitor(window_size=2, available_flops=1e9), MemoryMonitor(step=3), GoodputMonitor()]
    plot = RunPlot("run.svg")
    with mock.patch.object(pictures, "log_picture") as logged:
        fit(plot, Sequential(), monitors=monitors)
    if dist.get_rank() > 0:
        return
    [call] = [each for each in logged.call_args_list if each.args[1] == "run"]
    figure = call.args[2]()
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes[2:]]
    assert labels == [
        ["of a device"],
        ["MFU", "time that waits for input"],
        ["data"],
        ["peak", "predicted peak", "parameters", "gradients", "optimizer states", "rest"],
        ["gradient noise scale"],
        ["throughput", "goodput"],
    ]
    steps = plot.steps[-1]
    sent, memory, goodput = (figure.axes[number].lines[0].get_xdata() for number in (4, 5, 7))
    assert list(sent) == list(range(1, steps + 1)) and list(memory) == [3] and set(goodput) <= set(sent)
    text = Path("run.svg").read_text()
    assert text.startswith("<?xml") and "<!-- optimizer states -->" in text


def test_units_of_panels():
    """The largest unit that is at most the largest value; predicted bytes are a dashed line."""
    from matplotlib.figure import Figure

    monitor = mock.Mock(series={"memory/peak": [(2, 3 * 2.0**20)], "memory/predicted_peak": [(2, 2.0**20)]})
    other = mock.Mock(series={"train/device/flops_per_sec": [(5, 2e9), (10, 999e9)], "train/device/mfu": [(5, 0.4)]})
    panels = logged_panels([monitor, mock.Mock(series=None), other])
    assert [panel for panel, _ in panels] == [PANELS[1], PANELS[2], PANELS[4]]
    drawn = []
    for panel, series in panels:
        axes = Figure().subplots()
        draw_panel(axes, panel, series)
        lines = [(line.get_linestyle(), *line.get_ydata().round(9).tolist()) for line in axes.lines]
        drawn.append((axes.get_ylabel(), *lines))
    assert drawn == [
        ("GFLOP/s", ("-", 2.0, 999.0)),
        ("%", ("-", 40.0)),
        ("MiB of memory", ("-", 3.0), ("--", 1.0)),
    ]
