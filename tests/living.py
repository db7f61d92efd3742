"""What is still held of what a stretch of code has made."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Living(TorchDispatchMode):
    """The storages that were made inside and still live."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def count(self, nbytes):
        return sum(size == nbytes for reference, size in self.made.values() if not reference.expired())

    def bytes(self):
        return sum(size for reference, size in self.made.values() if not reference.expired())
