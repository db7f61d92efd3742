"""Optimizer step with states sharded over replicas, for steps that call optimizers themselves (manual optimization).

Such a step may read parameters and gradients between any two of its lines, so both are full while it runs, and
gradients are averaged after each backward, as without ZeRO. Each ``optimizer.step`` is sharded:

    parameters and gradients hold local shards (views of the full tensors; nothing is sent)
    the optimizer steps the shards: its states are made for them only
    the shards are all-gathered; parameters and gradients are full again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.parts.parameter_shard_placement import Shard, join, padded
from lightning_hybrid.zero.optimizer_states.temporarily_replace_optimizer_step import step_after_closure
from lightning_hybrid.zero.shard_dims_ranks_and_offsets import shard_placement
from lightning_hybrid.zero.sharded_parameter_group import all_gather_single


def numel_of_shard(p: Tensor, ranks: dist.ProcessGroup) -> int:
    """Number of elements of a parameter's shard on this rank of a group; the parameter has any shape."""
    placement = shard_placement(p.shape, ranks.size())
    if placement is None:
        return p.numel()
    ((_, length),) = placement.ranges(ranks.rank(), ranks.size())
    return p.numel() // p.shape[placement.dim] * length


class ShardedStep:
    """The sharded steps of one optimizer over the ranks of a shard group."""

    def __init__(
        self, optimizer: Optimizer, ranks: dist.ProcessGroup, placements: Mapping[int, Shard] | None = None
    ) -> None:
        """Replace the optimizer's step.

        Args:
            optimizer: Whose step is the same function for shards of a parameter as for the full one.
            ranks: That have equal parameters and gradients, and shard the states.
            placements: By id of each sharded parameter; then parameters, gradients and states are shards between
                training steps. If None, only the states are.
        """
        self.optimizer, self._ranks = optimizer, ranks
        self._size, self._rank = ranks.size(), ranks.rank()
        self._placements: dict[int, Shard] = dict(placements or {})
        self._has_placements = placements is not None
        if not self._has_placements:
            self.shard_states()
        self._original = optimizer.step
        self._undo = step_after_closure(optimizer, self._step, reason="sharded states")

    def close(self) -> None:
        """Restore the optimizer's own step; its states stay shards."""
        self._undo()

    def _step(self, kwargs: dict[str, Any]) -> None:
        originals = [(p, p.data, p.grad) for p in self._parameters() if self._placement(p) is not None]
        try:
            for p, data, gradient in originals:
                p.grad = None
                p.data = self._shard(p, data)
                p.grad = None if gradient is None else self._shard(p, gradient)
            self._original(**kwargs)
        finally:
            for p, data, gradient in originals:
                p.grad = None
                p.data = data
                p.grad = gradient
        self._gather([p for p, _, _ in originals])

    @torch.no_grad()
    def _gather(self, parameters: Sequence[Tensor]) -> None:
        """All-gather the stepped shards, in one message for each dtype."""
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            members = [p for p in parameters if p.dtype == dtype]
            shards = [(p, self._shard(p, p.data)) for p in members]
            for p, full in zip(members, self._all_gathered(shards), strict=True):
                p.data.copy_(full)

    def _all_gathered(self, shards: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """All-gather shards, each given with its parameter, in one message; yields full tensors."""
        placements = [self._placements[id(p)] for p, _ in shards]
        local = [padded(shard, placement) for (_, shard), placement in zip(shards, placements, strict=True)]
        message = torch.cat([shard.reshape(-1) for shard in local])
        received = message.new_empty(self._size * message.numel())
        all_gather_single(received, message, group=self._ranks)
        of_ranks = [row.split([shard.numel() for shard in local]) for row in received.view(self._size, -1)]
        for number, placement in enumerate(placements):
            yield join([row[number].view(local[number].shape) for row in of_ranks], placement)

    # -- states --------------------------------------------------------------------------------------------------------

    def shard_states(self) -> None:
        """Shard states that are full: made when the optimizer was built, or loaded."""
        for p in self._parameters():
            for name, value in self._states_of_shape(p, p.shape).items():
                self.optimizer.state[p][name] = self._shard(p, value).clone()

    @torch.no_grad()
    def full_state(self) -> dict[str, Any]:
        """The optimizer's state dict with full tensors; collective."""
        state = self.optimizer.state_dict()
        found = dict(state["state"])
        for number, p in enumerate(self._parameters()):
            placement = self._placement(p)
            has = number in found and placement is not None
            for name, value in self._states_of_shape(p, self._shard(p, p.data).shape).items() if has else ():
                [full] = self._all_gathered([(p, value.to(p.device))])
                found[number] = {**found[number], name: full}
        return {**state, "state": found}

    def _states_of_shape(self, p: Tensor, shape: torch.Size) -> dict[str, Tensor]:
        if self._placement(p) is None:
            return {}
        entry = self.optimizer.state.get(p, {})
        return {n: v for n, v in entry.items() if isinstance(v, Tensor) and v.dim() and v.shape == shape}

    # -- shards --------------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _placement(self, p: Tensor) -> Shard | None:
        if id(p) not in self._placements and not self._has_placements:
            placement = shard_placement(p.shape, self._size)
            if placement is not None:
                self._placements[id(p)] = placement
        return self._placements.get(id(p))

    def _shard(self, p: Tensor, full: Tensor) -> Tensor:
        """A view of the shard of this rank."""
        placement = self._placement(p)
        return full if placement is None else placement.view(full, self._rank, self._size)
