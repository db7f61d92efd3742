"""Choose units: the smallest modules that a cut never enters.

The module tree is descended while a module holds more than a stage's share of the parameters. What the recording then
shows (a unit that dominates its stage, or one whose parameters are read around its forward) opens further units.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # they have no forward


def choose_units(root: nn.Module, num_stages: int, opened: Collection[str] = ()) -> dict[str, nn.Module]:
    """The units of ``root`` by FQN, in the order of the module tree.

    Args:
        root: The user's LightningModule.
        num_stages: Number of stages; a module with more than 1/num_stages of all parameters is opened.
        opened: FQNs of modules to descend into whatever their size.
    """
    total = _count(root)
    units: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def descend(fqn: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        size = _count(module)
        if size == 0:
            return
        is_open = not fqn or isinstance(module, _CONTAINERS) or fqn in opened or size * num_stages > total
        if (can_open(module) and is_open) or isinstance(module, _CONTAINERS):
            for name, child in module.named_children():
                descend(f"{fqn}.{name}" if fqn else name, child)
        elif fqn:
            units[fqn] = module

    descend("", root)
    return units


def can_open(module: nn.Module) -> bool:
    """Whether there is something smaller inside ``module`` that could be a unit."""
    return any(_count(child) for child in module.children())


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
