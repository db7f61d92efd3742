"""Optimizer states that replicas share out, where the user's step calls the optimizers itself (manual optimization).

Such a step may read parameters and gradients between any two of its lines, so both are whole while it runs, and
gradients are averaged after each backward, as without ZeRO. What is shared out is the work of each ``optimizer.step``:

    parameters and gradients hold this rank's part (views of the wholes; nothing is sent)
    the optimizer steps the parts: its states are made for them alone
    an all-gather of the parts; parameters and gradients are whole again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.parts.placement import Shard, padded
from lightning_hybrid.zero.optimizer_states.replaced_step import step_after_closure
from lightning_hybrid.zero.parameter_group import _all_gather
from lightning_hybrid.zero.shard_layout import shard_placement


def numel_of_part(p: Tensor, ranks: dist.ProcessGroup) -> int:
    """How many numbers of a parameter this one of some ranks steps."""
    placement = shard_placement(p.shape, ranks.size())
    if placement is None:
        return p.numel()
    ((_, length),) = placement.ranges(ranks.rank(), ranks.size())
    return p.numel() // p.shape[placement.dim] * length


class SharedSteps:
    """The steps of one optimizer over the ranks of a shard."""

    def __init__(
        self, optimizer: Optimizer, ranks: dist.ProcessGroup, placements: Mapping[int, Shard] | None = None
    ) -> None:
        """Take over the optimizer's steps.

        Args:
            optimizer: Whose step does to parts of a parameter what it does to the whole.
            ranks: That hold the same parameters and gradients, and share out its states.
            placements: By id of each parameter that is cut, where its shards lie; then parameters, gradients and
                states are shards between training steps. If None, only the states are.
        """
        self.optimizer, self._ranks = optimizer, ranks
        self._size, self._rank = ranks.size(), ranks.rank()
        self._placements: dict[int, Shard] = dict(placements or {})
        self._are_given = placements is not None
        if not self._are_given:
            self.cut_states()
        self._original = optimizer.step
        self._undo = step_after_closure(optimizer, self._step)

    def close(self) -> None:
        """Give the optimizer its own steps again; its states stay parts."""
        self._undo()

    def _step(self, kwargs: dict[str, Any]) -> None:
        wholes = [(p, p.data, p.grad) for p in self._parameters() if self._placement(p) is not None]
        try:
            for p, data, gradient in wholes:
                p.grad = None
                p.data = self._part(p, data)
                p.grad = None if gradient is None else self._part(p, gradient)
            self._original(**kwargs)
        finally:
            for p, data, gradient in wholes:
                p.grad = None
                p.data = data
                p.grad = gradient
        self._gather([p for p, _, _ in wholes])

    @torch.no_grad()
    def _gather(self, parameters: Sequence[Tensor]) -> None:
        """Every rank gets what the others have stepped; one message for each dtype."""
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            members = [p for p in parameters if p.dtype == dtype]
            parts = [self._padded(p, self._part(p, p.data)) for p in members]
            for p, pieces in zip(members, self._exchanged(parts), strict=True):
                for rank, piece in enumerate(pieces):
                    if rank != self._rank:
                        target = self._part(p, p.data, rank)
                        target.copy_(self._unpadded(p, piece, target))

    def _exchanged(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        """For each part those of all ranks."""
        message = torch.cat([part.reshape(-1) for part in parts])
        received = message.new_empty(self._size * message.numel())
        _all_gather(received, message, group=self._ranks)
        of_ranks = [row.split([part.numel() for part in parts]) for row in received.view(self._size, -1)]
        return [[row[k].view(part.shape) for row in of_ranks] for k, part in enumerate(parts)]

    # -- states --------------------------------------------------------------------------------------------------------

    def cut_states(self) -> None:
        """Keep this rank's part of states that are whole: made when the optimizer was built, or loaded."""
        for p in self._parameters():
            for name, value in self._like(p, p.shape).items():
                self.optimizer.state[p][name] = self._part(p, value).clone()

    @torch.no_grad()
    def whole_state(self) -> dict[str, Any]:
        """The optimizer's state dict with wholes; collective."""
        state = self.optimizer.state_dict()
        found = dict(state["state"])
        for number, p in enumerate(self._parameters()):
            placement = self._placement(p)
            has = number in found and placement is not None
            for name, value in self._like(p, self._part(p, p.data).shape).items() if has else ():
                pieces = self._exchanged([self._padded(p, value.to(p.device))])[0]
                whole = torch.empty(p.shape, dtype=value.dtype, device=p.device)
                for rank, piece in enumerate(pieces):
                    target = self._part(p, whole, rank)
                    target.copy_(self._unpadded(p, piece, target))
                found[number] = {**found[number], name: whole}
        return {**state, "state": found}

    def _like(self, p: Tensor, shape: torch.Size) -> dict[str, Tensor]:
        if self._placement(p) is None:
            return {}
        entry = self.optimizer.state.get(p, {})
        return {n: v for n, v in entry.items() if isinstance(v, Tensor) and v.dim() and v.shape == shape}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _placement(self, p: Tensor) -> Shard | None:
        if id(p) not in self._placements:
            if self._are_given:
                return None
            placement = shard_placement(p.shape, self._size)
            if placement is None:
                return None
            self._placements[id(p)] = placement
        return self._placements[id(p)]

    def _part(self, p: Tensor, whole: Tensor, rank: int | None = None) -> Tensor:
        """A view of what one rank, or this one, steps."""
        placement = self._placement(p)
        if placement is None:
            return whole
        ((start, length),) = placement.ranges(self._rank if rank is None else rank, self._size)
        return whole.narrow(placement.dim, start, length)

    def _padded(self, p: Tensor, part: Tensor) -> Tensor:
        placement = self._placement(p)
        assert placement is not None
        return padded(part, placement)

    def _unpadded(self, p: Tensor, piece: Tensor, target: Tensor) -> Tensor:
        placement = self._placement(p)
        assert placement is not None
        return piece.narrow(placement.dim, 0, target.shape[placement.dim])
