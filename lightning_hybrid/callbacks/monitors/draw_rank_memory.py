"""Table and picture of the measured memory of each rank beside the predicted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BARS = {
    "parameters": "#4c78a8",
    "gradients": "#f58518",
    "optimizer_states": "#54a24b",
    "rest": "#b8b0ac",
}
_INK, _MUTED = "#222222", "#777777"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """Return bytes with three digits and a binary unit."""
    index = 0
    while count >= 1000 and index < len(_UNITS) - 1:
        count, index = count / 1024, index + 1
    return f"{count:.3g} {_UNITS[index]}"


def memory_table(ranks: Sequence[Mapping[str, int]], step: int) -> str:
    """Return a row for each rank: measured bytes by kind, the peak, and the predicted peak where it is known."""
    lines = [f"memory of tensors in step {step}, by rank:"]
    for number, rank in enumerate(ranks):
        terms = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(rank[kind])}" for kind in _BARS)
        predicted = rank["predicted_total"]
        beside = f" ({format_bytes(predicted)} predicted)" if predicted >= 0 else ""
        lines.append(f"  {number}: peak {format_bytes(rank['peak'])}{beside} = {terms}")
    return "\n".join(lines)


def draw_rank_memory(ranks: Sequence[Mapping[str, int]], step: int) -> Any:
    """Draw a stacked bar for each rank, with a mark at the predicted peak; returns a matplotlib figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.6 + 0.42 * len(ranks)), dpi=150, layout="constrained")
    axes = figure.subplots()
    positions = list(range(len(ranks)))
    largest = max(max(rank["peak"], rank["predicted_total"]) for rank in ranks)
    unit = max(index for index in range(len(_UNITS)) if index == 0 or largest >= 1024**index)
    left = [0.0] * len(ranks)
    for kind, colour in _BARS.items():
        sizes = [rank[kind] / 1024**unit for rank in ranks]
        axes.barh(positions, sizes, left=left, color=colour, height=0.7, label=kind.replace("_", " "))
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    known = [(rank["predicted_total"] / 1024**unit, y) for y, rank in enumerate(ranks) if rank["predicted_total"] >= 0]
    for number, (x, y) in enumerate(known):
        axes.plot([x, x], [y - 0.42, y + 0.42], color=_INK, linewidth=1.6, label=None if number else "predicted peak")
    axes.set_yticks(positions, [f"rank {position}" for position in positions])
    axes.invert_yaxis()
    axes.set_xlabel(f"{_UNITS[unit]} of tensors in step {step}, at the peak", color=_MUTED)
    axes.tick_params(length=0, labelsize=9, labelcolor=_MUTED)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=5, frameon=False, fontsize=9)
    return figure
