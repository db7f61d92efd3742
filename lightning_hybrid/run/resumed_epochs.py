"""A run that is resumed with another number of replicas has epochs of another number of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

# Attributes of torch's schedulers that are numbers of steps.
_LENGTHS = ("total_steps", "total_iters", "T_max")


def describe_epochs(checkpoint: Mapping[str, Any], before: int, now: int) -> tuple[str, bool]:
    """Return what changes with the number of replicas, and whether a schedule has a length that was made for others."""
    parts = [
        f"the number of replicas changes from {before} to {now}, and with the same batch_size the steps of an epoch"
    ]
    if batches := _batches_of_epoch(checkpoint):
        parts[0] += f": {batches} batches before, about {math.ceil(batches * before / now)} now"
    for state in checkpoint.get("lr_schedulers", ()):
        name = next((name for name in _LENGTHS if isinstance(state, Mapping) and state.get(name)), None)
        if name is not None:
            parts.append(
                f"the learning-rate schedule keeps {name}={state[name]} of the saved run, of which it has done"
                f" {state.get('last_epoch', 0)}"
            )
    ratio = Fraction(before, now)
    advice = f"to keep them, each replica needs the batch_size of the saved run times {ratio}"
    return "; ".join([*parts, advice]), len(parts) > 1


def _batches_of_epoch(checkpoint: Mapping[str, Any]) -> int:
    """Batches of an epoch of the saved run; 0 if it has ended none."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    if not progress.get("is_last_batch"):
        return 0
    return int(progress["current"]["ready"])
