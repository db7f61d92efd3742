"""A partition into stages by bytes of parameters, where no recorded step shows costs."""

from __future__ import annotations

from torch import nn


def stages_by_size(root: nn.Module, num_stages: int) -> dict[str, int]:
    """A stage for each parameter of a module, by FQN; a parameter goes to the stage in which its middle lies."""
    sizes = {name: p.numel() * p.element_size() for name, p in root.named_parameters()}
    stages, before, total = {}, 0, max(1, sum(sizes.values()))
    for name, size in sizes.items():
        stages[name] = min(num_stages - 1, num_stages * (2 * before + size) // (2 * total))
        before += size
    return stages
