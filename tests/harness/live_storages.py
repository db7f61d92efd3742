"""Tensors, storages and graphs that are still alive after a block of code."""

import time

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """The storages that were made inside and are still alive.

    Attributes:
        most: The most bytes of them at a time, if counted.
    """

    def __init__(self, *, counts_most=False):
        super().__init__()
        self.made, self.counts_most, self.most = {}, counts_most, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.counts_most:
            self.most = max(self.most, self.bytes())
        return out

    def count(self, nbytes):
        return sum(size == nbytes for reference, size in self.made.values() if not reference.expired())

    def least(self, nbytes, seconds=0.2):
        """The minimum of some counts: gloo's threads reference exchanged tensors for a moment after the wait."""
        end, least = time.monotonic() + seconds, self.count(nbytes)
        while time.monotonic() < end:
            time.sleep(0.005)
            least = min(least, self.count(nbytes))
        return least

    def bytes(self):
        self.made = {key: made for key, made in self.made.items() if not made[0].expired()}
        return sum(size for _, size in self.made.values())
