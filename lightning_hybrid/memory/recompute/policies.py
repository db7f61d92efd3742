"""Policies of activation checkpointing: the option ``recompute``, and the policy that it gives to each layer.

A policy is a value per layer, so that it can be chosen by hand, by a pattern, or by a budget of memory. A budget is a
text: a number of bytes with its unit, or a percentage of the free memory.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn

from lightning_hybrid.errors import RecomputeError

Policy: TypeAlias = Literal["keep", "full", "selective"] | float
Layers: TypeAlias = str | type[nn.Module]
Recompute: TypeAlias = int | Policy | str | Sequence[Layers] | Mapping[Layers, Policy]  # the str is a budget
POLICIES = ("keep", "full", "selective")
SELECTIVE_SHARE = 0.4
_UNITS = {"B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+|%)\s*")
SPELLINGS = "a number of bytes with its unit such as '6GiB' or '500 MB', or a share of the free memory such as '50%'"


def is_selective(policy: object) -> bool:
    """Returns whether a policy keeps some results of a layer."""
    return policy == "selective" or isinstance(policy, float)


def _is_policy(policy: Any) -> bool:
    return policy in POLICIES if isinstance(policy, str) else isinstance(policy, float) and 0 < policy <= 1


def check_recompute(recompute: Any) -> None:
    """Validates the ``recompute`` option.

    Args:
        recompute: A value that ``layer_policies`` accepts, or None.

    Raises:
        ValueError: The value is neither.
    """
    if recompute is None or _is_policy(recompute) or parse_budget(recompute) is not None:
        return
    if isinstance(recompute, int) and not isinstance(recompute, bool) and recompute >= 1:
        return
    if isinstance(recompute, Mapping) and all(map(_is_policy, recompute.values())):
        recompute = list(recompute)
    is_list = isinstance(recompute, Sequence) and not isinstance(recompute, str)
    if is_list and all(isinstance(each, str) or _is_module_class(each) for each in recompute):
        return
    raise ValueError(
        f"recompute={recompute!r}; use 'full' for all layers, 'selective' or a share of bytes such as 0.4 to keep what"
        " is expensive to compute, an integer n for every n-th, names or classes of layers such as"
        " ['model.layers.*'], a mapping of these to 'full', 'selective', a share or 'keep', or a budget of the rank:"
        f" {SPELLINGS}"
    )


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def layer_policies(recompute: Recompute | None, layers: Mapping[str, nn.Module]) -> dict[str, Policy]:
    """Returns the policy of each layer by FQN.

    Args:
        recompute: A policy for all ("keep", "full", "selective", or a float: the share of bytes that a selective layer
            saves); n for every n-th layer, beginning with the first; FQNs with wildcards (``*``), or classes, of
            layers that are recomputed; or these with a policy each: the last that matches a layer counts. With
            a budget, all layers save the least until the budget chooses.
        layers: All layers of the module by FQN, in order.

    Raises:
        RecomputeError: A pattern matches no layer, or no layer is of a class.
    """
    if parse_budget(recompute) is not None:
        return dict.fromkeys(layers, 0.0)
    if recompute is None or isinstance(recompute, str | float):
        policy: Policy = "keep" if recompute is None else recompute  # type: ignore[assignment]
        return dict.fromkeys(layers, policy)
    if isinstance(recompute, int):
        return {fqn: "keep" if number % recompute else "full" for number, fqn in enumerate(layers)}
    choices: Mapping[Any, Policy] = recompute if isinstance(recompute, Mapping) else dict.fromkeys(recompute, "full")
    policies: dict[str, Policy] = dict.fromkeys(layers, "keep")
    for choice, policy in choices.items():
        policies |= dict.fromkeys(_chosen_layers(choice, layers), policy)
    return policies


def _chosen_layers(choice: Layers, layers: Mapping[str, nn.Module]) -> list[str]:
    """Returns the FQNs that a pattern matches, or of the layers of a class."""
    if isinstance(choice, str):
        if matched := fnmatch.filter(layers, choice):
            return matched
        near = ", ".join(difflib.get_close_matches(choice, layers, n=3, cutoff=0.0))
        raise RecomputeError(
            f"recompute names {choice!r}, which matches no layer; nearest: {near}", entry="recompute-name"
        )
    if of_class := [fqn for fqn, layer in layers.items() if isinstance(layer, choice)]:
        return of_class
    classes = ", ".join(sorted({type(layer).__name__ for layer in layers.values()}))
    raise RecomputeError(
        f"recompute: no layer is a {choice.__name__}; the layers, which are recomputed in full or in part, are"
        f" {', '.join(layers)}, of {classes}",
        entry="recompute-name",
    )


class Budget(NamedTuple):
    """Bytes that a rank may use; one of the two is set.

    Attributes:
        nbytes: A number of bytes.
        share: Of the memory that is free for the rank, at most 1.
    """

    nbytes: int | None = None
    share: float | None = None


def parse_budget(text: Any) -> Budget | None:
    """Returns the budget that a text such as "6GiB" or "50%" stands for; None if it stands for none."""
    form = _FORM.fullmatch(text) if isinstance(text, str) else None
    if form is None:
        return None
    number, unit = float(form[1]), form[2]
    if unit == "%":
        return Budget(share=number / 100) if 0 < number <= 100 else None
    nbytes = int(number * _UNITS[unit]) if unit in _UNITS else 0
    return Budget(nbytes=nbytes) if nbytes else None
