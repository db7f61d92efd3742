"""A picture of the memory that ranks used over one step: one lane per rank, time to the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from lightning_hybrid.schedule.svg_frame_with_rank_lanes import Lanes
from lightning_hybrid.text import sized

_FILL, _LINE = "#a5bfd9", "#4c78a8"
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
        body.append(f'<polygon points="{_joined(area)}" fill="{_FILL}"/>')
        body += [
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{_LINE}"/>'
            for (x1, y1), (x2, y2) in pairwise(points)
        ]
        body.append(
            f'<text x="{lanes.left + lanes.width + 8}" y="{lanes.text_line(rank):g}" font-size="12">'
            f"{sized(min(size for _, size in row))} to {sized(max(size for _, size in row))}</text>"
        )
    return lanes.document(title, f"largest {sized(most)}", body)


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
