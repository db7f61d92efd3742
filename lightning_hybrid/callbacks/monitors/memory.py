"""Callback that measures the memory of each rank, compares it with its prediction, explains out-of-memory errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.callbacks import pictures
from lightning_hybrid.callbacks.monitors.holders import Holder, PeakMeter, bytes_by_kind, find_holders
from lightning_hybrid.callbacks.pictures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
)
from lightning_hybrid.callbacks.steps import step_of
from lightning_hybrid.errors import add_error_note, causes_of, is_out_of_memory
from lightning_hybrid.predict.ranks import RankMemory
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.text import sized

MEASURED = ("parameters", "gradients", "optimizer_states", "rest", "peak")
_UNKNOWN, _WHAT = -1, "MemoryMonitor"
PREDICTED = ("parameters", "gradients", "optimizer_states", "activations", "gathered", "total")
_BARS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer_states": GREEN,
    "rest": GREY,
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_ADVICE = (
    'what takes less memory: recompute="full" for activations, more num_microbatches with stages, zero_stage=3 for'
    ' parameters, gradients and states, offload="cpu"; lightning-hybrid explain predicts a layout'
)


class MemoryMonitor(Callback):
    """Measures the memory of tensors on each rank in one step, beside what was predicted from the plan of the run.

    Parameters and gradients are measured before the optimizer's step, its states after it, on the compute device. The
    peak is that of the step; what it has besides these three is "rest": activations, parameters that ZeRO gathers,
    messages, and the workspace of kernels. In bytes it logs the maximum over ranks as "memory/parameters",
    "memory/gradients", "memory/optimizer_states", "memory/rest" and "memory/peak", that of the prediction as
    "memory/predicted_peak", and the peak of each rank as "memory/peak/rank_R". It prints a row for each rank, and draws
    them: loggers that take images receive the picture as "memory" (needs matplotlib).

    On a GPU the peak is that of torch's allocator, whose peak statistic is reset when the step begins; elsewhere
    torch's profiler records the allocations of that step. Other steps cost nothing.

    At an out-of-memory error (`torch.OutOfMemoryError`, `MemoryError`, or that of the CPU allocator) the largest
    holders of memory on this rank, by kind and FQN, are noted below the traceback and written to
    "out_of_memory_rank_R.txt"; on a GPU a snapshot of the allocator, for pytorch.org/memory_viz, goes to
    "out_of_memory_rank_R.pickle". The error is not caught.

    Args:
        path: File of the picture (PNG, SVG or PDF); none is written if None.
        step: The step to measure, counted from 1; states of most optimizers are there after the first.
        every_n_steps: Interval of further steps to measure; None for no others.
        num_largest: How many parameters, gradients, states and layers an explanation names.
        folder: Where an explanation and a snapshot go; the Trainer's ``default_root_dir`` if None.

    Raises:
        TypeError: A number is no int.
        ValueError: A number is below 1, or the path has another suffix.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        step: int = 2,
        every_n_steps: int | None = None,
        num_largest: int = 5,
        folder: str | Path | None = None,
    ) -> None:
        self.path = pictures.plot_path(path, "memory.png")
        pictures.check_counts(step=step, num_largest=num_largest, every_n_steps=every_n_steps)
        self.step, self.every_n_steps, self.num_largest = step, every_n_steps, num_largest
        self.folder = None if folder is None else Path(folder)
        self.measured: list[dict[str, int]] = []
        self.series: pictures.Series = {}
        self.predicted: RankMemory | None = None
        self._saved_by_layer: Mapping[str, int] = {}
        self._forget_step()

    def _forget_step(self) -> None:
        self._is_measured = False  # the same on all ranks, whether or not this one can measure
        self._meter: PeakMeter | None = None
        self._at_start = 0
        self._before_optimizer: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings and what was measured."""
        return {**self.__dict__, "_meter": None, "_before_optimizer": None}

    def connect_prediction(self, predicted: RankMemory, saved_by_layer: Mapping[str, int]) -> None:
        """Take the predicted memory of this rank, and the bytes that each layer saves for one microbatch."""
        self.predicted, self._saved_by_layer = predicted, saved_by_layer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the series of an earlier run."""
        self.series = {}

    # -- a measured step ----------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to measure, if the step was requested."""
        step = step_of(trainer)
        if step.begins and pictures.is_wanted(step.number, self.step, self.every_n_steps):
            self._is_measured = True
            with only_informs(_WHAT):
                self._begin(trainer, pl_module)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        meter = PeakMeter(device)
        if not meter.can_measure:
            rank_zero_info("MemoryMonitor measures no step while a profiler records")
            return
        self._at_start = sum(bytes_by_kind(find_holders(pl_module, trainer.optimizers, device)).values())
        self._meter = meter
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        meter.start(gradient for gradient in gradients if not is_absent(gradient))

    @only_informs(_WHAT)
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measures parameters and gradients."""
        if self._meter is not None:
            sizes = bytes_by_kind(find_holders(pl_module, [], trainer.strategy.root_device))
            before = self._before_optimizer or sizes
            self._before_optimizer = {kind: max(size, before[kind]) for kind, size in sizes.items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports the step that has just ended, if it was measured; collective over all ranks."""
        step = step_of(trainer)
        if not (self._is_measured and step.ends):
            return
        names = [*MEASURED, *(f"predicted_{kind}" for kind in PREDICTED)]
        row = [_UNKNOWN] * len(names)
        with only_informs(_WHAT):
            row = self._row(trainer, pl_module)
        self._forget_step()
        rows = pictures.gather_rows(torch.tensor(row, dtype=torch.float64), trainer.strategy).long().tolist()
        measured = [dict(zip(names, values, strict=True)) for values in rows]
        if any(rank["peak"] == _UNKNOWN for rank in measured):
            return
        self.measured = measured
        if trainer.is_global_zero:
            with only_informs(_WHAT):
                self._report(trainer, step.number)

    def _row(self, trainer: Trainer, pl_module: LightningModule) -> list[int]:
        """The bytes of this rank by kind, measured and predicted; all unknown if it could not begin to measure."""
        if self._meter is None:
            return [_UNKNOWN] * (len(MEASURED) + len(PREDICTED))
        try:
            peak = self._meter.stop(self._at_start)
        finally:
            self._meter.close()  # no profiler records on
        sizes = bytes_by_kind(find_holders(pl_module, trainer.optimizers, trainer.strategy.root_device))
        before = self._before_optimizer or sizes
        held = {kind: max(size, before[kind]) for kind, size in sizes.items()}
        return [*held.values(), max(0, peak - sum(held.values())), peak, *self._predicted_row()]

    def _predicted_row(self) -> list[int]:
        """The predicted bytes by kind."""
        if self.predicted is None:
            return [_UNKNOWN] * len(PREDICTED)
        return [_UNKNOWN if (size := getattr(self.predicted, kind)) is None else size for kind in PREDICTED]

    def _report(self, trainer: Trainer, step: int) -> None:
        metrics = {f"memory/{kind}": float(max(rank[kind] for rank in self.measured)) for kind in MEASURED}
        if (predicted := max(rank["predicted_total"] for rank in self.measured)) >= 0:
            metrics["memory/predicted_peak"] = float(predicted)
        metrics |= {f"memory/peak/rank_{number}": float(rank["peak"]) for number, rank in enumerate(self.measured)}
        pictures.keep_series(self.series, metrics, step)
        pictures.log_metrics(trainer, metrics, step)
        rank_zero_info(memory_table(self.measured, step))
        path = None if self.path is None else pictures.numbered(self.path, step, self.every_n_steps)
        pictures.show_plot(lambda: draw_rank_memory(self.measured, step), path, trainer.loggers, "memory", step)

    # -- errors -------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Explains an out-of-memory error; it goes on afterwards."""
        with only_informs(_WHAT):
            if self._meter is not None:
                self._meter.close()
        self._forget_step()
        if not is_out_of_memory(exception):
            return
        try:
            device = trainer.strategy.root_device
            text = explain_out_of_memory(
                exception,
                pl_module,
                find_holders(pl_module, trainer.optimizers, device),
                rank=trainer.global_rank,
                predicted=self.predicted,
                saved_by_layer=self._saved_by_layer,
                num_largest=self.num_largest,
            )
            add_error_note(exception, text)
            folder = Path(trainer.default_root_dir) if self.folder is None else self.folder
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"out_of_memory_rank_{trainer.global_rank}.txt"
            path.write_text(text + "\n", encoding="utf-8")
            if device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
        except Exception as further:  # the user must see the first error
            add_error_note(exception, f"MemoryMonitor could not explain it: {type(further).__name__}: {further}")


