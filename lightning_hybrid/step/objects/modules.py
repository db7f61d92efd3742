"""Walks over the modules of a module, its repeated layers, and deep copies of what they are called with.

Torch's recursive generators pass each item through one frame per level of nesting.

Repeated layers: the smallest modules that repeat, a transformer block or a residual block.

The pipeline's units may be larger (with one stage, the full network is one): then the members of their lists of layers
are the layers.

Deep copies of arguments, so that a second call finds caches in them unchanged.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.step.objects.tensors import detached_copy
from lightning_hybrid.text import spanned


def modules_in(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The list of ``root.named_modules()``."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting = [("", root)]
    while waiting:
        item = waiting.pop()
        fqn, module = item
        if module in seen:
            continue
        seen.add(module)
        found.append(item)
        if children := module._modules:
            prefix = fqn + "." if fqn else ""
            waiting += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
    return found


def parameters_of(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Parameter]]:
    """The list of ``root.named_parameters()``, from the named modules of the root."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for fqn, module in modules:
        if parameters := module._parameters:
            prefix = fqn + "." if fqn else ""
            for name, parameter in parameters.items():
                if parameter is not None and id(parameter) not in found:
                    found[id(parameter)] = prefix + name, parameter
    return list(found.values())


def tied_parameters(root: nn.Module) -> set[int]:
    """The ids of the parameters that several modules hold."""
    counts = Counter(id(p) for module in root.modules() for p in module._parameters.values() if p is not None)
    return {parameter for parameter, count in counts.items() if count > 1}


_MAX_NAME = 48  # characters of an FQN in a table
_MAX_SPAN = 60  # of two
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_layers(units: Mapping[str, nn.Module], closed: Collection[nn.Module] = ()) -> dict[str, nn.Module]:
    """The layers in these units, by FQN in the root; a unit without repeated layers is a layer itself.

    Members of the lists ``closed``, such as experts, are no layers.
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


def names_around(fqn: str) -> list[str]:
    """The FQNs of the modules around a module, the outermost first, without the root."""
    return [fqn[:end] for end, character in enumerate(fqn) if character == "."]


def shortened(fqn: str, most: int = _MAX_NAME) -> str:
    """The FQN for a table: a long one without the names in its middle, such as LoRA has."""
    if len(fqn) <= most:
        return fqn
    names = fqn.split(".")
    head, tail = names[0], names[-1]
    for name in reversed(names[1:-1]):
        if len(head) + len(name) + len(tail) + 4 > most:
            break
        tail = f"{name}.{tail}"
    return f"{head}...{tail}"


def spanned_modules(fqns: Sequence[str]) -> str:
    """The FQNs of neighbours for a table: the first, the last and their number; each in short where they are long."""
    text = spanned([shortened(fqn) for fqn in fqns])
    return text if len(text) <= _MAX_SPAN else spanned([shortened(fqn, _MAX_SPAN // 3) for fqn in fqns])


def lines_of_layers(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines about layers, by FQN, for a table: layers with equal lines share them."""
    by_text: dict[tuple[str, ...], list[str]] = {}
    for fqn, text in lines.items():
        by_text.setdefault(tuple(text), []).append(fqn)
    found = []
    for each, fqns in by_text.items():
        found.append(spanned_modules(fqns))
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


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def copied(value: Any, new: Callable[[Tensor], Tensor] = detached_copy, *, modules: bool = True) -> Any:
    """A deep copy of any object, with new tensors for its tensors, non-leaf tensors included, of the same shapes.

    A cache that a unit fills must be copied before each call of the unit. An object that cannot be copied is shared, as
    are modules in it unless ``modules``.
    """
    memo: dict[int, Any] = {}
    for found in _tensors_and_modules_in(value, {}):
        if isinstance(found, Tensor):
            memo[id(found)] = new(found)
        elif not modules:
            memo[id(found)] = found
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value  # an object that cannot be copied is shared


def may_change(value: Any) -> bool:
    """Whether a call could change this argument other than by writing to a tensor."""
    if isinstance(value, tuple):
        return any(map(may_change, value))
    return not isinstance(value, (Tensor, nn.Module, *_PLAIN))


def _tensors_and_modules_in(value: Any, seen: dict[int, Any]) -> Iterator[Tensor | nn.Module]:
    if id(value) in seen or isinstance(value, (*_PLAIN, type)):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor | nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_and_modules_in(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_and_modules_in(item, seen)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _tensors_and_modules_in(item, seen)
