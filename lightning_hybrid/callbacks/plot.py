"""Callback that plots the loss, the throughput and what monitors logged over the steps of a run, without a logger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_hybrid.batch.split import batch_size_of
from lightning_hybrid.callbacks import pictures
from lightning_hybrid.callbacks.pictures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Series
from lightning_hybrid.callbacks.steps import step_of, steps_done
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.tracing.recording import find_loss

_ON_DEVICE = 64  # losses that are copied to the host together: each copy waits for a GPU
_FEW_POINTS = 20  # up to so many are marked
_FLOPS = tuple(f"{prefix}FLOP/s" for prefix in ("", "k", "M", "G", "T", "P"))
_SENT = tuple(f"{unit} sent per step" for unit in ("B", "KiB", "MiB", "GiB", "TiB"))
_MEMORY = tuple(f"{unit} of memory" for unit in ("B", "KiB", "MiB", "GiB", "TiB"))


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
        self.path = pictures.plot_path(path, "run.png")
        self._forget()

    def _forget(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self._on_device: list[Tensor] = []
        self._last = math.nan  # time of the end of a batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets an earlier run."""
        self._forget()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss and the time of a batch."""
        now, size = perf_counter(), math.nan
        found = torch.full((), math.nan, device=pl_module.device)  # each rank has a value for each batch
        with only_informs("RunPlot"):
            size = batch_size_of(batch) or math.nan
        self.rates.append(size / (now - self._last))
        self._last = now
        self.steps.append(step_of(trainer).done)
        with only_informs("RunPlot"):
            loss = find_loss(outputs)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                found = loss.detach().float().reshape(())
        self._on_device.append(found)
        if len(self._on_device) >= _ON_DEVICE:
            self._to_host()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves out the time of validation."""
        self._last = math.nan

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
        panels = logged_panels(trainer.callbacks)  # type: ignore[attr-defined]
        step, instead = steps_done(trainer), "remove RunPlot"
        pictures.show_plot(lambda: self._draw(panels), self.path, trainer.loggers, "run", step, instead=instead)
        rank_zero_info(f"loss and throughput of the run are drawn in {self.path}")

    def _to_host(self) -> None:
        if self._on_device:
            self.losses += torch.stack(self._on_device).tolist()
            self._on_device = []

    def _draw(self, panels: Sequence[tuple[Panel, Series]] = ()) -> Any:
        from matplotlib.figure import Figure

        size, heights = (9.5, 5.5 + 1.9 * len(panels)), (3, 2, *[2] * len(panels))
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        upper, lower, *others = figure.subplots(2 + len(panels), 1, sharex=True, height_ratios=heights)
        for axes, name, values, colour in (
            (upper, "loss", self.losses, BLUE),
            (lower, "samples/s", self.rates, GREEN),
        ):
            smooth = _smoothed(values)
            axes.plot(self.steps, values, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(self.steps, smooth, color=colour, linewidth=1.8)
            if smooth[-1] == smooth[-1]:  # no NaN
                end = self.steps[-1], smooth[-1]
                axes.annotate(f"{end[1]:.4g}", end, (6, 0), textcoords="offset points", va="center", size=9)
            axes.set_ylabel(name, color=INK)
        lower.set_ylim(bottom=0)
        for axes, (panel, series) in zip(others, panels, strict=True):
            draw_panel(axes, panel, series)
        for axes in figure.axes:
            pictures.tidy(axes)
            axes.yaxis.set_label_coords(-0.08, 0.5)
        means = "the thick lines of the loss and of samples/s are means over the latest batches"
        figure.axes[-1].set_xlabel(f"step; {means}", color=pictures.MUTED)
        return figure


def _smoothed(values: list[float]) -> list[float]:
    """Returns the mean of the latest twentieth of all values (10 at least) at each of them, without NaN."""
    window = max(10, len(values) // 20)
    means = []
    for end in range(1, len(values) + 1):
        valid = [value for value in values[max(0, end - window) : end] if value == value]
        means.append(sum(valid) / len(valid) if valid else math.nan)
    return means


@dataclass(frozen=True)
class Panel:
    """Series of one unit."""

    # labels of the axis; the largest unit is taken that is at most the largest value
    units: Sequence[str]
    series: Mapping[str, tuple[str, str]]  # label and colour by the name of the metric
    base: int = 1000  # each unit is so many times the one before
    scale: float = 1.0  # factor of the values
    is_logarithmic: bool = False  # whether the axis is

    def of(self, logged: Series) -> Series:
        """Return the series that were logged, in the order of this panel."""
        return {name: logged[name] for name in self.series if logged.get(name)}


PANELS = (
    Panel(["tokens/s"], {"train/items_per_sec": ("tokens of all replicas", GREEN)}),
    Panel(_FLOPS, {"train/device/flops_per_sec": ("of a device", PURPLE)}),
    Panel(
        ["%"],
        {"train/device/mfu": ("MFU", PURPLE), "train/input_wait_share": ("time that waits for input", RED)},
        scale=100.0,
    ),
    Panel(
        _SENT,
        {
            "train/sent_bytes/data": ("data", BLUE),
            "train/sent_bytes/context": ("context", GREY),
            "train/sent_bytes/tensor": ("tensor", ORANGE),
            "train/sent_bytes/pipeline": ("pipeline", GREEN),
            "train/sent_bytes/experts": ("experts", PURPLE),
            "train/sent_bytes/several": ("several axes", INK),
        },
        base=1024,
    ),
    Panel(
        _MEMORY,
        {
            "memory/peak": ("peak", INK),
            "memory/predicted_peak": ("predicted peak", RED),
            "memory/parameters": ("parameters", BLUE),
            "memory/gradients": ("gradients", ORANGE),
            "memory/optimizer_states": ("optimizer states", GREEN),
            "memory/rest": ("rest", GREY),
        },
        base=1024,
    ),
    Panel(["samples"], {"goodput/noise_scale": ("gradient noise scale", BLUE)}, is_logarithmic=True),
    Panel(
        ["samples/s"],
        {"goodput/samples_per_sec": ("throughput", GREY), "goodput/goodput": ("goodput", GREEN)},
    ),
)


def logged_panels(callbacks: Iterable[Any]) -> list[tuple[Panel, Series]]:
    """Return the panels for which a callback has kept series, and these."""
    logged: Series = {}
    for callback in callbacks:
        series = getattr(callback, "series", None)
        logged |= series if isinstance(series, dict) else {}
    panels = ((panel, panel.of(logged)) for panel in PANELS)
    return [(panel, series) for panel, series in panels if series]


def draw_panel(axes: Any, panel: Panel, logged: Series) -> None:
    """Draw the series of a panel on matplotlib axes, with a legend, and marks where they have few points."""
    most = max(value for points in logged.values() for _, value in points)
    index = pictures.unit_index(panel.units, most, panel.base)
    scale = panel.scale / panel.base**index
    for name, points in logged.items():
        label, colour = panel.series[name]
        marker = "o" if len(points) <= _FEW_POINTS else None
        steps, values = [step for step, _ in points], [scale * value for _, value in points]
        style = "--" if name == "memory/predicted_peak" else "-"
        axes.plot(steps, values, style, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label)
    if panel.is_logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(panel.units[index], color=INK)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="best")
