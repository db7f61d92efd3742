"""Changes that a training step leaves on modules: with one of its batch, no rank may run a share of it.

Buffers (statistics, queues, centres), tensors and numbers in attributes would be those of a share. But whole numbers
that have grown by one count batches, and what lists have grown by is joined (``appended_entries``).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.step.module_state.snapshot import Place, reachable
from lightning_hybrid.step.objects.pytree import memory_of
from lightning_hybrid.step.objects.tensor_subclasses import as_plain
from lightning_hybrid.step.recording.kept_values import entry_of, lists_of

_NOTHING = object()


class LeftBehind:
    """Compares the modules after a step with what they were before it."""

    def __init__(self, root: nn.Module, *, by_content: bool = False) -> None:
        """Before the step.

        Args:
            root: The user's module.
            by_content: Whether to look at what tensors hold: a write to ``buffer.data`` counts no version.
        """
        self._root, self._by_content = root, by_content
        self._before = _state(root, by_content)
        self._lengths = {place: len(held) for place, held in lists_of(root).items()}

    def something(self) -> bool:
        """Whether the step has written a buffer, or kept a tensor or a float that was not there."""
        lists = {place: self._lengths.get(place, 0) for place in lists_of(self._root)}
        return any(not (isinstance(key, Place) and entry_of(key, lists) is not None) for key in self._changed())

    def rows(self, samples: int | None) -> bool:
        """Whether a tensor among it may have a row for each sample of the batch, so that a microbatch needs some.

        Args:
            samples: Of the batch; None if they are not known.
        """
        changed = self._changed()
        tensors = [leaf for place, leaf in reachable(self._root, plain=False) if place in changed]
        tensors += [
            buffer
            for fqn, module in self._root.named_modules()
            for name, buffer in module._buffers.items()
            if (fqn, name) in changed and buffer is not None
        ]
        return any(isinstance(leaf, Tensor) and (samples is None or samples in leaf.shape) for leaf in tensors)

    def _changed(self) -> set[Any]:
        now = _state(self._root, self._by_content)
        gone = self._before.keys() - now.keys()
        return gone | {key for key, value in now.items() if not _is_same(self._before.get(key, _NOTHING), value)}


def _is_same(before: Any, now: Any) -> bool:
    is_counter = type(now) is int and (now - before == 1 if type(before) is int else now in (0, 1))
    return is_counter or bool(before == now)


def _state(root: nn.Module, by_content: bool) -> dict[Any, Any]:
    metrics = {inner for module in root.modules() if isinstance(module, Metric) for inner in module.modules()}
    found: dict[Any, Any] = {}
    for fqn, module in root.named_modules():
        for name, buffer in module._buffers.items() if module not in metrics else ():
            if buffer is not None:
                found[fqn, name] = _known(buffer, by_content)
    for place, leaf in reachable(root, metrics):
        if isinstance(leaf, Tensor):
            found[place] = _known(leaf, by_content)
        elif isinstance(leaf, numpy.ndarray):
            found[place] = leaf.shape, leaf.dtype.str, zlib.crc32(numpy.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, float | int | str | numpy.generic):
            found[place] = leaf.item() if isinstance(leaf, numpy.generic) else leaf
    return found


def _known(tensor: Tensor, by_content: bool) -> tuple[Any, ...]:
    known = id(tensor), tensor._version, memory_of(tensor)
    tensor = as_plain(tensor)
    if not by_content or tensor.layout is not torch.strided or not tensor.numel() or tensor.is_quantized:
        return known
    numbers = torch.nan_to_num(tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64))
    return *known, numbers.sum().item(), numbers.abs().sum().item()
