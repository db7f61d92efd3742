"""Tensor plans that modules bring along (transformers' ``_tp_plan``), as requests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_hybrid.tensor.discovery.linear_dataflow import may_be_linear
from lightning_hybrid.tensor.requests.user_plan import STYLES, Request


def requests_of_model(root: nn.Module) -> dict[str, Request]:
    """Resolves the plans that modules carry (those of transformers' models) to requests, by FQN in the root.

    Their names are relative to the module that has the plan, and ``*`` stands for a number. The outermost plan counts.
    Styles that are not for one linear (experts, sequences, fused ones, embeddings) are left to the search.
    """
    found: dict[str, Request] = {}
    for owner, module in root.named_modules():
        plan = _plan_of_module(module)
        if not plan:
            continue
        for fqn, inner in module.named_modules(remove_duplicate=False):
            style = plan.get(fqn, plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", fqn)))
            wanted = STYLES.get(style) if isinstance(style, str) else None
            if wanted not in (None, "replicated") and may_be_linear(inner):
                full = f"{owner}.{fqn}" if owner else fqn
                found.setdefault(full, Request(wanted, f"{fqn!r}: {style!r}"))
    return found


def _plan_of_module(module: nn.Module) -> Mapping[str, Any]:
    plans: list[Any] = []
    with contextlib.suppress(Exception):  # properties of user code may raise
        plans.append(getattr(module, "_tp_plan", None))
        # The configuration has the plan of the model without a head; the model's own includes those of its children.
        if getattr(module, "base_model", None) is module:
            plans.append(getattr(getattr(module, "config", None), "base_model_tp_plan", None))
    merged: dict[str, Any] = {}
    for plan in reversed(plans):
        if isinstance(plan, Mapping):
            merged |= plan
    return merged
