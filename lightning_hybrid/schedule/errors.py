"""The error of schedules and programs: it shows the rows of all ranks, and points at the position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_POINTER = "<-- ERROR HERE"


class ScheduleError(ValueError):
    """A schedule or program cannot run as written."""

    @classmethod
    def at(
        cls,
        summary: str,
        rows: Sequence[Iterable[object]],
        positions: Mapping[int, int] | None = None,
        details: Iterable[str] = (),
    ) -> ScheduleError:
        """An error that shows every rank's row, pointing at one position in some of them.

        Args:
            summary: what is wrong, in a line.
            rows: for every rank, what it does; each entry is shown by its `str`.
            positions: for the offending ranks, the index into their row.
            details: further lines, such as what each rank waits for.
        """
        positions = positions or {}
        lines = [summary, *(f"  {detail}" for detail in details)]
        for rank, row in enumerate(rows):
            words = [str(entry) for entry in row]
            if rank in positions:
                words.insert(positions[rank] + 1, _POINTER)
            lines.append(f"rank {rank}: {'  '.join(words)}")
        return cls("\n".join(lines))
