"""Fast walks over the modules and parameters of a module.

Torch's recursive generators pass each item through one frame per level of nesting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn


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
