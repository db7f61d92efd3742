"""Plot of expert load: for each layer a heat map of experts over steps, and bars of the final load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_INK, _MUTED, _RULE = "#2b2b2b", "#777772", "#e4e4e0"
_LEAST, _MOST = 0.25, 4.0  # ends of the colour scale: shares relative to an even one
_COLOURS = ("#2f5d8c", "#8fb4d3", "#f6f5f1", "#e8a98c", "#b5402a")


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
