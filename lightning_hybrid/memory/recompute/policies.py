"""Policies of activation checkpointing: the option ``recompute``, and the policy that it gives to each layer.

A policy is a value per layer, so that it can be chosen by hand, by a pattern, or by a budget of memory. A budget is a
text: a number of bytes with its unit, or a percentage of the free memory.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from torch import nn

from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.amounts import parse_budget
from lightning_hybrid.step.objects.modules import names_around

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


def layer_policies(
    recompute: Recompute | None,
    layers: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
) -> dict[str, Policy]:
    """Returns the policy of each layer of a module, in order, by FQN; layers are not inside of each other.

    ``recompute`` is a policy for all ("keep", "full", "selective", or a float: the share of bytes that a selective
    layer saves); n for every n-th layer, beginning with the first; FQNs with wildcards (``*``), or classes, of what is
    recomputed; or these with a policy each: the last that matches counts. With a budget, all layers save the least
    until the budget chooses.

    Args:
        recompute: The option.
        layers: The layers where nothing is named.
        modules: Those that can be named, in order: besides layers, modules that contain some or are parts of one. A
            named module is a layer, whatever it contains. None if only layers can be named.

    Raises:
        RecomputeError: A pattern matches nothing, nothing is of a class, or a choice is inside of another one.
    """
    if parse_budget(recompute) is not None:
        return dict.fromkeys(layers, 0.0)
    if recompute is None or isinstance(recompute, str | float):
        policy: Policy = "keep" if recompute is None else recompute  # type: ignore[assignment]
        return dict.fromkeys(layers, policy)
    if isinstance(recompute, int):
        return {fqn: "keep" if number % recompute else "full" for number, fqn in enumerate(layers)}
    choices: Mapping[Any, Policy] = recompute if isinstance(recompute, Mapping) else dict.fromkeys(recompute, "full")
    modules, policies = modules or layers, dict[str, Policy]()
    for choice, policy in choices.items():
        for fqn in _chosen(choice, layers, modules):
            outer = next((name for name in names_around(fqn) if name in policies), fqn)
            if policies.setdefault(outer, policy) != policy and outer != fqn:
                raise RecomputeError(
                    f"recompute names {fqn} with {policy!r}, which is inside of {outer} with {policies[outer]!r}; leave"
                    f" one of the two out, or name the parts of {outer}",
                    entry="recompute-name",
                )
            policies[outer] = policy
    containing = {name for fqn in modules for name in names_around(fqn)}
    outermost = (fqn for fqn in modules if not any(name in policies for name in names_around(fqn)))
    return {fqn: policies.get(fqn, "keep") for fqn in outermost if fqn in policies or fqn not in containing}


def _chosen(choice: Layers, layers: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]) -> list[str]:
    """Returns the FQNs of what a choice names: of modules inside of each other the outermost.

    A pattern with a wildcard names layers, and the members of a list, if it has as many parts as their names:
    ``blocks.*`` are the blocks, whatever these contain, and ``model.*`` are all layers in ``model``. Text may be the
    name of a class too, ``package.Block``.
    """
    if isinstance(choice, str):
        members = [fqn for fqn in modules if fqn.count(".") == choice.count(".") and _is_member(fqn, modules)]
        found = fnmatch.filter([*members, *layers], choice) or fnmatch.filter(modules, choice)
        found = found or [fqn for fqn, module in modules.items() if choice in _class_names(module)]
        if not found:
            near = ", ".join(difflib.get_close_matches(choice, modules, n=3, cutoff=0.0))
            raise RecomputeError(
                f"recompute names {choice!r}, which matches no layer; nearest: {near}", entry="recompute-name"
            )
    else:
        found = [fqn for fqn, module in modules.items() if isinstance(module, choice)]
        if not found:
            classes = ", ".join(sorted({type(module).__name__ for module in modules.values()}))
            raise RecomputeError(
                f"recompute: no layer is a {choice.__name__}; the layers, which are recomputed in full or in part, are"
                f" {', '.join(layers)}, of {classes}",
                entry="recompute-name",
            )
    names = dict.fromkeys(found)
    return [fqn for fqn in names if not any(name in names for name in names_around(fqn))]


def _class_names(module: nn.Module) -> set[str]:
    """Returns the names of a module's classes, with and without where they are defined, as a config file has them."""
    names = ((base.__module__, base.__qualname__) for base in type(module).__mro__)
    return {text for where, name in names for text in (name, f"{where}.{name}")}


def _is_member(fqn: str, modules: Collection[str]) -> bool:
    """Returns whether a module is in a list, which has no forward and so is none of ``modules``."""
    parent = fqn.rpartition(".")[0]
    return bool(parent) and parent not in modules
