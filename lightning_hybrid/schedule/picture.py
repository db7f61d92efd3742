"""Pictures of a timeline as swim-lanes: one lane per rank, time to the right.

Simulated and measured timelines look the same, so they can be laid side by side. Measured spans may have gaps, any
length, and small overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

from lightning_hybrid.schedule.actions import Kind
from lightning_hybrid.schedule.simulator import Span, Timeline
from lightning_hybrid.text import sized, timed, unit_of

WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.REDUCE: "reduce",
    Kind.OPTIMIZER: "optimizer",
}
_FILL = {
    Kind.F: "#4c78a8",
    Kind.B: "#54a24b",
    Kind.I: "#7fbf6f",
    Kind.W: "#b5a642",
    Kind.REDUCE: "#e45756",
    Kind.OPTIMIZER: "#8a6bb1",
}
# Stages beyond a rank's first are drawn lighter, so that interleaving shows.
_LEAST_OPACITY = 0.55
_LEAST_WIDTH = 3.0  # of a box, however short its action is


def to_text(timeline: Timeline, width: int = 100) -> str:
    """Draw a timeline with characters, for a terminal.

    A span shows its microbatch (F of microbatch 3 as `F3--`) where there is room and is cut short where there is not;
    dots are idle time.
    """
    name_width = len(f"rank {timeline.num_ranks - 1}")
    begin, scale = _scale(timeline, width)
    lines = []
    for rank in range(timeline.num_ranks):
        lane = ["."] * width
        for span in _lane_spans(timeline, rank):
            first, last = round((span.start - begin) * scale), round((span.end - begin) * scale)
            first = min(first, width - 1)
            cells = max(1, min(last, width) - first)
            label = span.action.kind.value
            if span.action.microbatch >= 0:
                label += str(span.action.microbatch)
            # A number that is cut off would be read as another number.
            label = label if len(label) <= cells else label[0]
            lane[first : first + cells] = label.ljust(cells, "-")[:cells]
        lines.append(f"{f'rank {rank}':<{name_width}} {''.join(lane)}")
    end = timed(timeline.makespan_seconds)
    lines.append(f"{'':<{name_width}} 0{end:>{width - 1}}")
    lines.append(f"bubble {timeline.bubble:.1%}")
    return "\n".join(lines)


def to_svg(
    timeline: Timeline,
    title: str = "Pipeline timeline",
    *,
    columns: Mapping[str, Sequence[int]] | None = None,
    group_size: int = 0,
    caption: str | None = None,
) -> str:
    """Draw a timeline as a self-contained SVG document.

    Args:
        timeline: simulated or measured.
        title: the heading.
        columns: by heading, the numbers beside the lanes, such as the coordinates of the ranks; "rank 0" and so on
            without any.
        group_size: ranks that belong together, such as a pipeline; a gap follows each group.
        caption: a text beside the title; the bubble if None.
    """
    lanes = Lanes(timeline.num_ranks, columns, group_size)
    body = [*_legend(timeline), *lanes.labels(), *lanes.background(timeline.makespan_seconds)]
    begin, scale = _scale(timeline, lanes.width)
    for rank in range(timeline.num_ranks):
        stages = _stages(timeline, rank)
        for span in sorted(_lane_spans(timeline, rank), key=lambda span: span.start - span.end):  # the shortest on top
            place = stages.index(span.action.stage) if span.action.kind is not Kind.OPTIMIZER else 0
            opacity = 1 - place / max(1, len(stages) - 1) * (1 - _LEAST_OPACITY)
            width = max(_LEAST_WIDTH, (span.end - span.start) * scale)
            x = lanes.left + min((span.start - begin) * scale, lanes.width - width)
            body += _box(span, lanes, x, width, opacity)
    return lanes.document(title, f"bubble {timeline.bubble:.1%}" if caption is None else caption, body)


def _lane_spans(timeline: Timeline, rank: int) -> list[Span]:
    """What a rank did, first to last, without what took no time."""
    spans = [span for span in timeline.spans if span.rank == rank and span.end > span.start]
    return sorted(spans, key=lambda span: (span.start, span.end))


def _stages(timeline: Timeline, rank: int) -> list[int]:
    """The stages of a rank; an optimizer step is of all of them."""
    spans = (span for span in timeline.spans if span.rank == rank and span.action.kind is not Kind.OPTIMIZER)
    return sorted({span.action.stage for span in spans})


def _scale(timeline: Timeline, width: float) -> tuple[float, float]:
    """When the picture begins, and its width per second."""
    begin = min((span.start for span in timeline.spans), default=0.0)
    return begin, width / (timeline.makespan_seconds or 1.0)


def _box(span: Span, lanes: Lanes, x: float, width: float, opacity: float) -> list[str]:
    action = span.action
    stage = "" if action.kind is Kind.OPTIMIZER else f"stage {action.stage}, "
    hint = f"{action}: {WORDS[action.kind]}, {stage}{timed(span.end - span.start)}"
    # A white edge keeps neighbours apart; it must not eat up narrow boxes.
    edge = min(1.0, width / 4)
    parts = [
        f'<g><title>{escape(hint)}</title><rect x="{x:.2f}" y="{lanes.top(span.rank)}" width="{width:.2f}" '
        f'height="{lanes.height}" rx="{min(3.0, width / 4):.2f}" fill="{_FILL[action.kind]}" '
        f'fill-opacity="{opacity:.2f}" stroke="#ffffff" stroke-width="{edge:.2f}"/>'
    ]
    label = action.kind.value if action.microbatch < 0 else str(action.microbatch)
    if width >= len(label) * DIGIT + 4:
        parts.append(
            f'<text x="{x + width / 2:.2f}" y="{lanes.text_line(span.rank):g}" font-size="11" text-anchor="middle" '
            f'fill="{"#ffffff" if opacity > 0.7 else "#111111"}">{label}</text>'
        )
    parts.append("</g>")
    return parts


def _legend(timeline: Timeline) -> list[str]:
    drawn = {span.action.kind for span in timeline.spans if span.end > span.start}
    entries = [(kind, WORDS[kind]) for kind in Kind if kind in drawn]
    parts, x = [], 20.0
    for kind, word in entries:
        parts.append(f'<rect x="{x:g}" y="43" width="12" height="12" rx="2" fill="{_FILL[kind]}"/>')
        parts.append(f'<text x="{x + 18:g}" y="53" font-size="12">{word}</text>')
        x += 18 + len(word) * DIGIT + 24
    note = "numbers are microbatches"
    if any(len(_stages(timeline, rank)) > 1 for rank in range(timeline.num_ranks)):
        note += ", later stages of a rank are lighter"
    parts.append(f'<text x="{x:g}" y="53" font-size="12" fill="#777777">{note}</text>')
    return parts


WIDTH, RIGHT = 1000, 20
DIGIT = 6.6  # width of one character of a label
_LEFT, _COLUMN = 64, 58  # room for "rank 12", and for each column of labels
_TOP, _HEADINGS = 74, 16
_AXIS = 44  # room below the lanes
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Lanes:
    """The lanes of a picture, from top to bottom.

    Args:
        num_lanes: the number of lanes.
        columns: by heading, the number that each lane has, such as its rank and its coordinates; without any, the
            lanes are "rank 0" and so on.
        group_size: lanes that belong together, such as a pipeline; a gap follows each group.
        right: room to the right of the lanes.
    """

    num_lanes: int
    columns: Mapping[str, Sequence[int]] | None = None
    group_size: int = 0
    right: int = RIGHT

    @property
    def height(self) -> int:
        """The height of a lane: many ranks have thinner ones."""
        return 30 if self.num_lanes <= 8 else 22 if self.num_lanes <= 16 else 16

    @property
    def _gap(self) -> int:
        return 8 if self.num_lanes <= 8 else 4

    @property
    def left(self) -> int:
        """Where the lanes begin."""
        return _LEFT if not self.columns else 20 + _COLUMN * len(self.columns)

    @property
    def width(self) -> int:
        """The length of a lane."""
        return WIDTH - self.left - self.right

    def top(self, lane: int) -> int:
        """Where a lane begins, from the top of the picture."""
        groups = lane // self.group_size if self.group_size > 1 else 0
        return _TOP + (_HEADINGS if self.columns else 0) + lane * (self.height + self._gap) + groups * self._gap

    @property
    def bottom(self) -> int:
        """Where the axis of time is."""
        return self.top(self.num_lanes - 1) + self.height + self._gap if self.num_lanes else self.top(0)

    def text_line(self, lane: int) -> float:
        """The baseline of a text in the middle of a lane."""
        return self.top(lane) + self.height / 2 + 4

    def labels(self) -> list[str]:
        """The names of the lanes."""
        parts = []
        for number, (heading, values) in enumerate((self.columns or {}).items()):
            x = 20 + _COLUMN * (number + 1) - 14
            parts.append(
                f'<text x="{x}" y="{self.top(0) - 7}" font-size="11" text-anchor="end" fill="#777777">'
                f"{escape(heading)}</text>"
            )
            parts += [_label(x, self.text_line(lane), str(value)) for lane, value in enumerate(values)]
        if not self.columns:
            parts += [_label(self.left - 10, self.text_line(i), f"rank {i}") for i in range(self.num_lanes)]
        return parts

    def background(self, seconds: float) -> list[str]:
        """Empty lanes, and the axis of a time."""
        scale = self.width / (seconds or 1.0)
        unit, step = unit_of(seconds), _tick_seconds(seconds)
        end = self.left + seconds * scale
        parts = [
            f'<rect x="{self.left}" y="{self.top(lane)}" width="{end - self.left:.2f}" height="{self.height}" rx="3" '
            f'fill="#f1f1ee"/>'
            for lane in range(self.num_lanes)
        ]
        for i in range((int(seconds / step + 1e-9) if step else 0) + 1):
            x = self.left + i * step * scale
            parts.append(
                f'<line x1="{x:.2f}" y1="{self.bottom}" x2="{x:.2f}" y2="{self.bottom + 5}" stroke="#999999"/>'
                f'<text x="{min(x, WIDTH - 24):.2f}" y="{self.bottom + 19}" font-size="11" text-anchor="middle" '
                f'fill="#555555">{timed(i * step, unit) if i else 0}</text>'
            )
        parts.append(f'<line x1="{self.left}" y1="{self.bottom}" x2="{end:.2f}" y2="{self.bottom}" stroke="#999999"/>')
        return parts

    def document(self, title: str, caption: str, body: Sequence[str]) -> str:
        """A self-contained SVG document.

        Args:
            title: the heading, to the left.
            caption: a text to the right of it.
            body: what is drawn.
        """
        height = self.bottom + _AXIS
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
                f'height="{height}" font-family="{_FONT}" fill="#222222">',
                f"<title>{escape(title)}</title>",
                f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
                f'<text x="20" y="28" font-size="16" font-weight="600">{escape(title)}</text>',
                f'<text x="{WIDTH - RIGHT}" y="28" font-size="14" text-anchor="end">{escape(caption)}</text>',
                *body,
                "</svg>\n",
            ]
        )


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="12" text-anchor="end">{text}</text>'


def _tick_seconds(seconds: float) -> float:
    """A round distance (1, 2 or 5 times a power of ten) that makes 5 to 12 ticks."""
    if seconds <= 0:
        return 0.0
    step = 10.0**-12
    while True:
        for factor in (1, 2, 5):
            if seconds / (step * factor) <= 12:
                return step * factor
        step *= 10


_MEMORY_FILL, _MEMORY_LINE = "#a5bfd9", "#4c78a8"
_ROOM_FOR_SIZES = 160


class MemorySample(NamedTuple):
    """The memory that a rank used at one time (seconds)."""

    rank: int
    time: float
    num_bytes: int


def memory_to_svg(
    samples: Sequence[MemorySample],
    num_ranks: int,
    title: str = "Memory over a step",
    *,
    kind: str = "memory",
    columns: Mapping[str, Sequence[int]] | None = None,
    group_size: int = 0,
) -> str:
    """Draw the memory of each rank as a self-contained SVG document.

    All lanes have one scale, from the smallest sample of any rank to the largest. The numbers to the right are the
    largest and the smallest sample of the rank.

    Args:
        samples: of all ranks, in any order.
        num_ranks: number of lanes.
        title: the heading.
        kind: what was measured, such as "memory of tensors".
        columns: as for `to_svg`.
        group_size: as for `to_svg`.
    """
    lanes = Lanes(num_ranks, columns, group_size, right=_ROOM_FOR_SIZES)
    begin = min((sample.time for sample in samples), default=0.0)
    seconds = max((sample.time for sample in samples), default=0.0) - begin
    sizes = [sample.num_bytes for sample in samples] or [0]
    least, most = min(sizes), max(sizes)
    scale = f"a lane is {sized(least)} at its bottom and {sized(most)} at its top"
    body = [
        f'<text x="20" y="53" font-size="12" fill="#777777">{escape(kind)}; {scale}</text>',
        *lanes.labels(),
        *lanes.background(seconds),
    ]
    for rank in range(num_ranks):
        row = sorted((sample.time, sample.num_bytes) for sample in samples if sample.rank == rank)
        if not row:
            continue
        points = [
            (
                lanes.left + (time - begin) * lanes.width / (seconds or 1.0),
                lanes.top(rank) + lanes.height * (1 - (size - least) / ((most - least) or 1)),
            )
            for time, size in row
        ]
        bottom = lanes.top(rank) + lanes.height
        area = [(points[0][0], bottom), *points, (points[-1][0], bottom)]
        body.append(f'<polygon points="{_joined(area)}" fill="{_MEMORY_FILL}"/>')
        body += [
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{_MEMORY_LINE}"/>'
            for (x1, y1), (x2, y2) in pairwise(points)
        ]
        body.append(
            f'<text x="{lanes.left + lanes.width + 8}" y="{lanes.text_line(rank):g}" font-size="12">'
            f"{sized(min(size for _, size in row))} to {sized(max(size for _, size in row))}</text>"
        )
    return lanes.document(title, f"largest {sized(most)}", body)


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
