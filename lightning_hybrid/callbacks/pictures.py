"""Pictures as files and as images of the Trainer's loggers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lightning.pytorch.utilities.rank_zero import rank_zero_info

_DPI = 200
_PLOTS = (".png", ".svg", ".pdf")


def plot_path(path: str | Path, default: str) -> Path:
    """Return the path of a plot that matplotlib writes; a ValueError, with a path to set, for another suffix."""
    if (found := Path(path)).suffix not in _PLOTS:
        raise ValueError(f"path={str(path)!r} must end in {', '.join(_PLOTS)}; set path={default!r}")
    return found


def check_counts(**counts: int) -> None:
    """Check arguments that are numbers of steps or of something else.

    Raises:
        TypeError: One is no int.
        ValueError: One is below 1.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def save_plot(figure: Any, path: Path, loggers: Sequence[Any], name: str, step: int) -> None:
    """Write a matplotlib figure to a file, and send it to the loggers that take images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    log_picture(loggers, name, lambda: figure, step)


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
    """Sends a picture to the loggers that take images.

    These are loggers with ``log_image(key, images, step)``, as that of Weights & Biases, and those whose ``experiment``
    has ``add_image``, as that of TensorBoard. They receive pixels [height, width, 3] of uint8.

    Args:
        loggers: Of the Trainer.
        name: The key of the image.
        draw: Returns a matplotlib figure; called if a logger takes it.
        step: The optimizer step.
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
