"""Sizes of "auto": the first rank plans before the ranks meet, and all take its plan, or its error."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist


def plan_options(strategy: Any) -> dict[str, Any] | Exception:
    """Return the options that "auto" sizes stand for, on the first rank; an error is for `agreed_plan` to raise.

    Args:
        strategy: With sizes that are "auto".
    """
    module = strategy.lightning_module
    if module is None or module._trainer is None:
        return RuntimeError("sizes of 'auto' are planned for a module; fit one with a Trainer, or set numbers")
    # It derives a strategy from that of the user, and is above this folder.
    package = __name__.partition(".strategies.")[0]
    planning = importlib.import_module(f"{package}.strategies.choose_planned_options")
    try:
        return dict(planning.planned_options(strategy, module._trainer))
    except Exception as error:
        return error


def agreed_plan(planned: dict[str, Any] | Exception | None) -> dict[str, Any]:
    """Return the first rank's plan on all ranks; collective.

    Args:
        planned: Of the first rank.

    Raises:
        Exception: That of the first rank's planning, on all ranks.
    """
    box = [planned]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, 0)
    agreed = box[0]
    if isinstance(agreed, Exception):
        raise agreed
    assert agreed is not None
    return agreed
