"""Optimizer step with states sharded over replicas, for steps that call optimizers themselves (manual optimization).

Such a step may read parameters and gradients between any two of its lines, so both are full while it runs, and
gradients are averaged after each backward, as without ZeRO. Each ``optimizer.step`` is sharded:

    parameters and gradients hold local shards (views of the full tensors; nothing is sent)
    the optimizer steps the shards: its states are made for them only
    the shards are all-gathered; parameters and gradients are full again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.errors import StepError
from lightning_hybrid.optimizers.replacement import Place, step_after_closure
from lightning_hybrid.params import store
from lightning_hybrid.params.placement import Shard, join, padded
from lightning_hybrid.zero.group import all_gather_single

Sharding: TypeAlias = tuple[dist.ProcessGroup, Mapping[int, Shard]]  # ranks, and by id of a parameter its shards


class ShardedStep:
    """The sharded steps of one optimizer over the ranks of shard groups."""

    def __init__(self, optimizer: Optimizer, shardings: Sequence[Sharding]) -> None:
        """Replace the optimizer's step.

        It is the same function for shards of a parameter as for the full one. ``shardings`` have each parameter that is
        a shard between training steps, as its gradient and states are; experts have other ranks than the rest.
        """
        self._optimizer = optimizer
        self._shardings = {p: (ranks, shard) for ranks, placements in shardings for p, shard in placements.items()}
        self._original = optimizer.step
        self.close = step_after_closure(optimizer, self._step, Place.SHARDS, reason="sharded states")

    def _step(self, kwargs: dict[str, Any]) -> None:
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        sharded = [p for p in every if id(p) in self._shardings]
        if any(store.state_of(p) is store.State.SHARD for p in sharded):
            raise StepError(
                f"{type(self._optimizer).__name__}.step in manual optimization is called outside of training_step,"
                " where each replica has shards; call it at the end of training_step, or set zero_stage=0",
                entry="manual-step-place",
            )
        shards = ((p, self._shard(p, p.data), None if p.grad is None else self._shard(p, p.grad)) for p in sharded)
        with store.swapped(shards):
            self._original(**kwargs)
        for ranks in dict.fromkeys(ranks for ranks, _ in self._shardings.values()):
            self._gather([p for p in sharded if self._shardings[id(p)][0] is ranks], ranks)

    @torch.no_grad()
    def _gather(self, parameters: Sequence[Tensor], ranks: dist.ProcessGroup) -> None:
        """All-gather the stepped shards over their ranks, in one message for each dtype."""
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            members = [p for p in parameters if p.dtype == dtype]
            placements = [self._shardings[id(p)][1] for p in members]
            local = [padded(self._shard(p, p.data), of) for p, of in zip(members, placements, strict=True)]
            message = torch.cat([shard.reshape(-1) for shard in local])
            received = message.new_empty(ranks.size() * message.numel())
            all_gather_single(received, message, group=ranks)
            of_ranks = [row.split([shard.numel() for shard in local]) for row in received.view(ranks.size(), -1)]
            for number, (p, placement) in enumerate(zip(members, placements, strict=True)):
                p.data.copy_(join([row[number].view(local[number].shape) for row in of_ranks], placement))

    def _shard(self, p: Tensor, full: Tensor) -> Tensor:
        """A view of the shard of this rank."""
        ranks, placement = self._shardings[id(p)]
        return placement.view(full, ranks.rank(), ranks.size())
