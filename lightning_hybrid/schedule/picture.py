"""Pictures of a timeline as swim-lanes: one lane per rank, time to the right.

Simulated and measured timelines look the same, so they can be laid side by side. Measured spans may have gaps, any
length, and small overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from lightning_hybrid.schedule.schedule_and_actions import NO_MICROBATCH, Kind
from lightning_hybrid.schedule.simulator import Span, Timeline
from lightning_hybrid.schedule.svg_frame_with_rank_lanes import DIGIT, Lanes
from lightning_hybrid.text import timed

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
            if span.action.microbatch != NO_MICROBATCH:
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
        for span in _lane_spans(timeline, rank):
            place = stages.index(span.action.stage) if span.action.kind is not Kind.OPTIMIZER else 0
            opacity = 1 - place / max(1, len(stages) - 1) * (1 - _LEAST_OPACITY)
            x, width = lanes.left + (span.start - begin) * scale, (span.end - span.start) * scale
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
    label = action.kind.value if action.microbatch == NO_MICROBATCH else str(action.microbatch)
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
