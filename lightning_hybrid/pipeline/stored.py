"""What steps store on their modules: numbers, arrays and tensors, by place."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator
from itertools import chain
from numbers import Real
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lightning_hybrid.step.module_state.snapshots import reachable_leaves
from lightning_hybrid.step.objects.tensors import detached_copy
from lightning_hybrid.step.standins.numbers import has_absent_content
from lightning_hybrid.step.standins.tensors import is_absent


class StoredValues:
    """The numbers and tensors that a step stores on the modules of this rank; none unless their root is given."""

    def __init__(self, root: nn.Module | None = None, known: Collection[str] = ()) -> None:
        """Record what is there before the step; ``known`` are places where it may store something."""
        self._roots = () if root is None else (root,)
        self._before, self._known = dict(self._leaves()), set(map(_container, known))
        self._versions = {place: leaf._version for place, leaf in self._before.items() if isinstance(leaf, Tensor)}
        arrays = {place: leaf for place, leaf in self._before.items() if isinstance(leaf, numpy.ndarray)}
        self._checksums = {place: _checksum(leaf) for place, leaf in arrays.items()}

    def written(self) -> dict[str, Any]:
        """Copies of what is new or has changed, by its place."""
        return {place: _copied(leaf) for place, leaf in self._leaves() if self._is_written(place, leaf)}

    def news(self) -> str:
        """The first place of what is new or has changed elsewhere than in known places; "" if there is none."""
        found = (place for place, leaf in self._leaves() if self._is_written(place, leaf))
        return next((place for place in found if _container(place) not in self._known), "")

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        for root in self._roots:
            buffers = ((f"self.{name}", buffer) for name, buffer in root.named_buffers())
            stored = ((str(place), leaf) for place, leaf in reachable_leaves(root))
            yield from ((place, leaf) for place, leaf in chain(buffers, stored) if is_value(leaf))

    def _is_written(self, place: str, leaf: Any) -> bool:
        before: Any = self._before.get(place)
        if isinstance(leaf, Tensor):
            return leaf is not before or leaf._version != self._versions[place]
        if isinstance(leaf, numpy.ndarray):
            return leaf is not before or _checksum(leaf) != self._checksums[place]
        return leaf is not before  # a sum to which 0 was added is another object


def is_value(leaf: Any) -> bool:
    """Whether a leaf is a number, or a tensor or array of numbers, that this rank has."""
    if isinstance(leaf, Tensor):
        return not is_absent(leaf) and leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_complex()
    if isinstance(leaf, numpy.ndarray):
        return leaf.dtype.kind in "biuf" and not has_absent_content(leaf)
    return isinstance(leaf, Real) and not has_absent_content(leaf)


def _checksum(array: numpy.ndarray[Any, Any]) -> int:
    return zlib.crc32(numpy.ascontiguousarray(array).tobytes())


def _container(place: str) -> str:
    """The place of the list, or of the dict by other keys than strings, in which a place is; else the place."""
    return re.split(r"\[(?!')", place, maxsplit=1)[0]


def _copied(leaf: Any) -> Any:
    return detached_copy(leaf) if isinstance(leaf, Tensor) else leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf
