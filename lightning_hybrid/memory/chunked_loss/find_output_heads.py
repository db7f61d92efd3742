"""The linears of a module that may be output heads: those outside of the repeated layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.compiled import compiled_modules

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_output_heads(
    root: nn.Module, *, sharded: Collection[str], is_compiled: bool, any_size: bool
) -> dict[str, nn.Linear]:
    """Return the linears, by FQN, that are in no repeated layer, run uncompiled, and whose weights are here in full.

    Args:
        root: The user's module.
        sharded: FQNs of parameters that tensor ranks shard.
        is_compiled: Whether layers run compiled.
        any_size: Whether to return linears too that have no more output features than input features.
    """
    inside = _inside_repeated_layers(root) | compiled_modules(root)
    if is_compiled:
        layers = find_layers(dict(root.named_children())).values()
        inside |= {id(inner) for layer in layers for inner in layer.modules() if inner is not layer}
    sharded_ids = {id(parameter) for name, parameter in root.named_parameters() if name in sharded}
    return {
        fqn: module
        for fqn, module in root.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and id(module) not in inside
        and (any_size or module.out_features > module.in_features)
        and all(_is_plain(parameter) and id(parameter) not in sharded_ids for parameter in module.parameters())
    }


def _inside_repeated_layers(root: nn.Module) -> set[int]:
    """The ids of modules inside of others whose list has several of their class."""
    inside: set[int] = set()
    for parent in root.modules():
        if isinstance(parent, _LISTS):
            classes = Counter(type(child) for child in parent.children())
            repeated = [child for child in parent.children() if classes[type(child)] > 1]
            inside |= {id(inner) for child in repeated for inner in child.modules() if inner is not child}
    return inside


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and not is_absent(parameter)
