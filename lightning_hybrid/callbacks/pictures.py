"""What callbacks show: numbers for the loggers, plots in one style, pictures as files and as images of loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

INK, MUTED, RULE = "#222222", "#777777", "#e4e4e0"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#b8b0ac"
_DPI = 200
_PLOTS = (".png", ".svg", ".pdf")

Series = dict[str, list[tuple[int, float]]]  # (step, value) by the name of the metric

# -- numbers -----------------------------------------------------------------------------------------------------------


def gather_rows(row: Tensor, strategy: Any) -> Tensor:
    """Gathers the rows of all ranks on the host, (n,) -> (ranks, n); collective over all ranks."""
    group, size = _all_ranks(strategy)
    if size == 1:
        return row[None].cpu()
    row = row.to(strategy.root_device)
    rows = [torch.empty_like(row) for _ in range(size)]
    dist.all_gather(rows, row, group=group)
    return torch.stack(rows).cpu()


def sum_over_ranks(row: Tensor, strategy: Any) -> Tensor:
    """Sums a row of numbers, of any shape, over all ranks, on the host; collective over these."""
    group, size = _all_ranks(strategy)
    row = row.to(strategy.root_device)
    if size > 1:
        dist.all_reduce(row, group=group)
    return row.cpu()


def _all_ranks(strategy: Any) -> tuple[Any, int]:
    """The group of all ranks, and their number."""
    if not dist.is_initialized():
        return None, 1
    # Not the default group where there is a mesh: beside callbacks of the user that has the replicas alone.
    mesh = getattr(strategy, "mesh", None)
    group = None if mesh is None else mesh.group("world")
    return group, dist.get_world_size(group)


def keep_series(series: Series, metrics: Mapping[str, Any], step: int) -> None:
    """Append numbers to their series, which draw a run without a logger."""
    for name, value in metrics.items():
        series.setdefault(name, []).append((step, float(value)))


def log_metrics(trainer: Any, metrics: Mapping[str, Any], step: int) -> None:
    """Send numbers to the loggers, under this step."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)


def is_wanted(step: int, first: int, every: int | None) -> bool:
    """Return whether a step is measured: the first one, and each of an interval after it, if there is one."""
    return step == first if every is None else step >= first and (step - first) % every == 0


def check_counts(**counts: int | None) -> None:
    """Check arguments that are numbers of steps or of something else; None is no number.

    Raises:
        TypeError: One is no int.
        ValueError: One is below 1.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


# -- plots -------------------------------------------------------------------------------------------------------------


def plot_path(path: str | Path | None, default: str) -> Path | None:
    """Return the path of a plot that matplotlib writes, if there is one.

    Raises:
        ValueError: It has another suffix; ``default`` is a path to set.
    """
    if path is not None and Path(path).suffix not in _PLOTS:
        raise ValueError(f"path={str(path)!r} must end in {', '.join(_PLOTS)}; set path={default!r}")
    return None if path is None else Path(path)


def numbered(path: Path, step: int, every: int | None) -> Path:
    """Return a path with the number of its step, if there are several."""
    return path if every is None else path.with_stem(f"{path.stem}-{step}")


def show_plot(
    draw: Callable[[], Any],
    path: Path | None,
    loggers: Sequence[Any],
    name: str,
    step: int,
    *,
    instead: str = "leave path out",
) -> None:
    """Write a matplotlib figure to a file, if there is one, and send it to the loggers that take images.

    Raises:
        ImportError: matplotlib is missing; ``instead`` is what to do without.
    """
    if path is not None:
        try:
            figure = draw()
        except ImportError as error:
            raise ImportError(f"{path} needs matplotlib; pip install matplotlib, or {instead}") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        log_picture(loggers, name, lambda: figure, step)
    else:
        log_picture(loggers, name, draw, step)


def tidy(axes: Any, *, size: int = 9, hidden: Sequence[str] = ("top", "right", "left"), grid: bool = True) -> None:
    """Give axes the style of all plots: small grey labels, no ticks, few lines."""
    axes.tick_params(which="both", length=0, labelsize=size, labelcolor=MUTED)
    axes.spines[list(hidden)].set_visible(False)
    if grid:
        axes.grid(axis="y", color=RULE, linewidth=0.6)


def unit_index(units: Sequence[str], most: float, base: int = 1024) -> int:
    """Return the index of the largest unit that is at most a number, of units each ``base`` times the one before."""
    return max(number for number in range(len(units)) if number == 0 or most >= base**number)


# -- pictures ----------------------------------------------------------------------------------------------------------


def write_picture(svg: str, path: Path) -> None:
    """Writes an SVG document to a file, as it is or, if the path ends in .png, rendered with matplotlib.

    Raises:
        ImportError: It is to be rendered, and matplotlib is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(svg, encoding="utf-8")
        return
    try:
        figure = figure_of(svg)
    except ImportError as error:
        raise ImportError(f"{path} needs matplotlib; pip install matplotlib, or end the path in .svg") from error
    figure.savefig(path)


