"""Callback that plots the loss, the throughput and what monitors logged over the steps of a run, without a logger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_hybrid.callbacks.draw_monitor_panels import Panel, draw_panel, logged_panels
from lightning_hybrid.callbacks.monitors.logged_series import Series
from lightning_hybrid.callbacks.write_and_log_pictures import log_picture
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.batch.split_batch_into_microbatches import batch_size_of
from lightning_hybrid.step.tracing.recording_dataclasses import find_loss

_SUFFIXES = (".png", ".svg", ".pdf")
_INK, _MUTED, _LOSS, _RATE = "#222222", "#777777", "#4c78a8", "#54a24b"
_ON_DEVICE = 64  # losses that are copied to the host together: each copy waits for a GPU


class RunPlot(Callback):
    """Plots the loss and the samples per second of each batch at the end of training, and what monitors have logged.

    The loss is the mean over replicas of what ``training_step`` returned; samples are those of all replicas. Seconds
    are the time between the ends of two batches on the first rank, with the loading of data and without validation.
    Below are panels of the series of the run's `ThroughputMonitor`, `MemoryMonitor` and `GoodputMonitor`: tokens and
    FLOPs per second, MFU, waits for input, messages, memory, noise scale and goodput, at the steps where the monitors
    logged them. No logger is needed for that.
    Loggers that take images receive the plot as "run". Needs matplotlib.

    Args:
        path: File of the plot (PNG, SVG or PDF).

    Raises:
        ValueError: The path has another suffix.
    """

    def __init__(self, path: str | Path = "run.png") -> None:
        self.path = Path(path)
        if self.path.suffix not in _SUFFIXES:
            raise ValueError(f"path={str(path)!r} must end in {', '.join(_SUFFIXES)}; set path='run.png'")
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self._on_device: list[Tensor] = []
        self._last: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets an earlier run."""
        self.steps, self.losses, self.rates, self._on_device, self._last = [], [], [], [], None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss and the time of a batch."""
        now, size, found = perf_counter(), None, None  # each rank has a value for each batch, which are reduced
        with only_informs("RunPlot"):
            size = batch_size_of(batch)
        seconds = None if self._last is None else now - self._last
        self._last = now
        self.rates.append(float("nan") if seconds is None or size is None else size / seconds)
        self.steps.append(trainer.global_step)
        with only_informs("RunPlot"):
            loss = find_loss(outputs)
            found = loss.detach().float().reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else None
        self._on_device.append(torch.full((), float("nan"), device=pl_module.device) if found is None else found)
        if len(self._on_device) >= _ON_DEVICE:
            self._to_host()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves out the time of validation."""
        self._last = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plots; collective over the replicas."""
        self._to_host()
        if not self.steps:
            return
        strategy: Any = trainer.strategy
        means = strategy.reduce(torch.tensor(self.losses, device=strategy.root_device), reduce_op="mean")
        sums = strategy.reduce(torch.tensor(self.rates, device=strategy.root_device), reduce_op="sum")
        self.losses, self.rates = means.tolist(), sums.tolist()
        if trainer.is_global_zero:
            self._plot(trainer)

    @only_informs("RunPlot")
    def _plot(self, trainer: Trainer) -> None:
        figure = self._draw(logged_panels(trainer.callbacks))  # type: ignore[attr-defined]
        log_picture(trainer.loggers, "run", lambda: figure, trainer.global_step)
        rank_zero_info(f"loss and throughput of the run are drawn in {self.path}")

    def _to_host(self) -> None:
        if self._on_device:
            self.losses += torch.stack(self._on_device).tolist()
            self._on_device = []

    def _draw(self, panels: Sequence[tuple[Panel, Series]] = ()) -> Any:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(f"{self.path} needs matplotlib; pip install matplotlib, or remove RunPlot") from error
        size, heights = (9.5, 5.5 + 1.9 * len(panels)), (3, 2, *[2] * len(panels))
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        upper, lower, *others = figure.subplots(2 + len(panels), 1, sharex=True, height_ratios=heights)
        for axes, name, values, colour in (
            (upper, "loss", self.losses, _LOSS),
            (lower, "samples/s", self.rates, _RATE),
        ):
            smooth = _smoothed(values)
            axes.plot(self.steps, values, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(self.steps, smooth, color=colour, linewidth=1.8)
            if smooth[-1] == smooth[-1]:  # no NaN
                end = self.steps[-1], smooth[-1]
                axes.annotate(f"{end[1]:.4g}", end, (6, 0), textcoords="offset points", va="center", size=9)
            axes.set_ylabel(name, color=_INK)
        lower.set_ylim(bottom=0)
        for axes, (panel, series) in zip(others, panels, strict=True):
            draw_panel(axes, panel, series)
        for axes in figure.axes:
            axes.grid(axis="y", color="#e4e4e0", linewidth=0.6)
            axes.tick_params(which="both", length=0, labelsize=9, labelcolor=_MUTED)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.yaxis.set_label_coords(-0.08, 0.5)
        means = "the thick lines of the loss and of samples/s are means over the latest batches"
        figure.axes[-1].set_xlabel(f"optimizer step; {means}", color=_MUTED)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.path)
        return figure


def _smoothed(values: list[float]) -> list[float]:
    """Returns the mean of the latest twentieth of all values (10 at least) at each of them, without NaN."""
    window = max(10, len(values) // 20)
    means = []
    for end in range(1, len(values) + 1):
        valid = [value for value in values[max(0, end - window) : end] if value == value]
        means.append(sum(valid) / len(valid) if valid else float("nan"))
    return means
