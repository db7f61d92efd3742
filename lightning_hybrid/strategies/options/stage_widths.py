"""Stages of different widths, and the number of ranks that they need."""

from __future__ import annotations

import math

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.schedule.widths import nearest_widths
from lightning_hybrid.strategies.options.options import Options

_BESIDE_STAGES = ("data_parallel_size", "tensor_parallel_size", "context_parallel_size")


def check_widths(options: Options, count: int) -> None:
    """Check that stages of different widths fill so many ranks.

    Raises:
        LayoutError: They do not; names the nearest widths and numbers of devices that fit.
    """
    if options.stage_widths is None or isinstance(options.stage_widths, str):
        return
    widths, sizes = list(options.stage_widths), options.mesh_sizes
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
