"""Detection of changes that a training step makes on modules: with changes by its batch, no rank may run a share.

Buffers (statistics, queues, centres), tensors and numbers in attributes would be those of a share. But integers that
have grown by one count batches, and entries appended to lists are joined (``appended_entries``).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.step.module_state.snapshots import AttributePath, reachable_leaves
from lightning_hybrid.step.objects.tensors import as_plain_tensor, storage_id
from lightning_hybrid.step.recording.kept import find_lists, list_containing

_NOTHING = object()


class ModuleChanges:
    """Compares the modules after a step with their state before it."""

    def __init__(self, root: nn.Module, *, by_content: bool = False) -> None:
        """Record the state before the step.

        Args:
            root: The user's module.
            by_content: Whether to compare contents of tensors: a write to ``buffer.data`` leaves the version counter.
        """
        self._root, self._by_content = root, by_content
        self._before = _state(root, by_content)
        self._lengths = {path: len(entries) for path, entries in find_lists(root).items()}

    def something(self) -> bool:
        """Whether the step has written a buffer, or stored a new tensor or float."""
        lists = {path: self._lengths.get(path, 0) for path in find_lists(self._root)}
        return any(
            not (isinstance(key, AttributePath) and list_containing(key, lists) is not None) for key in self._changed()
        )

    def rows(self, samples: int | None) -> bool:
        """Whether a changed tensor may have a row for each sample of the batch, of which a microbatch needs some.

        Args:
            samples: Number of samples of the batch; None if unknown.
        """
        changed = self._changed()
        tensors = [leaf for path, leaf in reachable_leaves(self._root, plain=False) if path in changed]
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
    state: dict[Any, Any] = {}
    for fqn, module in root.named_modules():
        for name, buffer in module._buffers.items() if module not in metrics else ():
            if buffer is not None:
                state[fqn, name] = _fingerprint(buffer, by_content)
    for path, leaf in reachable_leaves(root, metrics):
        if isinstance(leaf, Tensor):
            state[path] = _fingerprint(leaf, by_content)
        elif isinstance(leaf, numpy.ndarray):
            state[path] = leaf.shape, leaf.dtype.str, zlib.crc32(numpy.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, float | int | str | numpy.generic):
            state[path] = leaf.item() if isinstance(leaf, numpy.generic) else leaf
    return state


def _fingerprint(tensor: Tensor, by_content: bool) -> tuple[Any, ...]:
    identity = id(tensor), tensor._version, storage_id(tensor)
    tensor = as_plain_tensor(tensor)
    if not by_content or tensor.layout is not torch.strided or not tensor.numel() or tensor.is_quantized:
        return identity
    numbers = torch.nan_to_num(tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64))
    return *identity, numbers.sum().item(), numbers.abs().sum().item()
