"""Policies of activation checkpointing: the option ``recompute``, and the policy that it gives to each layer.

A policy is a value per layer, so that it can be chosen by hand, by a pattern, or by a solver.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from lightning_hybrid.errors import RecomputeError

Policy: TypeAlias = Literal["keep", "full", "selective"] | float
Recompute: TypeAlias = Policy | int | Sequence[str] | Mapping[str, Policy]
POLICIES = ("keep", "full", "selective")
SELECTIVE_SHARE = 0.4


def is_selective(policy: object) -> bool:
    """Returns whether a policy repeats single operations instead of the layer's full forward."""
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
    if recompute is None or _is_policy(recompute):
        return
    if isinstance(recompute, int) and not isinstance(recompute, bool) and recompute >= 1:
        return
    if isinstance(recompute, Mapping) and all(map(_is_policy, recompute.values())):
        recompute = list(recompute)
    is_list = isinstance(recompute, Sequence) and not isinstance(recompute, str)
    if is_list and all(isinstance(name, str) for name in recompute):
        return
    raise ValueError(
        f"recompute={recompute!r}; use 'full' for all layers, 'selective' or a share of bytes such as 0.4 to keep what"
        " is expensive to compute, an integer n for every n-th, names of layers such as ['model.layers.*'], or a"
        " mapping of names to 'full', 'selective', a share or 'keep'"
    )


def layer_policies(recompute: Recompute | None, layers: Collection[str]) -> dict[str, Policy]:
    """Returns the policy of each layer by FQN.

    Args:
        recompute: A policy for all ("keep", "full", "selective", or a float: the share of bytes that a selective layer
            saves); n for every n-th layer, beginning with the first; FQNs with wildcards (``*``) of layers that are
            recomputed; or such patterns with a policy each, of which the last that matches a layer counts.
        layers: FQNs of all layers of the module, in order.

    Raises:
        RecomputeError: A pattern matches no layer.
    """
    if recompute is None or isinstance(recompute, str | float):
        policy: Policy = "keep" if recompute is None else recompute  # type: ignore[assignment]
        return dict.fromkeys(layers, policy)
    if isinstance(recompute, int):
        return {fqn: "keep" if number % recompute else "full" for number, fqn in enumerate(layers)}
    patterns: Mapping[str, Policy] = recompute if isinstance(recompute, Mapping) else dict.fromkeys(recompute, "full")
    policies: dict[str, Policy] = dict.fromkeys(layers, "keep")
    for pattern, policy in patterns.items():
        matched = fnmatch.filter(layers, pattern)
        if not matched:
            near = ", ".join(difflib.get_close_matches(pattern, layers, n=3, cutoff=0.0))
            raise RecomputeError(
                f"recompute names {pattern!r}, which matches no layer; nearest: {near}", entry="recompute-name"
            )
        policies |= dict.fromkeys(matched, policy)
    return policies
