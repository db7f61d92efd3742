"""Optimizer step with states sharded over replicas, for steps that call optimizers themselves (manual optimization).

Such a step may read parameters and gradients between any two of its lines, so both are full while it runs, and
gradients are averaged after each backward, as without ZeRO. Each ``optimizer.step`` is sharded:

    parameters and gradients hold local shards (views of the full tensors; nothing is sent)
    the optimizer steps the shards: its states are made for them only
    the shards are all-gathered; parameters and gradients are full again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.optimizers.replacement import Place, step_after_closure
from lightning_hybrid.params import store
from lightning_hybrid.params.placement import Shard, join, padded
from lightning_hybrid.zero.group import all_gather_single


class ShardedStep:
    """The sharded steps of one optimizer over the ranks of a shard group."""

    def __init__(self, optimizer: Optimizer, ranks: dist.ProcessGroup, placements: Mapping[int, Shard]) -> None:
        """Replace the optimizer's step.

        It is the same function for shards of a parameter as for the full one. ``placements`` are by id of each
        parameter that is a shard between training steps, as its gradient and states are.
        """
        self._optimizer, self._ranks, self._placements = optimizer, ranks, placements
        self._original = optimizer.step
        self.close = step_after_closure(optimizer, self._step, Place.SHARDS, reason="sharded states")

    def _step(self, kwargs: dict[str, Any]) -> None:
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        sharded = [p for p in every if id(p) in self._placements]
        shards = ((p, self._shard(p, p.data), None if p.grad is None else self._shard(p, p.grad)) for p in sharded)
        with store.swapped(shards):
            self._original(**kwargs)
        self._gather(sharded)

    @torch.no_grad()
    def _gather(self, parameters: Sequence[Tensor]) -> None:
        """All-gather the stepped shards, in one message for each dtype."""
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            members = [p for p in parameters if p.dtype == dtype]
            placements = [self._placements[id(p)] for p in members]
            local = [padded(self._shard(p, p.data), of) for p, of in zip(members, placements, strict=True)]
            message = torch.cat([shard.reshape(-1) for shard in local])
            received = message.new_empty(self._ranks.size() * message.numel())
            all_gather_single(received, message, group=self._ranks)
            of_ranks = [row.split([shard.numel() for shard in local]) for row in received.view(self._ranks.size(), -1)]
            for number, (p, placement) in enumerate(zip(members, placements, strict=True)):
                p.data.copy_(join([row[number].view(local[number].shape) for row in of_ranks], placement))

    def _shard(self, p: Tensor, full: Tensor) -> Tensor:
        """A view of the shard of this rank."""
        return self._placements[id(p)].view(full, self._ranks.rank(), self._ranks.size())