def memory_table(ranks: Sequence[Mapping[str, int]], step: int) -> str:
    """Return a row for each rank: measured bytes by kind, the peak, and the predicted peak where it is known."""
    lines = [f"memory of tensors in step {step}, by rank:"]
    for number, rank in enumerate(ranks):
        terms = ", ".join(f"{kind.replace('_', ' ')} {sized(rank[kind])}" for kind in _BARS)
        predicted = rank["predicted_total"]
        beside = f" ({sized(predicted)} predicted)" if predicted >= 0 else ""
        lines.append(f"  {number}: peak {sized(rank['peak'])}{beside} = {terms}")
    return "\n".join(lines)


def draw_rank_memory(ranks: Sequence[Mapping[str, int]], step: int) -> Any:
    """Draw a stacked bar for each rank, with a mark at the predicted peak; returns a matplotlib figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.6 + 0.42 * len(ranks)), dpi=150, layout="constrained")
    axes = figure.subplots()
    positions = list(range(len(ranks)))
    largest = max(max(rank["peak"], rank["predicted_total"]) for rank in ranks)
    unit = pictures.unit_index(_UNITS, largest)
    left = [0.0] * len(ranks)
    for kind, colour in _BARS.items():
        sizes = [rank[kind] / 1024**unit for rank in ranks]
        axes.barh(positions, sizes, left=left, color=colour, height=0.7, label=kind.replace("_", " "))
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    known = [(rank["predicted_total"] / 1024**unit, y) for y, rank in enumerate(ranks) if rank["predicted_total"] >= 0]
    for number, (x, y) in enumerate(known):
        axes.plot([x, x], [y - 0.42, y + 0.42], color=INK, linewidth=1.6, label=None if number else "predicted peak")
    axes.set_yticks(positions, [f"rank {position}" for position in positions])
    axes.invert_yaxis()
    axes.set_xlabel(f"{_UNITS[unit]} of tensors in step {step}, at the peak", color=MUTED)
    pictures.tidy(axes, grid=False)
    figure.legend(loc="outside upper left", ncols=5, frameon=False, fontsize=9)
    return figure


def explain_out_of_memory(
    error: BaseException,
    module: nn.Module,
    holders: Sequence[Holder],
    *,
    rank: int,
    predicted: RankMemory | None,
    saved_by_layer: Mapping[str, int],
    num_largest: int,
) -> str:
    """Describe what holds memory on this rank when an allocation has failed, ``num_largest`` of each kind.

    ``saved_by_layer`` has the bytes that each layer saves for the backward of one microbatch of a recorded step.
    """
    sums = bytes_by_kind(holders)
    lines = [f"out of memory on rank {rank}{_location(error, module)}; tensors that it holds:"]
    known = {} if predicted is None else {kind: getattr(predicted, kind) for kind in sums}
    for kind, size in sums.items():
        beside = f" ({sized(known[kind])} predicted)" if known.get(kind) is not None else ""
        lines.append(f"  {kind.replace('_', ' ')} {sized(size)}{beside}")
        largest = sorted((h for h in holders if h.kind == kind), key=lambda h: -h.nbytes)[:num_largest]
        lines += [f"    {holder.name} {sized(holder.nbytes)}" for holder in largest]
    if predicted is not None and predicted.activations is not None:
        lines.append(f"  activations {sized(predicted.activations)} predicted, of all microbatches in flight")
    if saved_by_layer:
        lines.append("  saved for the backward of one microbatch, without recomputation, by layer:")
        largest_layers = sorted(saved_by_layer.items(), key=lambda item: -item[1])[:num_largest]
        lines += [f"    {name} {sized(size)}" for name, size in largest_layers]
    return "\n".join([*lines, _ADVICE])


def _location(error: BaseException, module: nn.Module) -> str:
    """The innermost module of the user whose code was running."""
    names = {id(child): name for name, child in module.named_modules()}
    found = ""
    for each in causes_of(error):
        for frame, line in _frames(each.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                name = names[id(owner)] or type(owner).__name__
                found = f", in {name} ({frame.f_code.co_filename}:{line})"
        if found:
            break
    return found


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
