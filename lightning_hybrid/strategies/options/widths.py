"""Checks of ``stage_widths``: against the other options, and against the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.layout import is_count
from lightning_hybrid.schedule import make_schedule
from lightning_hybrid.schedule.widths import nearest_widths

_BESIDE_STAGES = ("data_parallel_size", "tensor_parallel_size", "context_parallel_size")


def check_widths(
    widths: Sequence[int] | Literal["auto"] | None,
    size: int | str,
    schedule: str,
    stages_per_rank: int,
    *,
    is_planned: bool,
) -> None:
    """Check the widths of stages with the number of pipeline ranks, the schedule and the stages of each rank.

    Raises:
        LayoutError: They are no widths, or contradict another option.
    """
    if widths is None:
        return
    if widths == "auto":
        if size == "auto" and not is_planned:
            raise LayoutError(
                "stage_widths='auto' chooses the widths of stages for a number of pipeline ranks, and"
                " pipeline_parallel_size='auto'; set it to that number",
                entry="stage-widths",
            )
    elif not isinstance(widths, list | tuple) or not widths or not all(map(is_count, widths)):
        raise LayoutError(
            f"stage_widths={widths!r}; use 'auto' or a list with the number of ranks of each stage, such as [3, 1]",
            entry="stage-widths",
        )
    elif size not in ("auto", sum(widths)):
        fitting = f"set stage_widths={nearest_widths(widths, int(size))}, or " if int(size) >= len(widths) else ""
        raise LayoutError(
            f"stage_widths={list(widths)} needs {sum(widths)} pipeline ranks, and pipeline_parallel_size={size};"
            f" {fitting}leave pipeline_parallel_size out, on a multiple of {sum(widths)} devices",
            entry="stage-widths",
        )
    if stages_per_rank > 1:
        raise LayoutError(
            f"stage_widths={widths!r} gives stages several ranks, and stages_per_rank={stages_per_rank}"
            " gives ranks several stages; leave one of the two out",
            entry="stage-widths",
        )
    widths = (1,) if isinstance(widths, str) else widths
    make_schedule(schedule, sum(widths), 1, widths=widths)


def check_ranks(stage_widths: Sequence[int] | Literal["auto"] | None, sizes: Mapping[str, Any], count: int) -> None:
    """Check that stages of different widths fill so many ranks.

    Raises:
        LayoutError: They do not; names the nearest widths and numbers of devices that fit.
    """
    if stage_widths is None or isinstance(stage_widths, str):
        return
    widths = list(stage_widths)
    others = math.prod(size for name, size in sizes.items() if name in _BESIDE_STAGES and isinstance(size, int))
    needed, is_open = sum(widths) * others, sizes["data_parallel_size"] == "auto"
    if count == needed or (is_open and count % needed == 0):
        return
    fewer = count // needed * needed if is_open else 0
    advice = [f"devices={' or '.join(str(each) for each in (fewer, fewer + needed) if each)}"]
    room, remainder = divmod(count, others)
    fitting = [each for each in range(len(widths), room + 1) if room % each == 0 and (is_open or each == room)]
    if fitting and not remainder:
        advice.insert(0, f"stage_widths={nearest_widths(widths, min(fitting, key=lambda n: abs(n - sum(widths))))}")
    raise LayoutError(
        f"stage_widths={widths} needs {'a multiple of ' if is_open else ''}{needed} ranks, but the world has"
        f" {count}; set {', or '.join(advice)}",
        entry="stage-widths",
    )
