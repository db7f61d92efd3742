"""One call of an optimizer's step for some of its parameters, without the hooks that run once per step."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid.optimizers.replacement import STEP_HOOKS


@contextlib.contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Take the hooks of ``optimizer`` off inside; yields them by the name of their attribute."""
    hooks = {name: optimizer.__dict__.get(name) for name in STEP_HOOKS}
    try:
        for name in STEP_HOOKS:
            optimizer.__dict__[name] = OrderedDict()
        yield hooks
    finally:
        for name, saved in hooks.items():
            optimizer.__dict__[name] = saved


@contextlib.contextmanager
def only_parameters(optimizer: Optimizer, ids: Collection[int]) -> Iterator[None]:
    """Let the groups of ``optimizer`` have only the parameters with these ids inside."""
    all_parameters = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, all_parameters, strict=True):
            group["params"] = [p for p in parameters if id(p) in ids]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, all_parameters, strict=True):
            group["params"] = parameters
