"""Rows that a step picks of its samples by their numbers, and keeps: ``self.shown = out[:8]``.

In each microbatch other samples have these numbers. So what the microbatches picked is put together, and of that the
rows stay that the step picks of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from lightning_hybrid.step.bookkeeping import Join, maker_of
from lightning_hybrid.step.graph import Picks, StepGraph
from lightning_hybrid.step.recording import StepError


class OtherRowsPicked(StepError):
    """Microbatches have not picked the rows that the step picks of the whole batch."""


def how_to_pick(
    value: int, parts: Sequence[StepGraph], whole: StepGraph, places: Sequence[Mapping[int, int]]
) -> tuple[bool, Join | None]:
    """Whether a value is rows that were picked of the samples, and how the batch's are made of the microbatches'.

    Args:
        value: In the graph of the whole batch.
        parts: The step on each microbatch.
        whole: The step on all of them.
        places: By microbatch, which of its values each value of the whole is.

    Returns:
        None for the second if no microbatch has picked some of them.
    """
    node = maker_of(value, whole)
    if node is None or node.picks is None:
        return False, None
    (source,) = node.inputs
    if not all(source in pairs for pairs in places) or whole.values[source].dynamic:
        return False, None
    shapes = [part.values[pairs[source]].shape for part, pairs in zip(parts, places, strict=True)]
    counts = [shape[0] for shape in shapes if shape]
    if len(counts) < len(shapes) or whole.values[source].shape[:1] != (sum(counts),):
        return False, None
    ends = list(accumulate(counts))
    starts = [0, *ends[:-1]]
    wanted = _picked(node.picks, 0, ends[-1])
    found = [row for start, end in zip(starts, ends, strict=True) for row in _picked(node.picks, start, end)]
    if not set(wanted) <= set(found):
        return True, None
    return True, partial(_rows, [found.index(row) for row in wanted], isinstance(node.picks, int))


def _picked(picks: Picks, start: int, end: int) -> list[int]:
    rows = range(start, end)
    return [rows[picks]] if isinstance(picks, int) else list(rows[slice(*picks)])


def _rows(rows: list[int], is_one: bool, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    del weights
    return parts[rows[0]] if is_one else torch.cat(list(parts))[rows]
