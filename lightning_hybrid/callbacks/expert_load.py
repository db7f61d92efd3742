"""Callback that logs and plots the load balance of experts in every MoE layer.

Layers are `MoE`, upcycled ones included, and third-party routers that return the indices of the chosen experts. The
load of a call is a side output of the layer, so that it is counted once: by the rank that computes the layer, and not
again in a recomputation.
"""

from __future__ import annotations

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

from lightning_hybrid.callbacks.moe_upcycle import MoEUpcycle
from lightning_hybrid.callbacks.pictures import check_counts, log_picture, plot_path
from lightning_hybrid.experts.metrics import balance_of, entropy_of_load, shares_of
from lightning_hybrid.experts.moe.moe_layer import MoE
from lightning_hybrid.experts.moe.upcycling import UpcycledMLP
from lightning_hybrid.patching import around_method
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.asides import give_aside, taking_asides

_WHAT = "ExpertLoadMonitor"
_INK, _MUTED, _RULE = "#2b2b2b", "#777772", "#e4e4e0"
_LEAST, _MOST = 0.25, 4.0  # ends of the colour scale: shares relative to an even one
_COLOURS = ("#2f5d8c", "#8fb4d3", "#f6f5f1", "#e8a98c", "#b5402a")


class LayerLoad(NamedTuple):
    """Load statistics of one call of a layer, emitted as a side output.

    Attributes:
        layer: Name of the layer.
        load: [E] pairs (token, expert) routed to each expert, before drops.
        dropped: [] pairs dropped for lack of capacity.
        entropy: [] mean entropy of the router, in nats.
    """

    layer: str
    load: Tensor
    dropped: Tensor
    entropy: Tensor


