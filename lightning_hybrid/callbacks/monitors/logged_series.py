"""Metrics that a monitor logs, kept as series over the optimizer steps, so that a run is drawn without a logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Series = dict[str, list[tuple[int, float]]]  # (optimizer step, value) by the name of the metric


def keep_series(series: Series, metrics: Mapping[str, Any], step: int) -> None:
    """Append the numbers among ``metrics`` to their series."""
    for name, value in metrics.items():
        series.setdefault(name, []).append((step, float(value)))
