"""What monitors measure: rows of all ranks, gathered, and series over the steps, which draw a run without a logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Series = dict[str, list[tuple[int, float]]]  # (optimizer step, value) by the name of the metric


def gather_rows(row: Tensor, strategy: Any) -> Tensor:
    """Gathers the rows of all ranks on the host, as a tensor of shape (ranks, n); collective over all ranks.

    Args:
        row: Of shape (n,), of this rank.
        strategy: Of the Trainer.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return row[None]
    row = row.to(strategy.root_device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).cpu()


def keep_series(series: Series, metrics: Mapping[str, Any], step: int) -> None:
    """Append the numbers among ``metrics`` to their series."""
    for name, value in metrics.items():
        series.setdefault(name, []).append((step, float(value)))
