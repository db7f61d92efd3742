"""Full tensors that user code holds or has written into, and the shards that follow them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.params.shards import LocalShards


@dataclass
class _FullCopy:
    """A full tensor that user code holds."""

    name: str  # FQN of the parameter
    local: Tensor  # this rank's shard
    full: Tensor  # the full tensor
    version: int  # its version when it was last written back
    before: Tensor | None  # the content of the shard at that time, where autograd does not count writes


class FullCopies:
    """The full tensors of one module that code may write into; what it has written goes back to the shards."""

    def __init__(self, shards: LocalShards) -> None:
        """Begin without any."""
        self._shards = shards
        self._copies: list[_FullCopy] = []

    def record(self, name: str, tensor: Tensor, full: Tensor, by_data: bool) -> None:
        """Record a full tensor that user code holds or has written; ``tensor`` is this rank's shard, of any shape."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            before = tensor.detach().clone() if by_data else None
            self._copies.append(_FullCopy(name, tensor.detach(), full.detach(), -1, before))
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy what code has written into full tensors to the shards."""
        for copy in self._copies:
            full = copy.full
            if copy.before is None and full._version == copy.version:
                continue
            copy.version = full._version
            with torch._C.DisableTorchFunctionSubclass():
                now = self._shards.shard_of(copy.name, copy.local, full)
                if copy.before is not None:
                    if torch.equal(now, copy.before):
                        continue
                    copy.before = now.clone()
                copy.local.copy_(now)

    def forget(self) -> None:
        """Write no more back: code of the user has ended."""
        self._copies = []
