"""Callback that plots the measured timeline of a pipeline in one training step, and compares it to its schedule.

Each rank records when its actions ran. This callback gathers the records of one pipeline, on one clock, and plots them
as swim-lanes, each action from the time when its inputs were available. The bound is the same actions, with the same
durations, without gaps between them: time lost beyond it went to transfers, dispatch and waiting for a core.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter, time
from typing import Any
from xml.etree import ElementTree

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hybrid.schedule import Portals, Schedule, Span, Timeline, to_svg
from lightning_hybrid.schedule.simulator import without_losses, without_waits

_SUFFIXES = (".svg", ".png")


class PipelineTimeline(Callback):
    """Writes a swim-lane plot of a training step and logs its bubble.

    The bubble and the schedule's own bound are printed, and logged as "pipeline_bubble" and "pipeline_bubble_bound"
    where the trainer has loggers. A measurement is taken between two steps and costs one small collective; all other
    steps cost nothing. Ranks in the picture are pipeline coordinates; it shows the first replica, of which it is the
    first pipeline beside tensor or context ranks.

    Args:
        path: where the picture goes; its suffix, ".svg" or ".png", says which kind (PNG needs matplotlib). With
            `every_n_steps` the step's number is put before the suffix.
        step: the optimizer step to measure, counted from 1; the first ones are slower than the others.
        every_n_steps: interval of further steps to measure.

    Raises:
        TypeError: a number of steps is no int.
        ValueError: a number of steps is below 1, or the path has another suffix.
    """

    def __init__(self, path: str | Path = "timeline.svg", step: int = 10, every_n_steps: int | None = None) -> None:
        self.path = Path(path)
        if self.path.suffix not in _SUFFIXES:
            raise ValueError(f"path={str(path)!r} must end in {' or '.join(_SUFFIXES)}; set path='timeline.svg'")
        for name, value in (("step", step), ("every_n_steps", every_n_steps)):
            if name == "every_n_steps" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an int; steps are counted from 1")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1; steps are counted from 1")
        self.step = step
        self.every_n_steps = every_n_steps
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Broadcasts the steps to measure from the first rank; reports a run without pipeline stages."""
        self._last_step = trainer.global_step
        if not _is_pipeline(trainer.strategy):
            rank_zero_info(
                "PipelineTimeline draws nothing: this run has one pipeline stage; set pipeline_parallel_size=2 or more"
            )
            return
        # A rank that waited for one with another step would hang.
        self.step, self.every_n_steps = trainer.strategy.broadcast((self.step, self.every_n_steps))
        if trainer.strategy.root_device.type != "cpu" and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
            rank_zero_warn(
                "PipelineTimeline measures when the host is done with an action, and on a GPU the host runs ahead;"
                " set CUDA_LAUNCH_BLOCKING=1 for a run that is measured"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measures the step that has just ended, if it was requested; collective over the first pipeline."""
        step, strategy = trainer.global_step, trainer.strategy
        is_new, self._last_step = step > self._last_step, step  # batches that are only accumulated end no step
        if not (is_new and self._is_wanted(step) and _is_pipeline(strategy)):
            return
        if any(strategy.mesh.rank_in(axis) for axis in ("data", "cp", "tp")):  # type: ignore[attr-defined]
            return
        timeline = _gather(strategy)
        if timeline is None:
            return
        self._report(trainer, *work_and_bound(timeline, strategy.run.plan.first.assignment), step)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns if training ended before the step."""
        if _is_pipeline(trainer.strategy) and trainer.global_step < self.step:
            rank_zero_warn(
                f"PipelineTimeline wrote no picture: training ended after step {trainer.global_step}, before step="
                f"{self.step}; set a smaller step"
            )

    def _is_wanted(self, step: int) -> bool:
        if self.every_n_steps is None or step < self.step:
            return step == self.step
        return (step - self.step) % self.every_n_steps == 0

    def _report(self, trainer: Trainer, timeline: Timeline, bound: Timeline, step: int) -> None:
        path = self.path
        if self.every_n_steps is not None:
            path = path.with_stem(f"{path.stem}-{step}")
        path.parent.mkdir(parents=True, exist_ok=True)
        title = f"Step {step}, measured; the schedule's own bubble is {bound.bubble:.1%}"
        svg = to_svg(timeline, title=title)
        if path.suffix == ".svg":
            path.write_text(svg, encoding="utf-8")
        else:
            _write_png(svg, path)
        rank_zero_info(
            f"step {step}: bubble {timeline.bubble:.1%} measured, {bound.bubble:.1%} by the schedule"
            f" ({1000 * timeline.makespan_seconds:.0f} ms measured, {1000 * bound.makespan_seconds:.0f} ms"
            f" by the schedule); {path}"
        )
        for logger in trainer.loggers:
            metrics = {"pipeline_bubble": timeline.bubble, "pipeline_bubble_bound": bound.bubble}
            logger.log_metrics(metrics, step=step)


def _is_pipeline(strategy: Any) -> bool:
    layout = getattr(strategy, "layout", None)
    return layout is not None and layout.pipeline_parallel_size > 1


def _gather(strategy: Any) -> Timeline | None:
    """Gathers the spans of all ranks of this pipeline on one clock; returns them on the first rank, None elsewhere."""
    group = strategy.mesh.group("pp")
    local = time() - perf_counter(), strategy.spans
    rows: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(local, rows, group=group, group_dst=0)
    if rows is None:
        return None
    spans = [span._replace(start=span.start + offset, end=span.end + offset) for offset, row in rows for span in row]
    begin = min((span.start for span in spans), default=0.0)
    return Timeline(
        tuple(span._replace(start=span.start - begin, end=span.end - begin) for span in spans), group.size()
    )


def work_and_bound(timeline: Timeline, assignment: Any) -> tuple[Timeline, Timeline]:
    """Returns the measured actions of one pipeline without waiting times, and the same as if run without gaps."""
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in sorted(timeline.spans, key=lambda span: span.start):
        rows[span.rank].append(span)
    schedule = Schedule(
        name="measured",
        num_ranks=timeline.num_ranks,
        stages_per_rank=assignment.num_stages // timeline.num_ranks,
        num_microbatches=1 + max(span.action.microbatch for span in timeline.spans),
        actions=tuple(tuple(span.action for span in row) for row in rows),
    )
    portals = Portals(frozenset(assignment.portals), frozenset(assignment.gradient_portals()))
    worked = without_waits(timeline, schedule, portals)
    return worked, without_losses(worked, schedule, portals)


def _write_png(svg: str, path: Path) -> None:
    """Renders the SVG of a timeline, which has only boxes, lines and lines of text, with matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
    except ImportError as error:
        raise ImportError(f"{path} needs matplotlib; pip install matplotlib, or end the path in .svg") from error

    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    figure = Figure(figsize=(width / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        given = {name: _number(value) for name, value in element.attrib.items()}
        if kind == "rect":
            x, y = given.get("x", 0.0), given.get("y", 0.0)
            radius = given.get("rx", 0.0)
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
        elif kind == "line":
            axes.plot([given["x1"], given["x2"]], [given["y1"], given["y2"]], color=given["stroke"], linewidth=0.72)
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
    figure.savefig(path, dpi=200)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
