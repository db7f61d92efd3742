"""The frame that pictures of ranks share: a title, a lane with its labels for each rank, and an axis of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lightning_hybrid.text import timed, unit_of

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
