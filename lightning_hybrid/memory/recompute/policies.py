"""Policies of activation checkpointing: the option ``recompute``, and the policy that it gives to each layer.

A policy is a value per layer, so that it can be chosen by hand, by a pattern, or by a budget of memory. A budget is a
text: a number of bytes with its unit, or a percentage of the free memory.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import nn

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.amounts import parse_budget

Policy: TypeAlias = Literal["keep", "full", "selective"] | float
Layers: TypeAlias = str | type[nn.Module]
Recompute: TypeAlias = int | Policy | str | Sequence[Layers] | Mapping[Layers, Policy]  # the str is a budget
POLICIES = ("keep", "full", "selective")


def is_selective(policy: object) -> bool:
    """Returns whether a policy keeps some results of a layer."""
    return policy == "selective" or isinstance(policy, float)


def _is_policy(policy: Any) -> bool:
    return policy in POLICIES if isinstance(policy, str) else isinstance(policy, float) and 0 < policy <= 1


def check_recompute(recompute: Any) -> None:
    """Validates the ``recompute`` option: None, or a value that ``layer_policies`` accepts; else a ValueError."""
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
        f"recompute={recompute!r}; use 'full', 'selective', a budget such as '6GiB', or names of layers such as"
        " ['model.layers.*'] (lightning-hybrid explain-error recompute-option)"
    )


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def layer_policies(recompute: Recompute | None, layers: Mapping[str, nn.Module]) -> dict[str, Policy]:
    """Returns the policy of each of the module's layers, in order, by FQN.

    ``recompute`` is a policy for all ("keep", "full", "selective", or a float: the share of bytes that a selective
    layer saves); n for every n-th layer, beginning with the first; FQNs with wildcards (``*``), or classes, of layers
    that are recomputed; or these with a policy each: the last that matches a layer counts. With a budget, all layers
    save the least until the budget chooses.

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
