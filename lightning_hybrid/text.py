"""Numbers and tables as they are printed, alike everywhere: bytes, seconds, counts, columns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

WIDTH = 100  # characters of a line
_UNITS = ("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9)


def sized(count: float) -> str:
    """Return a number of bytes with three digits, in powers of 1000, as data sheets of devices give it."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB" if count >= 999.5 else f"{count:.3g} PB"


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit in which a duration reads best, and how many of it make a second."""
    if not seconds:
        return _UNITS[1]
    return next((unit for unit in _UNITS if abs(seconds) * unit[1] >= 1), _UNITS[-1])


def timed(seconds: float, unit: tuple[str, float] | None = None) -> str:
    """Return a duration with three digits, in a unit of its own if none is given."""
    name, per_second = unit or unit_of(seconds)
    size = seconds * per_second
    return f"{size:,.0f} {name}" if size >= 1000 else f"{size:.3g} {name}"


def contrasted(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with as many digits as make them differ, but at least six."""
    texts = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in range(6, 18))
    return next((both for both in texts if both[0] != both[1]), (f"{one:.6g}", f"{other:.6g}"))


def meant(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one; "" if none is near."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def meant_of(name: str, known: Iterable[str]) -> str:
    """As `meant`; if none is near, the end names the first ones."""
    return meant(name, known) or f"; there are {spanned_names([*known])}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 rank", "2 ranks" and "3 batches"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def spanned_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - 4} more" if len(names) > 5 else ""
    return ", ".join(names[: 4 if more else 5]) + more


def spanned(names: Sequence[str]) -> str:
    """Return the names of neighbours in short: the only one, or the first, the last and their number."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def spanned_within(names: Sequence[str], width: int) -> str:
    """Return the names of neighbours as `spanned`, in about so many characters.

    The last is written without what it has in common with the first; then the longer one loses its beginning.
    """
    if len(spanned(names)) <= width:
        return spanned(names)
    if len(names) == 1:
        return _end_of(names[0], width)
    first, last = names[0], names[-1]
    pairs = zip(first.split("."), last.split("."), strict=False)
    depth = next((depth for depth, (one, other) in enumerate(pairs) if one != other), 0)
    last = ".".join(last.split(".")[depth:])
    room = width - len(spanned(["", *names[1:-1], ""]))
    if len(first) >= len(last):
        first = _end_of(first, room - len(last))
    else:
        last = _end_of(last, room - len(first))
    return spanned([first, *names[1:-1], last])


def _end_of(name: str, width: int) -> str:
    """The end of a name, in so many characters but not less than six."""
    width = max(width, 6)
    return name if len(name) <= width else f"..{name[2 - width :]}"


def columns(rows: Sequence[Sequence[str]], *, right: int | None = None, wrapped: int | None = None) -> list[str]:
    """Return rows of cells as lines with aligned columns.

    Args:
        rows: Of as many cells each.
        right: The first of the columns that are flush right; none if None.
        wrapped: A column whose cells are broken behind commas and spaces, so that lines have 100 characters.
    """
    if not rows:
        return []
    right = len(rows[0]) if right is None else right
    if wrapped is not None:
        others = sum(max(map(len, column)) + 2 for i, column in enumerate(zip(*rows, strict=True)) if i != wrapped)
        rows = [line for row in rows for line in _broken(row, wrapped, max(16, WIDTH - others))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = (cell.rjust(width) if i >= right else cell.ljust(width) for i, (cell, width) in enumerate(cells))
        lines.append("  ".join(aligned).rstrip())
    return lines


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Return a text in lines, broken behind commas and spaces."""
    lines = [""]
    for word in re.split(r"(?<=[ ,])", text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def wrapped(text: str) -> str:
    """Return a text whose lines have at most 100 characters; what a line goes on with is indented further."""
    lines = []
    for line in text.splitlines():
        if len(line) <= WIDTH:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        first, *_ = wrap(line.strip(), WIDTH - len(indent))
        rest = wrap(line.strip()[len(first) :].strip(), WIDTH - len(indent) - 4)
        lines += [f"{indent}{first}", *(f"{indent}    {each}" for each in rest if each)]
    return "\n".join(lines)


def _broken(row: Sequence[str], column: int, width: int) -> list[list[str]]:
    parts = wrap(row[column], width)
    return [
        [part if i == column else "" if number else cell for i, cell in enumerate(row)]
        for number, part in enumerate(parts)
    ]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns, all but the first flush right, and an empty line."""
    print("\n".join([*columns(rows, right=1), ""]))
