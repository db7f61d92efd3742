"""What came out, for eyes and for exit codes."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Literal

from lightning_hybrid.verify.records.record_comparison import Difference

Outcome = Literal["same", "refused", "different", "failed"]


@dataclass(frozen=True)
class Report:
    """One layout against its reference.

    Attributes:
        layout: Its name.
        outcome: "same"; "refused" with a clear error before any parameter changed; "different"; or "failed".
        message: In one sentence why, for every outcome but "same".
        first: The first value that differs.
        num_differences: How many differ.
        steps: Compared training steps; of a run that failed, those that came before.
        floor: The largest relative noise floor of a parameter's update.
        notes: What else the user should know.
    """

    layout: str
    outcome: Outcome
    message: str = ""
    first: Difference | None = None
    num_differences: int = 0
    steps: int = 0
    floor: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        """Everything, as text."""
        lines = [f"{self.layout}: {self.outcome}" + (f": {self.message}" if self.message else "")]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def passes(self, *, strict: bool = False) -> bool:
        """Whether the layout kept the promise.

        Args:
            strict: A refusal does not.
        """
        return self.outcome == "same" or (self.outcome == "refused" and not strict)


def table(reports: list[Report], *, width: int = 120) -> str:
    """All reports as a table; with rich if it is there, as plain text otherwise.

    Args:
        reports: One per layout.
        width: Characters of a line.
    """
    floors = [f"{r.floor:.1g}" if r.steps and r.outcome != "failed" else "" for r in reports]
    rows = [[r.layout, r.outcome, str(r.steps), floor, r.message] for r, floor in zip(reports, floors, strict=True)]
    heads = ["layout", "outcome", "steps", "noise", "why"]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return _plain(heads, rows)
    drawn = Table(*heads)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(drawn)
    return out.getvalue().rstrip()


def _plain(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in [heads, *rows]) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]
    return "\n".join(line.rstrip() for line in lines)
