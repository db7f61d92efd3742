"""The user's tensor plan: patterns of FQNs, and the styles that they request.

    {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}

Names are matched component by component. A component ``*`` matches one or more components; ``*``, ``?`` and ``[...]``
inside a component match as in file names. A pattern that matches no full FQN is matched against the end of FQNs, as if
it began with ``*.``. Of several patterns that name one module, the last counts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import nn

from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.tensor.discovery.linear_dataflow import may_be_linear

Wanted = Literal["column", "row", "gathered", "replicated"]

STYLES: Mapping[str, Wanted] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "replicated": "replicated",
    "none": "replicated",
}


class Request(NamedTuple):
    """The request of a plan for one module.

    Attributes:
        wanted: Its role, or "replicated".
        entry: The entry of the plan, as the user wrote it.
    """

    wanted: Wanted
    entry: str


def check_styles(plan: Any) -> None:
    """Checks the types and styles of the user's plan.

    Raises:
        TypeError: It is no mapping of str to str.
        TensorPlanError: A style is unknown.
    """
    if not isinstance(plan, Mapping) or not all(isinstance(text, str) for pair in plan.items() for text in pair):
        raise TypeError(
            f"tensor_parallel_plan={plan!r}; use a dict of module names and styles, such as"
            " {'model.layers.*.mlp.up_proj': 'colwise', 'model.layers.*.mlp.down_proj': 'rowwise'}"
        )
    for pattern, style in plan.items():
        if style not in STYLES:
            raise TensorPlanError(
                f"tensor_parallel_plan has style {style!r} for {pattern!r}; use one of {', '.join(STYLES)}",
                entry="plan-style",
            )


def requests_of_user(root: nn.Module, plan: Mapping[str, str]) -> dict[str, Request]:
    """Resolves the user's plan to requests, by FQN in the root of each module that has parameters of its own.

    Raises:
        TensorPlanError: A pattern matches no module, or none that could be sharded so.
    """
    modules = {fqn: module for fqn, module in root.named_modules(remove_duplicate=False) if fqn}
    found: dict[str, Request] = {}
    for pattern, style in plan.items():
        request = Request(STYLES[style], f"{pattern!r}: {style!r}")
        matched = _matching(pattern, modules)
        if not matched:
            linears = [fqn for fqn, module in modules.items() if may_be_linear(module)]
            names = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", fqn) for fqn in linears))
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise TensorPlanError(
                f"tensor_parallel_plan names {pattern!r}, which is no module; nearest: {near}", entry="plan-name"
            )
        if request.wanted == "replicated":
            named = [fqn for fqn in modules if any(fqn == top or fqn.startswith(top + ".") for top in matched)]
        else:
            named = [fqn for fqn in matched if may_be_linear(modules[fqn])]
            if not named:
                first = modules[matched[0]]
                raise TensorPlanError(
                    f"tensor_parallel_plan has {request.entry}, which names {len(matched)} modules, such as"
                    f" {matched[0]} ({type(first).__name__}), and none that multiplies by one weight; name the linears",
                    entry="plan-no-linear",
                )
        found |= {fqn: request for fqn in named if next(modules[fqn].parameters(recurse=False), None) is not None}
    return found


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    components = pattern.split(".")
    split = {name: name.split(".") for name in names}
    return [n for n in split if _covers(components, split[n])] or [
        n for n in split if _covers(["*", *components], split[n])
    ]


def _covers(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "*":
        return any(_covers(pattern[1:], name[start:]) for start in range(1, len(name) + 1))
    return fnmatchcase(name[0], pattern[0]) and _covers(pattern[1:], name[1:])
