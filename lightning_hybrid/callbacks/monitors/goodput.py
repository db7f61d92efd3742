"""Callback that logs the gradient noise scale, the statistical efficiency of the batch, and goodput."""

from __future__ import annotations

import math
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hybrid.batch.split import batch_size_of
from lightning_hybrid.callbacks import pictures
from lightning_hybrid.callbacks.adascale import GradientNoise
from lightning_hybrid.callbacks.pictures import BLUE, GREEN, GREY, INK, MUTED
from lightning_hybrid.callbacks.steps import step_of, steps_done
from lightning_hybrid.soft_failures import only_informs


class GoodputRow(NamedTuple):
    """What is logged at one step."""

    step: int
    noise_scale: float  # in samples
    batch_size: int  # samples of an optimizer step, of all replicas
    efficiency: float  # progress per sample, over that of a batch of the base size
    throughput: float  # samples per second of all replicas

    @property
    def goodput(self) -> float:
        """Throughput times efficiency."""
        return self.throughput * self.efficiency

    @property
    def gain_of_doubling(self) -> float:
        """How much further a step gets with twice the batch than with this one: a ratio between 1 and 2."""
        return 2 * (self.noise_scale + self.batch_size) / (self.noise_scale + 2 * self.batch_size)


class GoodputMonitor(GradientNoise):
    """Logs the gradient noise scale, the statistical efficiency of the batch and goodput.

    With trS, the trace of the covariance of the gradient of one sample, and G, its mean, the noise scale is
    trS / |G|^2 samples (McCandlish et al., arXiv 1812.06162, section 2.2, the "simple" one): a batch far below it has
    gradients that are mostly noise, one far above adds little to a step. The efficiency of a batch of B samples is
    (noise + B0) / (noise + B), the progress per sample relative to that of a batch of B0 samples; goodput is samples
    per second times efficiency (Qiao et al., "Pollux", arXiv 2008.12260, section 3).

    It logs "goodput/noise_scale", "goodput/efficiency", "goodput/samples_per_sec", "goodput/goodput" and
    "goodput/gain_of_doubling" each time that the Trainer logs: the last is 2 (noise + B) / (noise + 2 B), by how much a
    step of twice the samples progresses further. Once B is above the noise scale, where that is below 4/3, a line says
    that a larger batch no longer pays. Loggers that take images receive the plot as "goodput" at the end.

    The measurement is that of `AdaScale`: the squared norms of the gradients of single batches, those of accumulation
    and of the data-parallel ranks, and of their average; there must be at least two. Under ZeRO, stages and tensor
    ranks every parameter counts once. Both callbacks cannot be used together.

    Args:
        path: File of the plot (PNG, SVG or PDF; needs matplotlib); none is written if None.
        base_batch_size: B0, samples; by default those of a single batch.
        smoothing: weight of the past in the moving averages, 0 <= smoothing < 1; by default 1 - batches / 1000, where
            `batches` is the number of single batches per step.

    Raises:
        ValueError: a number is out of its range, or the path has another suffix.
    """

    def __init__(
        self, path: str | Path | None = None, *, base_batch_size: int | None = None, smoothing: float | None = None
    ) -> None:
        super().__init__(smoothing=smoothing)
        self.path = pictures.plot_path(path, "goodput.png")
        if base_batch_size is not None and base_batch_size < 1:
            raise ValueError(f"base_batch_size={base_batch_size} must be at least 1")
        self.base_batch_size = base_batch_size
        self.rows: list[GoodputRow] = []
        self.series: pictures.Series = {}
        self._forget_time()

    def _forget_time(self) -> None:
        self._samples, self._since = 0, perf_counter()  # samples of this replica, and the time since the last row
        self._has_advised = False

    @property
    def noise_scale_in_batches(self) -> float:
        """Estimate of the noise scale over the samples of an optimizer step; infinite where no mean is found."""
        square, variance = self._debiased().sum(1).tolist()
        return float(variance / square) if square > 0 else math.inf

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets an earlier run, and checks that there are several single batches per step."""
        super().on_train_start(trainer, pl_module)
        self.rows, self.series = [], {}
        self._forget_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the figures of the steps since the last log."""
        self._log_figures(trainer, batch)

    @only_informs("GoodputMonitor")
    def _log_figures(self, trainer: Trainer, batch: Any) -> None:
        size = batch_size_of(batch)
        if size is None:
            return
        self._samples += size
        step = step_of(trainer)
        if not (step.ends and step.is_logged and len(self._weights)):
            return
        now = perf_counter()
        replicas = self._data_parallel_size
        single_batches = replicas * trainer.accumulate_grad_batches
        batch_size = size * single_batches
        noise = self.noise_scale_in_batches * batch_size
        base = self.base_batch_size or size
        efficiency = 1.0 if noise == math.inf else (noise + base) / (noise + batch_size)
        throughput = self._samples * replicas / max(now - self._since, 1e-9)
        self._samples, self._since = 0, now
        row = GoodputRow(step.number, noise, batch_size, efficiency, throughput)
        self.rows.append(row)
        if trainer.is_global_zero and noise != math.inf:
            self._log(trainer, row)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves out the time of validation."""
        self._validation_start = perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves out the time of validation."""
        self._since += perf_counter() - self._validation_start

    def _log(self, trainer: Trainer, row: GoodputRow) -> None:
        names = {"samples_per_sec": "throughput"}
        shown = ("noise_scale", "efficiency", "samples_per_sec", "goodput", "gain_of_doubling")
        metrics = {f"goodput/{name}": getattr(row, names.get(name, name)) for name in shown}
        pictures.keep_series(self.series, metrics, row.step)
        pictures.log_metrics(trainer, metrics, row.step)
        if row.batch_size > row.noise_scale and not self._has_advised:
            self._has_advised = True
            rank_zero_info(
                f"a larger batch no longer pays at step {row.step}: the batch has {row.batch_size} samples and the"
                f" gradient noise scale is {row.noise_scale:.3g}; a step of twice the samples progresses"
                f" {row.gain_of_doubling:.2f} times as far"
            )

    @only_informs("GoodputMonitor")
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the noise scale and the goodput over the steps."""
        rows = [row for row in self.rows if row.noise_scale != math.inf]
        if trainer.is_global_zero and rows:
            pictures.show_plot(lambda: _draw(rows), self.path, trainer.loggers, "goodput", steps_done(trainer))


def _draw(rows: list[GoodputRow]) -> Any:
    from matplotlib.figure import Figure

    steps = [row.step for row in rows]
    figure = Figure(figsize=(9.5, 5.5), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(steps, [row.noise_scale for row in rows], color=BLUE, linewidth=1.8, label="gradient noise scale")
    upper.plot(steps, [row.batch_size for row in rows], color=INK, linewidth=1.2, linestyle="--", label="batch")
    upper.set_yscale("log")
    upper.set_ylabel("samples", color=INK)
    lower.plot(steps, [row.throughput for row in rows], color=GREY, linewidth=1.8, label="throughput")
    lower.plot(steps, [row.goodput for row in rows], color=GREEN, linewidth=1.8, label="goodput")
    lower.set_ylim(bottom=0)
    lower.set_ylabel("samples/s", color=INK)
    lower.set_xlabel("optimizer step", color=MUTED)
    for axes in (upper, lower):
        pictures.tidy(axes)
        axes.legend(frameon=False, fontsize=9)
    return figure
