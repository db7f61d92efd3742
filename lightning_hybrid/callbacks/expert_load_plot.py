"""Draw how the load of the experts went: for each layer a heat map of experts over steps, and where it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_INK, _MUTED, _RULE = "#2b2b2b", "#777772", "#e4e4e0"
_LEAST, _MOST = 0.25, 4.0  # shares relative to an even one, of the ends of the colours
_COLOURS = ("#2f5d8c", "#8fb4d3", "#f6f5f1", "#e8a98c", "#b5402a")


@dataclasses.dataclass
class LoadHistory:
    """The shares that experts had.

    Attributes:
        steps: When they were measured.
        shares: Of each layer, at each of these steps, the share of each expert.
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    shares: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)

    def add(self, step: int, shares: Mapping[str, Sequence[float]]) -> None:
        """Note a measurement of all layers."""
        self.steps.append(step)
        for layer, row in shares.items():
            self.shares.setdefault(layer, []).append(list(row))


def draw_loads(history: LoadHistory, path: Path) -> None:
    """Write the picture.

    Args:
        history: With one measurement at least.
        path: Its suffix says which kind.

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
    top, bottom = 1 - 0.8 / figure.get_figheight(), 0.75 / figure.get_figheight()
    grid = figure.add_gridspec(
        len(heights),
        3,
        height_ratios=heights,
        width_ratios=(1, 0.24, 0.022),
        left=0.2,
        right=0.93,
        top=top,
        bottom=bottom,
        hspace=0.22,
        wspace=0.05,
    )
    figure.text(0.02, 1 - 0.3 / figure.get_figheight(), "Load of the experts", size=13, weight="bold", color=_INK)
    figure.text(
        0.02,
        1 - 0.52 / figure.get_figheight(),
        "each row an expert: its share of the pairs (token, expert), relative to an even one",
        size=9,
        color=_MUTED,
    )
    most = max(2.0, *(max(rows[-1]) * len(rows[-1]) for rows in history.shares.values()))
    image: Any = None
    for place, (layer, rows) in enumerate(history.shares.items()):
        is_last = place == len(heights) - 1
        size = len(rows[0])
        relative = [[share * size for share in row] for row in rows]
        over_time = figure.add_subplot(grid[place, 0])
        image = over_time.imshow(
            [
                list(column)
                for column in zip(*([min(max(v, _LEAST), _MOST) for v in row] for row in relative), strict=True)
            ],
            aspect="auto",
            interpolation="nearest",
            cmap=colours,
            norm=norm,
            extent=(0, len(rows), size - 0.5, -0.5),
        )
        over_time.set_yticks([0, size - 1] if size > 1 else [0])
        ticks = _some(len(rows))
        over_time.set_xticks([tick + 0.5 for tick in ticks], [str(history.steps[t]) for t in ticks] if is_last else [])
        over_time.set_ylabel(layer, rotation=0, ha="right", va="center", size=9, color=_INK, labelpad=8)
        if is_last:
            over_time.set_xlabel("step", size=9, color=_MUTED)
        at_end = figure.add_subplot(grid[place, 1])
        final = relative[-1]
        shown = [colours(norm(min(max(value, _LEAST), _MOST))) for value in final]
        at_end.barh(range(size), final, color=shown, edgecolor=_MUTED, linewidth=0.4, height=0.78)
        at_end.axvline(1.0, color=_INK, linewidth=0.8)
        at_end.set(ylim=(size - 0.5, -0.5), xlim=(0, most))
        at_end.set_yticks([])
        at_end.text(
            1.0,
            1.02,
            f"max {max(final):.2f}",
            transform=at_end.transAxes,
            ha="right",
            va="bottom",
            size=7,
            color=_MUTED,
        )
        marks = [2**power for power in range(10) if 2**power <= most]
        at_end.set_xticks(marks, list(map(str, marks)) if is_last else [])
        if is_last:
            at_end.set_xlabel("at the end", size=9, color=_MUTED)
        for axes in (over_time, at_end):
            _tidy(axes)
    bar = figure.colorbar(image, cax=figure.add_subplot(grid[:, 2]), ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"])
    bar.ax.minorticks_off()
    _tidy(bar.ax)
    bar.outline.set_visible(False)
    figure.savefig(path)


def _some(count: int, most: int = 7) -> list[int]:
    """About that many places among so many, the first and the last one among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _tidy(axes: Any) -> None:
    axes.tick_params(length=0, labelsize=8, labelcolor=_MUTED)
    for spine in axes.spines.values():
        spine.set_visible(False)
