"""Budgets of memory as text: a number of bytes with its unit, or a percentage of the free memory."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_UNITS = {"B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+|%)\s*")
SPELLINGS = "a number of bytes with its unit such as '6GiB' or '500 MB', or a share of the free memory such as '50%'"


class Budget(NamedTuple):
    """Bytes that a rank may use; one of the two is set."""

    nbytes: int | None = None  # a number of bytes
    share: float | None = None  # of the memory that is free for the rank, at most 1


def parse_budget(text: Any) -> Budget | None:
    """Returns the budget that a text such as "6GiB" or "50%" stands for; None if it stands for none."""
    form = _FORM.fullmatch(text) if isinstance(text, str) else None
    if form is None:
        return None
    number, unit = float(form[1]), form[2]
    if unit == "%":
        return Budget(share=number / 100) if 0 < number <= 100 else None
    nbytes = int(number * _UNITS[unit]) if unit in _UNITS else 0
    return Budget(nbytes=nbytes) if nbytes else None
