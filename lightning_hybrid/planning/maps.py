"""`ReadMaps`: the images, volumes and feature maps that convolutions and norms read, for the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.predict.costs.layers import FeatureMap
from lightning_hybrid.step.recording.layers import UnitKinds

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm)


class ReadMaps:
    """Notes what modules of a recorded step read over space."""

    def __init__(self) -> None:
        self._found: dict[str, list[FeatureMap]] = {}

    def watching(self, units: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
        """Return a context that notes the inputs of modules inside of units, while a step is recorded."""
        self._found.clear()
        inside = {
            f"{fqn}.{name}" if name else fqn: module
            for fqn, unit in units.items()
            for name, module in unit.named_modules()
            if isinstance(module, (*_CONVOLUTIONS, *_NORMS))
        }
        return replaced_forwards(
            inside, lambda fqn, forward: partial(self._note, fqn, inside[fqn], forward), reason="rows of feature maps"
        )

    def _note(self, fqn: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["input"]
        if x.dim() in (4, 5):
            self._found.setdefault(fqn, []).append(_map_of(module, x))
        return forward(*args, **kwargs)

    def sets(self, units: Mapping[str, nn.Module]) -> dict[str, tuple[FeatureMap, ...]]:
        """Return the maps of each unit, for all samples; a recording runs one of several equal units alone.

        Nothing where no convolution reads one.
        """
        kinds, first, sets = UnitKinds(), dict[int, str](), dict[str, tuple[FeatureMap, ...]]()
        for fqn, unit in units.items():
            own = tuple(
                each for name, found in self._found.items() if f"{name}.".startswith(f"{fqn}.") for each in found
            )
            kind = kinds.kind_of(fqn, unit)
            if own:
                first.setdefault(kind, fqn)
            elif kind in first:
                own = sets[first[kind]]
            if own:
                sets[fqn] = own
        convolved = any(each.summed and not each.statistics for own in sets.values() for each in own)
        return sets if convolved else {}


def _map_of(module: nn.Module, x: Tensor) -> FeatureMap:
    """The map that a module reads; its longest dim of space is cut, the first of several."""
    dim = max(range(2, x.dim()), key=lambda dim: (x.shape[dim], -dim))
    border = statistics = 0
    if isinstance(module, _CONVOLUTIONS):
        stride = module.stride[dim - 2]
        border = max(0, (module.kernel_size[dim - 2] - 1) * module.dilation[dim - 2] + 1 - stride)
        border = -(-border // stride) if isinstance(module, _ConvTransposeNd) else border
    else:
        statistics = 2 * (x.shape[0] * module.num_groups if isinstance(module, nn.GroupNorm) else x.shape[1])
    summed = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return FeatureMap(x.shape[dim], x.numel() / x.shape[dim], border, summed, statistics)
