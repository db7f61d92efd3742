"""Panels of `RunPlot` for what the monitors have logged: throughput, shares of time, messages, memory, goodput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.callbacks.monitors.logged_series import Series

_BLUE, _ORANGE, _GREEN, _RED = "#4c78a8", "#f58518", "#54a24b", "#e45756"
_PURPLE, _GREY, _INK = "#b279a2", "#b8b0ac", "#222222"
_FEW_POINTS = 20  # up to so many are marked
_FLOPS = tuple(f"{prefix}FLOP/s" for prefix in ("", "k", "M", "G", "T", "P"))
_SENT = tuple(f"{unit} sent per step" for unit in ("B", "KiB", "MiB", "GiB", "TiB"))
_MEMORY = tuple(f"{unit} of memory" for unit in ("B", "KiB", "MiB", "GiB", "TiB"))


@dataclass(frozen=True)
class Panel:
    """Series of one unit.

    Attributes:
        units: Labels of the axis; each unit is ``base`` times the one before, and the largest is taken that is at most
            the largest value.
        series: Label and colour by the name of the metric.
        base: As above.
        scale: Factor of the values.
        is_logarithmic: Whether the axis is.
    """

    units: Sequence[str]
    series: Mapping[str, tuple[str, str]]
    base: int = 1000
    scale: float = 1.0
    is_logarithmic: bool = False

    def of(self, logged: Series) -> Series:
        """Return the series that were logged, in the order of this panel."""
        return {name: logged[name] for name in self.series if logged.get(name)}


PANELS = (
    Panel(["tokens/s"], {"train/items_per_sec": ("tokens of all replicas", _GREEN)}),
    Panel(_FLOPS, {"train/device/flops_per_sec": ("of a device", _PURPLE)}),
    Panel(
        ["%"],
        {"train/device/mfu": ("MFU", _PURPLE), "train/input_wait_share": ("time that waits for input", _RED)},
        scale=100.0,
    ),
    Panel(
        _SENT,
        {
            "train/sent_bytes/data": ("data", _BLUE),
            "train/sent_bytes/context": ("context", _GREY),
            "train/sent_bytes/tensor": ("tensor", _ORANGE),
            "train/sent_bytes/pipeline": ("pipeline", _GREEN),
            "train/sent_bytes/experts": ("experts", _PURPLE),
            "train/sent_bytes/several": ("several axes", _INK),
        },
        base=1024,
    ),
    Panel(
        _MEMORY,
        {
            "memory/peak": ("peak", _INK),
            "memory/predicted_peak": ("predicted peak", _RED),
            "memory/parameters": ("parameters", _BLUE),
            "memory/gradients": ("gradients", _ORANGE),
            "memory/optimizer_states": ("optimizer states", _GREEN),
            "memory/rest": ("rest", _GREY),
        },
        base=1024,
    ),
    Panel(["samples"], {"goodput/noise_scale": ("gradient noise scale", _BLUE)}, is_logarithmic=True),
    Panel(
        ["samples/s"],
        {"goodput/samples_per_sec": ("throughput", _GREY), "goodput/goodput": ("goodput", _GREEN)},
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
    index = max(number for number in range(len(panel.units)) if number == 0 or most >= panel.base**number)
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
    axes.set_ylabel(panel.units[index], color=_INK)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="best")
