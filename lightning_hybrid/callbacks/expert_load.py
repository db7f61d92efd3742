"""Callback that logs and plots the load balance of experts in every MoE layer.

Layers are `MoE`, upcycled ones included, and third-party routers that return the indices of the chosen experts. The
load of a call is a side output of the layer, so that it is counted once: by the rank that computes the layer, and not
again in a recomputation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hybrid.callbacks.expert_upcycle import MoEUpcycle
from lightning_hybrid.callbacks.pictures import (
    INK,
    MUTED,
    check_counts,
    log_metrics,
    plot_path,
    show_plot,
    sum_over_ranks,
    tidy,
)
from lightning_hybrid.callbacks.steps import step_of, steps_done
from lightning_hybrid.experts.metrics import balance_of, entropy_of_load, shares_of
from lightning_hybrid.experts.moe.layer import MoE
from lightning_hybrid.experts.moe.upcycling import UpcycledMLP
from lightning_hybrid.patching import around_method
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.asides import give_aside, taking_asides

_WHAT = "ExpertLoadMonitor"
_LEAST, _MOST = 0.25, 4.0  # ends of the colour scale: shares relative to an even one
_COLOURS = ("#2f5d8c", "#8fb4d3", "#f6f5f1", "#e8a98c", "#b5402a")


class LayerLoad(NamedTuple):
    """Load statistics of one call of a layer, emitted as a side output."""

    layer: str  # name of the layer
    load: Tensor  # [E] pairs (token, expert) routed to each expert, before drops
    dropped: Tensor  # [] pairs dropped for lack of capacity
    entropy: Tensor  # [] mean entropy of the router, in nats


class ExpertLoadMonitor(Callback):
    """Logs the load of the experts in training, and plots it as a heat map at the end.

    Every n steps it logs, over all tokens routed since: "expert_balance", the maximum load over the mean load, of the
    worst layer; "expert_dropped", the share of pairs (token, expert) that was dropped; and for each layer
    "expert_load/LAYER/balance", ".../load_entropy", ".../router_entropy" and ".../dropped". The sums of all ranks are
    then added in one small all-reduce.

    Args:
        path: File of the plot (PNG, SVG or PDF; needs matplotlib); no plot if None.
        every_n_steps: Steps between two measurements.

    Raises:
        TypeError: ``every_n_steps`` is no int.
        ValueError: ``every_n_steps`` is below 1, or the path has another suffix.
    """

    def __init__(self, path: str | Path | None = None, every_n_steps: int = 50) -> None:
        self.path = plot_path(path, "expert_load.png")
        check_counts(every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self.history = LoadHistory()
        self._sums: dict[str, Tensor] = {}  # by layer [E + 3]: load of each expert, dropped, entropy, number of calls
        self._undo = contextlib.ExitStack()
        self._last_step = 0

    # -- recording ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wraps the MoE layers, before any strategy inspects the module.

        Raises:
            ValueError: There are no such layers.
        """
        if stage != "fit":
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MoEUpcycle):  # it may stand after this one
                callback.setup(trainer, pl_module, stage)
        layers = dict(find_layers(pl_module))
        if not layers:
            raise ValueError(
                f"ExpertLoadMonitor finds no experts in {type(pl_module).__name__}: no MoE, and no router that has"
                " num_experts and top_k; leave it out, or build the layers before fit"
            )
        self._undo.close()
        self.history = LoadHistory()
        self._sums = {name: torch.zeros(size + 3, dtype=torch.float64) for name, (_, size, _) in layers.items()}
        for name, (layer, size, describe) in layers.items():
            self._wrap_layer(name, layer, size, describe)
        self._undo.callback(around_method(pl_module, "training_step", self._collect, reason="collects loads"))

    def _wrap_layer(self, name: str, layer: nn.Module, size: int, describe: Describe) -> None:
        def emit(layer: nn.Module, run: Callable[[], Any]) -> Any:
            out = run()
            with only_informs(_WHAT):
                if layer.training and (statistics := describe(out, size)) is not None:
                    give_aside(LayerLoad(name, *statistics))
            return out

        self._undo.callback(around_method(layer, "forward", emit, reason="emits loads"))

    def _collect(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        with taking_asides(LayerLoad) as side_outputs:
            output = run()
        self._add(side_outputs)
        return output

    @only_informs(_WHAT)
    def _add(self, side_outputs: Iterable[LayerLoad]) -> None:
        for call in side_outputs:
            if not is_absent(call.load):  # else another rank counts it, or the step is only recorded
                with torch._C.DisableTorchFunction(), torch.no_grad():  # not recorded as an operation of the step
                    row = torch.cat([call.load.double(), call.load.new_tensor([1.0]).double()])
                    row = torch.cat([row[:-1], torch.stack([call.dropped, call.entropy]).double(), row[-1:]])
                    self._sums[call.layer] = self._sums[call.layer].to(row.device) + row

    # -- measuring ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to count steps."""
        self._last_step = steps_done(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the load every ``every_n_steps`` steps; collective."""
        done = step_of(trainer).done
        if done >= self._last_step + self.every_n_steps:
            self._measure(trainer, pl_module, done)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the load of the remaining steps, and plots."""
        if (done := steps_done(trainer)) > self._last_step:
            self._measure(trainer, None, done)
        self._plot(trainer)

    @only_informs(_WHAT)
    def _plot(self, trainer: Trainer) -> None:
        if self.path is not None and trainer.is_global_zero and self.history.steps:
            step = steps_done(trainer)
            show_plot(lambda: draw_loads(self.history), self.path, trainer.loggers, "expert_load", step)
            rank_zero_info(f"the load of the experts is plotted in {self.path}")

    def teardown(self, *_: Any, **__: Any) -> None:
        """Unwraps the layers and the training step."""
        self._undo.close()

    on_exception = teardown

    def _measure(self, trainer: Trainer, module: LightningModule | None, step: int) -> None:
        self._last_step = step
        sums = self._gathered(trainer)
        for name in self._sums:
            self._sums[name] = torch.zeros_like(self._sums[name])
        self._log(trainer, module, step, sums)

    @only_informs(_WHAT)
    def _log(self, trainer: Trainer, module: LightningModule | None, step: int, sums: dict[str, Tensor]) -> None:
        logged: dict[str, float] = {}
        balances, dropped, pairs = [], 0.0, 0.0
        for name, row in sums.items():
            load, (layer_dropped, entropy, count) = row[:-3], row[-3:].tolist()
            if count == 0:
                continue
            balances.append(float(balance_of(load)))
            dropped, pairs = dropped + layer_dropped, pairs + float(load.sum())
            prefix = f"expert_load/{name}"
            logged[f"{prefix}/balance"] = balances[-1]
            logged[f"{prefix}/load_entropy"] = float(entropy_of_load(load))
            logged[f"{prefix}/dropped"] = layer_dropped / max(1.0, float(load.sum()))
            if math.isfinite(entropy):
                logged[f"{prefix}/router_entropy"] = entropy / count
        if not balances:
            return
        overall = {"expert_balance": max(balances), "expert_dropped": dropped / max(1.0, pairs)}
        self.history.add(step, {name: shares_of(row[:-3]).tolist() for name, row in sums.items()})
        if module is not None:
            for key, value in overall.items():
                module.log(key, value, on_step=True, on_epoch=False, rank_zero_only=False)
        log_metrics(trainer, logged, step)

    def _gathered(self, trainer: Trainer) -> dict[str, Tensor]:
        """Sums over all ranks. Each replica of a layer is counted; the shares do not depend on their number."""
        flat = torch.cat([row.to(trainer.strategy.root_device) for row in self._sums.values()])
        rows = sum_over_ranks(flat, trainer.strategy).split([len(row) for row in self._sums.values()])
        return dict(zip(self._sums, rows, strict=True))


# -- layers with experts ----------------------------------------------------------------------------------------------

Describe = Callable[[Any, int], "tuple[Tensor, Tensor, Tensor] | None"]


def find_layers(root: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, int, Describe]]]:
    """Yields the MoE layers: name, module to wrap, number of experts, function from a call's result to its load."""
    inside: set[int] = set()
    for name, module in root.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, UpcycledMLP):
            inside.update(map(id, module.modules()))
            yield name, (module.moe, module.num_experts, _of_report)
        elif isinstance(module, MoE):
            inside.update(map(id, module.modules()))
            yield name, (module, module.router.num_experts, _of_report)
        elif (size := _experts_of_router(module)) is not None:
            yield name, (module, size, functools.partial(_of_indices, top_k=module.top_k))