class ExpertLoadMonitor(Callback):
    """Logs the load of the experts in training, and plots it as a heat map at the end.

    Every n steps it logs, over all tokens routed since: "expert_balance", the maximum load over the mean load, of the
    worst layer; "expert_dropped", the share of pairs (token, expert) that was dropped; and for each layer
    "expert_load/LAYER/balance", ".../load_entropy", ".../router_entropy" and ".../dropped". The sums of all ranks are
    then added in one small all-reduce.

    Args:
        path: File of the plot (PNG, SVG or PDF; needs matplotlib); no plot if None.
        every_n_steps: Steps of the optimizer between two measurements.

    Raises:
        TypeError: ``every_n_steps`` is no int.
        ValueError: ``every_n_steps`` is below 1, or the path has another suffix.
    """

    def __init__(self, path: str | Path | None = None, every_n_steps: int = 50) -> None:
        self.path = None if path is None else plot_path(path, "expert_load.png")
        check_counts(every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self.history = LoadHistory()
        self._sums: dict[str, Tensor] = {}  # by layer [E + 3]: load of each expert, dropped, entropy, number of calls
        self._unwraps: list[Callable[[], None]] = []
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
        self._stop()
        self.history = LoadHistory()
        self._sums = {name: torch.zeros(size + 3, dtype=torch.float64) for name, (_, size, _) in layers.items()}
        for name, (layer, size, describe) in layers.items():
            self._wrap_layer(name, layer, size, describe)
        self._unwraps.append(around_method(pl_module, "training_step", self._collect, reason="collects loads"))

    def _wrap_layer(self, name: str, layer: nn.Module, size: int, describe: Describe) -> None:
        def emit(layer: nn.Module, run: Callable[[], Any]) -> Any:
            out = run()
            with only_informs(_WHAT):
                if layer.training and (statistics := describe(out, size)) is not None:
                    give_aside(LayerLoad(name, *statistics))
            return out

        self._unwraps.append(around_method(layer, "forward", emit, reason="emits loads"))

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

    def _stop(self) -> None:
        while self._unwraps:
            self._unwraps.pop()()

    # -- measuring ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to count steps."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the load every ``every_n_steps`` steps; collective."""
        step = trainer.global_step
        if step >= self._last_step + self.every_n_steps:
            self._measure(trainer, pl_module, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the load of the remaining steps, and plots."""
        if trainer.global_step > self._last_step:
            self._measure(trainer, None, trainer.global_step)
        self._plot(trainer)

    @only_informs(_WHAT)
    def _plot(self, trainer: Trainer) -> None:
        if self.path is not None and trainer.is_global_zero and self.history.steps:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            figure = draw_loads(self.history, self.path)
            log_picture(trainer.loggers, "expert_load", lambda: figure, trainer.global_step)
            rank_zero_info(f"the load of the experts is plotted in {self.path}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unwraps the layers and the training step."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Unwraps the layers and the training step."""
        self._stop()

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
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=step)

    def _gathered(self, trainer: Trainer) -> dict[str, Tensor]:
        """Sums over all ranks. Each replica of a layer is counted; the shares do not depend on their number."""
        strategy: Any = trainer.strategy
        flat = torch.cat([row.to(strategy.root_device) for row in self._sums.values()])
        mesh = getattr(strategy, "mesh", None)
        if mesh is not None:
            mesh.all_reduce(flat, "world")
        elif trainer.world_size > 1:
            flat = strategy.reduce(flat, reduce_op="sum")
        rows = flat.cpu().split([len(row) for row in self._sums.values()])
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
    """Measured load shares of the experts.

    Attributes:
        steps: Steps of the measurements.
        shares: By layer, [steps][experts]: the share of each expert at each of these steps.
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    shares: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)

    def add(self, step: int, shares: Mapping[str, Sequence[float]]) -> None:
        """Appends a measurement of all layers."""
        self.steps.append(step)
        for layer, row in shares.items():
            self.shares.setdefault(layer, []).append(list(row))


def draw_loads(history: LoadHistory, path: Path) -> Any:
    """Plots the load of each layer over time and at the end, and writes it in the format of the path's suffix.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.colors import LinearSegmentedColormap, LogNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{path} needs matplotlib; pip install matplotlib, or leave path out") from error

    colours = LinearSegmentedColormap.from_list("load", list(_COLOURS))
    norm = LogNorm(_LEAST, _MOST)
    heights = [min(2.4, max(0.5, 0.16 * len(rows[0]))) for rows in history.shares.values()]
    figure = Figure(figsize=(9.5, sum(heights) + 0.22 * len(heights) + 1.6), dpi=150)
    figure.set_facecolor("white")
    grid = _lay_out(figure, heights)
    most = max(2.0, *(max(rows[-1]) * len(rows[-1]) for rows in history.shares.values()))
    image: Any = None
    for index, (layer, rows) in enumerate(history.shares.items()):
        is_last = index == len(heights) - 1
        relative = [[share * len(rows[0]) for share in row] for row in rows]
        over_time, at_end = figure.add_subplot(grid[index, 0]), figure.add_subplot(grid[index, 1])
        image = _draw_heat_map(over_time, layer, relative, history.steps, colours, norm, is_last)
        _draw_final_load(at_end, relative[-1], most, colours, norm, is_last)
    bar = figure.colorbar(image, cax=figure.add_subplot(grid[:, 2]), ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"])
    bar.ax.minorticks_off()
    _tidy(bar.ax)
    bar.outline.set_visible(False)
    figure.savefig(path)
    return figure


def _lay_out(figure: Any, heights: Sequence[float]) -> Any:
    """Adds the titles, and returns a grid with a row per layer: heat map, final load, colour bar."""
    height = figure.get_figheight()
    figure.text(0.02, 1 - 0.3 / height, "Load of the experts", size=13, weight="bold", color=_INK)
    caption = "each row an expert: its share of the pairs (token, expert), relative to an even one"
    figure.text(0.02, 1 - 0.52 / height, caption, size=9, color=_MUTED)
    margins = {"left": 0.2, "right": 0.93, "top": 1 - 0.8 / height, "bottom": 0.75 / height}
    widths = (1, 0.24, 0.022)
    return figure.add_gridspec(
        len(heights), 3, height_ratios=heights, width_ratios=widths, hspace=0.22, wspace=0.05, **margins
    )


def _draw_heat_map(
    axes: Any, layer: str, relative: list[list[float]], steps: list[int], colours: Any, norm: Any, is_last: bool
) -> Any:
    """Draws relative loads [steps, experts] of one layer as an image of experts over steps."""
    size = len(relative[0])
    clipped = ([min(max(v, _LEAST), _MOST) for v in row] for row in relative)
    image = axes.imshow(
        [list(column) for column in zip(*clipped, strict=True)],
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=norm,
        extent=(0, len(relative), size - 0.5, -0.5),
    )
    axes.set_yticks([0, size - 1] if size > 1 else [0])
    ticks = _some(len(relative))
    axes.set_xticks([tick + 0.5 for tick in ticks], [str(steps[t]) for t in ticks] if is_last else [])
    axes.set_ylabel(layer, rotation=0, ha="right", va="center", size=9, color=_INK, labelpad=8)
    if is_last:
        axes.set_xlabel("step", size=9, color=_MUTED)
    _tidy(axes)
    return image


def _draw_final_load(axes: Any, final: list[float], most: float, colours: Any, norm: Any, is_last: bool) -> None:
    """Draws the last relative loads [experts] of one layer as bars."""
    size = len(final)
    shown = [colours(norm(min(max(value, _LEAST), _MOST))) for value in final]
    axes.barh(range(size), final, color=shown, edgecolor=_MUTED, linewidth=0.4, height=0.78)
    axes.axvline(1.0, color=_INK, linewidth=0.8)
    axes.set(ylim=(size - 0.5, -0.5), xlim=(0, most))
    axes.set_yticks([])
    style: dict[str, Any] = {"ha": "right", "va": "bottom", "size": 7, "color": _MUTED}
    axes.text(1.0, 1.02, f"max {max(final):.2f}", transform=axes.transAxes, **style)
    marks = [2**power for power in range(10) if 2**power <= most]
    axes.set_xticks(marks, list(map(str, marks)) if is_last else [])
    if is_last:
        axes.set_xlabel("at the end", size=9, color=_MUTED)
    _tidy(axes)


def _some(count: int, most: int = 7) -> list[int]:
    """Returns at most ``most`` evenly spaced indices below ``count``, with the first and the last one."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _tidy(axes: Any) -> None:
    axes.tick_params(length=0, labelsize=8, labelcolor=_MUTED)
    for spine in axes.spines.values():
        spine.set_visible(False)
