"""Pictures of a timeline as swim-lanes: one lane per rank, time to the right.

Simulated and measured timelines look the same, so they can be laid side by side. Measured spans may have gaps, any
length, and small overlaps.
"""

from __future__ import annotations

from html import escape

from lightning_hybrid.schedule.schedule_and_actions import Kind
from lightning_hybrid.schedule.simulator import Span, Timeline

_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.REDUCE: "reduce",
}
_FILL = {Kind.F: "#4c78a8", Kind.B: "#54a24b", Kind.I: "#7fbf6f", Kind.W: "#b5a642", Kind.REDUCE: "#e45756"}
# Stages beyond a rank's first are drawn lighter, so that interleaving shows.
_LEAST_OPACITY = 0.55

_WIDTH, _LEFT, _RIGHT = 1000, 64, 20
_TOP, _LANE, _GAP = 74, 30, 8
_AXIS = 44  # room below the lanes
_DIGIT = 6.6  # width of one character of a label
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def to_text(timeline: Timeline, width: int = 100) -> str:
    """Draw a timeline with characters, for a terminal.

    A span shows its microbatch (F of microbatch 3 as `F3--`) where there is room and is cut short where there is not;
    dots are idle time.

    Args:
        timeline: simulated or measured.
        width: characters of the makespan.
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
            if span.action.kind is not Kind.REDUCE:
                label += str(span.action.microbatch)
            # A number that is cut off would be read as another number.
            label = label if len(label) <= cells else label[0]
            lane[first : first + cells] = label.ljust(cells, "-")[:cells]
        lines.append(f"{f'rank {rank}':<{name_width}} {''.join(lane)}")
    seconds = timeline.makespan_seconds
    end = _duration(seconds, _unit(seconds))
    lines.append(f"{'':<{name_width}} 0{end:>{width - 1}}")
    lines.append(f"bubble {timeline.bubble:.1%}")
    return "\n".join(lines)


def to_svg(timeline: Timeline, title: str = "Pipeline timeline") -> str:
    """Draw a timeline as a self-contained SVG document.

    Args:
        timeline: simulated or measured.
        title: the heading.
    """
    lanes_bottom = _TOP + timeline.num_ranks * (_LANE + _GAP)
    height = lanes_bottom + _AXIS
    body = [
        f'<text x="{_LEFT}" y="28" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="28" font-size="14" text-anchor="end">bubble {timeline.bubble:.1%}</text>',
        *_legend(timeline),
        *_axis(timeline, lanes_bottom),
    ]
    begin, scale = _scale(timeline, _WIDTH - _LEFT - _RIGHT)
    for rank in range(timeline.num_ranks):
        top = _TOP + rank * (_LANE + _GAP)
        body.append(
            f'<text x="{_LEFT - 10}" y="{top + _LANE / 2 + 4:g}" font-size="12" text-anchor="end">rank {rank}</text>'
        )
        stages = sorted({span.action.stage for span in timeline.spans if span.rank == rank})
        for span in _lane_spans(timeline, rank):
            place = stages.index(span.action.stage) / max(1, len(stages) - 1)
            opacity = 1 - place * (1 - _LEAST_OPACITY)
            body += _box(span, _LEFT + (span.start - begin) * scale, (span.end - span.start) * scale, top, opacity)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="{_FONT}" fill="#222222">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _lane_spans(timeline: Timeline, rank: int) -> list[Span]:
    """What a rank did, first to last, without what took no time."""
    spans = [span for span in timeline.spans if span.rank == rank and span.end > span.start]
    return sorted(spans, key=lambda span: (span.start, span.end))


def _scale(timeline: Timeline, width: float) -> tuple[float, float]:
    """When the picture begins, and its width per second."""
    begin = min((span.start for span in timeline.spans), default=0.0)
    return begin, width / (timeline.makespan_seconds or 1.0)


def _box(span: Span, x: float, width: float, top: int, opacity: float) -> list[str]:
    action = span.action
    unit = _unit(span.end - span.start)
    hint = f"{action}: {_WORDS[action.kind]}, stage {action.stage}, {_duration(span.end - span.start, unit)}"
    # A white edge keeps neighbours apart; it must not eat up narrow boxes.
    edge = min(1.0, width / 4)
    parts = [
        f'<g><title>{escape(hint)}</title><rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_LANE}" '
        f'rx="{min(3.0, width / 4):.2f}" fill="{_FILL[action.kind]}" fill-opacity="{opacity:.2f}" '
        f'stroke="#ffffff" stroke-width="{edge:.2f}"/>'
    ]
    label = "R" if action.kind is Kind.REDUCE else str(action.microbatch)
    if width >= len(label) * _DIGIT + 4:
        parts.append(
            f'<text x="{x + width / 2:.2f}" y="{top + _LANE / 2 + 4:g}" font-size="11" text-anchor="middle" '
            f'fill="{"#ffffff" if opacity > 0.7 else "#111111"}">{label}</text>'
        )
    parts.append("</g>")
    return parts


def _legend(timeline: Timeline) -> list[str]:
    drawn = {span.action.kind for span in timeline.spans if span.end > span.start}
    entries = [(kind, _WORDS[kind]) for kind in Kind if kind in drawn]
    parts, x = [], float(_LEFT)
    for kind, word in entries:
        parts.append(f'<rect x="{x:g}" y="43" width="12" height="12" rx="2" fill="{_FILL[kind]}"/>')
        parts.append(f'<text x="{x + 18:g}" y="53" font-size="12">{word}</text>')
        x += 18 + len(word) * _DIGIT + 24
    note = "numbers are microbatches"
    if len({span.action.stage for span in timeline.spans}) > timeline.num_ranks:
        note += ", later stages of a rank are lighter"
    parts.append(f'<text x="{x:g}" y="53" font-size="12" fill="#777777">{note}</text>')
    return parts


def _axis(timeline: Timeline, lanes_bottom: int) -> list[str]:
    seconds = timeline.makespan_seconds
    _, scale = _scale(timeline, _WIDTH - _LEFT - _RIGHT)
    unit = _unit(seconds)
    step = _tick_seconds(seconds)
    end = _LEFT + seconds * scale
    parts = []
    for rank in range(timeline.num_ranks):
        top = _TOP + rank * (_LANE + _GAP)
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{end - _LEFT:.2f}" height="{_LANE}" rx="3" fill="#f1f1ee"/>')
    count = int(seconds / step + 1e-9) if step else 0
    for i in range(count + 1):
        x = _LEFT + i * step * scale
        parts.append(
            f'<line x1="{x:.2f}" y1="{lanes_bottom}" x2="{x:.2f}" y2="{lanes_bottom + 5}" stroke="#999999"/>'
            f'<text x="{x:.2f}" y="{lanes_bottom + 19}" font-size="11" text-anchor="middle" fill="#555555">'
            f"{_duration(i * step, unit) if i else 0}</text>"
        )
    parts.append(f'<line x1="{_LEFT}" y1="{lanes_bottom}" x2="{end:.2f}" y2="{lanes_bottom}" stroke="#999999"/>')
    return parts


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


def _unit(seconds: float) -> tuple[str, float]:
    """The unit in which a duration reads best, and how many of it make a second."""
    for name, per_second in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * per_second >= 1:
            return name, per_second
    return "ns", 1e9


def _duration(seconds: float, unit: tuple[str, float]) -> str:
    name, per_second = unit
    return f"{seconds * per_second:.4g} {name}"
