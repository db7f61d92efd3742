"""The guarded state of a trace: the plain attributes of the modules around its units, as a list to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.randomness.generator_snapshot import generator_state, is_generator
from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import PLAIN, inside, is_state
from lightning_hybrid.step.tracing.torchmetrics_as_graph_nodes import find_sinks

# Of a longer list only the length and the last entries are compared.
_LAST = 16
_DEEPEST = 4
# Hooks around a forward may be part of the step; other attributes that every module has are not.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}


def modules_around(root: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules whose code is glue, by FQN: those outside of units and metrics."""
    inside_units = {inner for outer in (*units.values(), *find_sinks(root).values()) for inner in outer.modules()}
    return {fqn: module for fqn, module in root.named_modules() if module not in inside_units}


def plain_state(modules: Sequence[nn.Module]) -> list[Any]:
    """The numbers, strings, lengths and generator states in the attributes of modules."""
    found: list[Any] = []
    visited: set[int] = set()  # layers share their configuration object
    for module in modules:
        for name, value in module.__dict__.items():
            if name in _OF_EVERY_MODULE or not is_state(name):
                continue
            if type(value) in PLAIN:
                found.append(value)
            else:
                _collect_state(value, found, visited, 0)
    return found


def _collect_state(value: Any, found: list[Any], visited: set[int], depth: int) -> None:
    inner = value if type(value) is tuple else inside(value)
    if inner is None or depth > _DEEPEST:
        if is_generator(value):
            found.append(generator_state(value))
        return
    if id(inner) in visited:
        return
    visited.add(id(inner))
    found.append(len(inner))
    items = list(inner.values() if isinstance(inner, dict) else inner) if inner else []
    for item in items[-_LAST:] if isinstance(inner, list) else items:
        if type(item) in PLAIN:
            found.append(item)
        elif not isinstance(item, Tensor):
            _collect_state(item, found, visited, depth + 1)
