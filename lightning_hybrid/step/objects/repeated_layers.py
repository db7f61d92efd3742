"""Repeated layers: the smallest modules that repeat, a transformer block or a residual block.

The pipeline's units may be larger (with one stage, the full network is one): then the members of their lists of layers
are the layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from lightning_hybrid.text import spanned

_MAX_NAME = 48  # characters of an FQN in a table
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_layers(units: Mapping[str, nn.Module], closed: Collection[nn.Module] = ()) -> dict[str, nn.Module]:
    """The layers in these units, by FQN in the root; a unit without repeated layers is a layer itself.

    Args:
        units: By FQN.
        closed: Lists whose members are no layers, such as experts.
    """
    found: dict[str, nn.Module] = {}
    inside_closed = {inner for each in closed for inner in each.modules()}

    def descend(fqn: str, module: nn.Module) -> None:
        if _num_weights(module) == 0:
            return
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or _has_layers(module, inside_closed):
            for name, child in module.named_children():
                descend(f"{fqn}.{name}", child)
        elif not any(module is other for other in found.values()):
            found[fqn] = module

    for fqn, unit in units.items():
        descend(fqn, unit)
    return found


def shortened(fqn: str) -> str:
    """The FQN for a table: one of many characters without the names in its middle, such as those of LoRA."""
    if len(fqn) <= _MAX_NAME:
        return fqn
    names = fqn.split(".")
    head, tail = names[0], names[-1]
    for name in reversed(names[1:-1]):
        if len(head) + len(name) + len(tail) + 4 > _MAX_NAME:
            break
        tail = f"{name}.{tail}"
    return f"{head}...{tail}"


def lines_of_layers(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines about layers, by FQN, for a table: layers with equal lines share them."""
    by_text: dict[tuple[str, ...], list[str]] = {}
    for fqn, text in lines.items():
        by_text.setdefault(tuple(text), []).append(fqn)
    found = []
    for each, fqns in by_text.items():
        found.append(spanned([shortened(fqn) for fqn in fqns]))
        found += [f"    {line}" for line in each]
    return found


def _has_layers(module: nn.Module, closed: Collection[nn.Module]) -> bool:
    """Whether a list of layers is inside: two modules of one class with more than one weight each."""
    for inner in module.modules():
        if isinstance(inner, _LISTS) and inner not in closed:
            classes = [type(child) for child in inner.children() if _num_weights(child) > 1]
            if len(classes) > len(set(classes)):
                return True
    return False


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())
