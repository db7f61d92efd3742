"""Storage devices of the local shards of parameters and gradients, during steps and between them.

While a step runs, each is in storage: on the compute device, on the host, or in a file. Between steps the user's
``Parameter`` objects show both, and torch requires a parameter and its gradient on one device:

    storage of parameters and gradients   between steps both are
    the same                              there
    different                             with the optimizer's states, so that its step finds all three together

What is shown on another device than its storage is a copy. The copy is authoritative, since optimizers, hooks and
loaded checkpoints write to it, until the next step moves it back to storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.optimizers.state_file import HOST, Region, aligned


@dataclass(frozen=True)
class StorageDevices:
    """Storage devices of one rank."""

    parameters: torch.device  # of the shards of parameters, while a step runs
    gradients: torch.device  # of the shards of gradients, while a step runs
    states: torch.device  # of the optimizer's states

    @classmethod
    def of(cls, moved: Iterable[str], device: torch.device) -> StorageDevices:
        """Put what is moved on the host, which includes the memory of a mapped file.

        ``moved`` are some of "parameters", "gradients" and "optimizer_states".
        """
        kinds = set(moved)
        return cls(*(HOST if kind in kinds else device for kind in ("parameters", "gradients", "optimizer_states")))

    @property
    def between_steps(self) -> torch.device:
        """The device on which parameters and gradients are shown between steps."""
        return self.parameters if self.parameters == self.gradients else self.states


class StoredShards:
    """The local shards of one group's parameters, in storage."""

    def __init__(self, shards: Mapping[str, Tensor], devices: StorageDevices, region: Region | None) -> None:
        """Move the shards to storage."""
        self._devices, self.region = devices, region
        self._shown: dict[str, Tensor] = {}  # copies on another device than the storage
        self._shards: dict[str, Tensor] = {}
        offset = 0
        for name, shard in shards.items():
            if region is None:
                self._shards[name] = shard.to(devices.parameters)
            else:
                self._shards[name] = region.tensor(offset, shard).copy_(shard)
                offset += aligned(shard.nbytes)
            if shard.device == devices.between_steps and self._shards[name].device != devices.between_steps:
                self._shown[name] = shard
        self.evict_from_memory()

    def __getitem__(self, name: str) -> Tensor:
        """The shard in storage; no copy of it may be shown on another device."""
        assert name not in self._shown
        return self._shards[name]

    def address(self, name: str) -> int:
        """Address of a shard in storage."""
        return self._shards[name].data_ptr()

    def move(self, name: str, shard: Tensor) -> None:
        """Replace a shard by another tensor of the same shape and content."""
        self._shards[name] = shard

    @torch.inference_mode(False)  # an evaluation may run in it, and the optimizer writes to what is shown
    @torch.no_grad()
    def shown(self, name: str) -> Tensor:
        """The tensor that a parameter holds between steps, of the shard's shape."""
        shard, device = self._shards[name], self._devices.between_steps
        if shard.device == device:
            return shard
        if name not in self._shown:
            self._shown[name] = shard.to(device)
        return self._shown[name]

    @torch.inference_mode(False)
    def shown_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient, of the shard's shape, as a parameter has it between steps."""
        return gradient.to(self._devices.between_steps)

    def stored_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient, of the shard's shape, as it is stored while a step runs."""
        return gradient.to(self._devices.gradients)

    @torch.no_grad()
    def move_to_storage(self) -> list[str]:
        """Write copies that are shown on other devices back to storage; while a step runs there are none.

        Returns:
            FQNs of those that were shown on another device.
        """
        self.write(self._shown)
        names, self._shown = list(self._shown), {}
        if names:
            self.evict_from_memory()
        return names

    def write(self, contents: Mapping[str, Tensor], *, read_as: torch.dtype | None = None) -> None:
        """Copy contents, of the shards' shapes, from the compute device into shards.

        ``read_as`` is the dtype to which shards were rounded when they were read: elements that still have the rounded
        value were not written, and stay.
        """
        shards = [self._shards[name] for name in contents]
        found = list(contents.values())
        if read_as is not None:
            for index, shard in enumerate(shards):
                if shard.dtype != read_as:
                    exact = shard.to(found[index].device)
                    is_read = found[index] == exact.to(read_as).to(shard.dtype)
                    found[index] = torch.where(is_read, exact, found[index])
        if self.region is not None:
            # A write to a file makes the system write it to disk, which takes longer than comparing first.
            pairs = zip(shards, found, strict=True)
            changed = [(shard, new) for shard, new in pairs if not torch.equal(shard, new.to(shard.device))]
            shards, found = [shard for shard, _ in changed], [new for _, new in changed]
        if shards:
            torch._foreach_copy_(shards, found)

    def evict_from_memory(self) -> None:
        """Evict shards that are in a file from memory."""
        if self.region is not None:
            self.region.evict()