def _of_report(out: Any, size: int) -> tuple[Tensor, Tensor, Tensor]:
    _, report = out
    return report.load, report.dropped, report.entropy


def _experts_of_router(module: nn.Module) -> int | None:
    """Returns the number of experts of a router: a module with one matrix, a row for each expert; None for others."""
    size, top_k = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    is_router = isinstance(size, int) and isinstance(top_k, int) and len(weights) == 1 and weights[0].shape[0] == size
    return size if is_router else None


def _of_indices(out: Any, size: int, top_k: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Computes the load from the expert indices [tokens, k] that a router returns; None if it returns none."""
    for leaf in out if isinstance(out, tuple | list) else ():
        if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and leaf.dim() and leaf.shape[-1] == top_k:
            flat = leaf.reshape(-1)
            load = flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat)).float()
            return load, load.new_zeros(()), load.new_full((), math.nan)
    return None


@dataclasses.dataclass
class LoadHistory:
    """Measured load shares of the experts."""

    steps: list[int] = dataclasses.field(default_factory=list)  # steps of the measurements
    # by layer, [steps][experts]: the share of each expert at each of these steps
    shares: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)

    def add(self, step: int, shares: Mapping[str, Sequence[float]]) -> None:
        """Appends a measurement of all layers."""
        self.steps.append(step)
        for layer, row in shares.items():
            self.shares.setdefault(layer, []).append(list(row))


def draw_loads(history: LoadHistory) -> Any:
    """Draws the load of each layer over time and at the end; returns a matplotlib figure."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure

    shading = LinearSegmentedColormap.from_list("load", list(_COLOURS)), LogNorm(_LEAST, _MOST)
    heights = [min(2.4, max(0.5, 0.16 * len(rows[0]))) for rows in history.shares.values()]
    height = sum(heights) + 0.22 * len(heights) + 1.6
    figure = Figure(figsize=(9.5, height), dpi=150, facecolor="white")
    figure.text(0.02, 1 - 0.3 / height, "Load of the experts", size=13, weight="bold", color=INK)
    caption = "each row an expert: its share of the pairs (token, expert), relative to an even one"
    figure.text(0.02, 1 - 0.52 / height, caption, size=9, color=MUTED)
    # A row per layer: heat map, final load; and a colour bar beside all of them.
    margins = {"left": 0.2, "right": 0.93, "top": 1 - 0.8 / height, "bottom": 0.75 / height}
    spaces: dict[str, Any] = {"width_ratios": (1, 0.24, 0.022), "hspace": 0.22, "wspace": 0.05}
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights, **spaces, **margins)
    relative = {layer: [[share * len(row) for share in row] for row in rows] for layer, rows in history.shares.items()}
    most = max(2.0, *(max(rows[-1]) for rows in relative.values()))
    image: Any = None
    for index, (layer, rows) in enumerate(relative.items()):
        over_time, at_end = figure.add_subplot(grid[index, 0]), figure.add_subplot(grid[index, 1])
        image = _draw_heat_map(over_time, layer, rows, history.steps, shading)
        _draw_final_load(at_end, rows[-1], most, shading)
        if index < len(heights) - 1:
            for axes in (over_time, at_end):
                axes.set_xticks(axes.get_xticks(), [])
                axes.set_xlabel("")
    bar = figure.colorbar(image, cax=figure.add_subplot(grid[:, 2]), ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    for axes in figure.axes:
        tidy(axes, size=8, hidden=tuple(axes.spines), grid=False)
    return figure


def _draw_heat_map(axes: Any, layer: str, relative: list[list[float]], steps: list[int], shading: Any) -> Any:
    """Draws relative loads [steps, experts] of one layer as an image of experts over steps."""
    size, count = len(relative[0]), len(relative)
    clipped = ([min(max(v, _LEAST), _MOST) for v in row] for row in relative)
    image = axes.imshow(
        [list(column) for column in zip(*clipped, strict=True)],
        aspect="auto",
        interpolation="nearest",
        cmap=shading[0],
        norm=shading[1],
        extent=(0, count, size - 0.5, -0.5),
    )
    axes.set_yticks([0, size - 1] if size > 1 else [0])
    shown = sorted({round(index * (count - 1) / 6) for index in range(7)}) if count > 7 else range(count)
    axes.set_xticks([number + 0.5 for number in shown], [str(steps[number]) for number in shown])
    axes.set_ylabel(layer, rotation=0, ha="right", va="center", size=9, color=INK, labelpad=8)
    axes.set_xlabel("step", size=9, color=MUTED)
    return image


def _draw_final_load(axes: Any, final: list[float], most: float, shading: Any) -> None:
    """Draws the last relative loads [experts] of one layer as bars."""
    colours = [shading[0](shading[1](min(max(value, _LEAST), _MOST))) for value in final]
    axes.barh(range(len(final)), final, color=colours, edgecolor=MUTED, linewidth=0.4, height=0.78)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.set(ylim=(len(final) - 0.5, -0.5), xlim=(0, most))
    axes.set_yticks([])
    style: dict[str, Any] = {"ha": "right", "va": "bottom", "size": 7, "color": MUTED}
    axes.text(1.0, 1.02, f"max {max(final):.2f}", transform=axes.transAxes, **style)
    marks = [2**power for power in range(10) if 2**power <= most]
    axes.set_xticks(marks, list(map(str, marks)))
    axes.set_xlabel("at the end", size=9, color=MUTED)
