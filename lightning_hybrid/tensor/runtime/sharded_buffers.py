"""Buffers of a sharded unit: each tensor rank updates its shard, and all of them have the full buffers after a forward.

So code outside of units, checkpoints and forwards that run unsharded read what a single process would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.parts.parameter_shard_placement import Placement, Shard, join, padded
from lightning_hybrid.shared_memory.collectives import hidden_from_modes
from lightning_hybrid.tensor.collectives.collectives_over_rank_groups import Ranks


class ShardedBuffers:
    """The buffers of one unit that its plan shards over tensor ranks."""

    def __init__(self, unit: nn.Module, placements: Mapping[str, Placement], ranks: Ranks) -> None:
        """Selects the buffers.

        Args:
            unit: The user's module, with full buffers.
            placements: Placements of its parameters and buffers, by FQN inside the unit.
            ranks: The tensor ranks.
        """
        self._unit, self._ranks = unit, ranks
        found = {name: placements.get(name) for name, _ in unit.named_buffers()}
        self._placements = {name: placement for name, placement in found.items() if isinstance(placement, Shard)}
        owners = {name: unit.get_submodule(name.rpartition(".")[0]) for name in self._placements}
        # Torch's norms write their statistics in training mode only.
        self._unknown = [name for name, owner in owners.items() if not type(owner).__module__.startswith("torch.")]
        self._norms = [(name, owner) for name, owner in owners.items() if name not in self._unknown]

    def local(self) -> dict[str, Tensor]:
        """This rank's shards, of shape (..., local length, ...), as views of the full buffers."""
        rank, size = self._ranks.rank, self._ranks.size
        return {
            name: placement.view(self._unit.get_buffer(name), rank, size)
            for name, placement in self._placements.items()
        }

    def gathered_after(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the unit's sharded forward: buffers that it may have written are full on all ranks after it."""
        if not self._placements:
            return run

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            written = self._unknown + [name for name, owner in self._norms if owner.training]
            if written:
                self._gather(written)
            return output

        return forward

    @torch.compiler.disable
    @torch.no_grad()
    def _gather(self, names: list[str]) -> None:
        """All-gathers these buffers in one message; collective over the tensor ranks."""
        local = self.local()
        # As the kernel of batch norms, which does not change the version: a backward needs none of the statistics.
        full = {name: self._unit.get_buffer(name) for name in names}
        with hidden_from_modes(), torch.autograd._unsafe_preserve_version_counter(tuple(full.values())):
            shards = [padded(local[name], self._placements[name]).contiguous() for name in names]
            message = torch.cat([shard.reshape(-1).view(torch.uint8) for shard in shards])
            rows = [row.split([shard.nbytes for shard in shards]) for row in self._ranks.all_gather(message)]
            for index, (name, shard) in enumerate(zip(names, shards, strict=True)):
                # A slice may begin at an offset that is not aligned for this dtype.
                of_ranks = [row[index].clone().view(shard.dtype).view(shard.shape) for row in rows]
                full[name].copy_(join(of_ranks, self._placements[name]))