def log_picture(loggers: Sequence[Any], name: str, draw: Callable[[], Any], step: int) -> None:
    """Sends a picture to the loggers that take images; ``draw`` makes the matplotlib figure if there are any.

    These are loggers with ``log_image(key, images, step)``, as that of Weights & Biases, and those whose ``experiment``
    has ``add_image``, as that of TensorBoard. They receive pixels [height, width, 3] of uint8.
    """
    senders = []
    for logger in loggers:
        if callable(log := getattr(logger, "log_image", None)):
            senders.append(lambda pixels, log=log: log(key=name, images=[pixels], step=step))
        elif callable(add := getattr(getattr(logger, "experiment", None), "add_image", None)):
            senders.append(lambda pixels, add=add: add(name, pixels, step, dataformats="HWC"))
    if not senders:
        return
    try:
        pixels = _pixels(draw())
    except ImportError:
        rank_zero_info(
            f"the image {name!r} is not sent to the loggers, as matplotlib is missing; pip install matplotlib"
        )
        return
    for send in senders:
        send(pixels)


def figure_of(svg: str) -> Any:
    """Draws an SVG document of boxes, polygons, lines and lines of text as a matplotlib figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    figure = Figure(figsize=(width / 100, height / 100), dpi=_DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for element in root.iter():
        given = {name: _number(value) for name, value in element.attrib.items()}
        kind = element.tag.rpartition("}")[2]
        if kind == "rect":
            _draw_box(axes, given)
        elif kind == "line":
            axes.plot([given["x1"], given["x2"]], [given["y1"], given["y2"]], color=given["stroke"], linewidth=0.72)
        elif kind == "polygon":
            points = [tuple(map(float, point.split(","))) for point in given["points"].split()]
            axes.fill(*zip(*points, strict=True), color=given["fill"], linewidth=0)
        elif kind == "text":
            axes.text(
                given["x"],
                given["y"],
                element.text or "",
                fontsize=given["font-size"] * 0.72,
                fontweight="bold" if given.get("font-weight", 400) >= 600 else "normal",
                color=given.get("fill", root.attrib["fill"]),
                ha={"middle": "center", "end": "right"}.get(given.get("text-anchor", "start"), "left"),
                va="baseline",
            )
    return figure


def _draw_box(axes: Any, given: dict[str, Any]) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y, radius = given.get("x", 0.0), given.get("y", 0.0), given.get("rx", 0.0)
    box = FancyBboxPatch(
        (x + radius, y + radius),
        max(0.0, given["width"] - 2 * radius),
        given["height"] - 2 * radius,
        boxstyle=f"round,pad={radius},rounding_size={radius}" if radius else "square,pad=0",
        facecolor=given["fill"],
        alpha=given.get("fill-opacity", 1.0),
        edgecolor=given.get("stroke", "none"),
        linewidth=given.get("stroke-width", 0.0) * 0.72,  # pixels to points
    )
    axes.add_patch(box)


def _pixels(figure: Any) -> Any:
    """Renders a matplotlib figure to an array [height, width, 3] of uint8."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
