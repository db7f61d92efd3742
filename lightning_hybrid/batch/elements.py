"""Tensors that a step makes of elements of its batch and of constants, without writing to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_hybrid.graph.step_graph import REARRANGED
from lightning_hybrid.step.objects.names import names
from lightning_hybrid.step.objects.pytree import flatten, tensors_inside
from lightning_hybrid.step.objects.tensors import storage_id

# What they return depends on shapes alone, but for the elements themselves; other views share their memory anyway.
_COPIES = REARRANGED | names("clone contiguous detach long pad")


class BatchElements:
    """The storages of such tensors in one run of a step."""

    def __init__(self, batch: Any) -> None:
        """Take a batch before the run that may write into it."""
        self._tensors: dict[int, tuple[Tensor, int]] = {}  # kept, so that no other tensor gets the memory
        for tensor in tensors_inside(batch):
            self._keep(tensor)

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether a tensor of any shape consists of these elements, and nothing was written to it."""
        known, version = self._tensors.get(storage_id(tensor), (tensor, -1))
        return known._version == version

    def follow(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Keep the result of an operation that copies such elements, of any shape; floating point has no labels."""
        if name in _COPIES and isinstance(out, Tensor) and storage_id(out) not in self._tensors:
            given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            if given and all(not each.is_floating_point() and each in self for each in given):
                self._keep(out)

    def _keep(self, tensor: Tensor) -> None:
        self._tensors[storage_id(tensor)] = tensor, tensor._version
