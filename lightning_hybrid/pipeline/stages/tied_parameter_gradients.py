"""Gradients of tied parameters, summed over the pipeline ranks that own them.

A tied embedding is on the stage of the token lookup and on the stage of the logits. Each computes a partial gradient;
every owner needs the sum before clipping and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import on_group_device


class TiedParameters:
    """The parameters that this rank owns together with other ranks."""

    def __init__(
        self, holders: Mapping[str, Sequence[int]], parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        """Set up from the owner ranks (``holders``) and parameters by FQN, and the ranks of this pipeline."""
        self._group = group
        self._rank = group.rank()
        sets: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for name in sorted(holders):
            ranks = tuple(sorted(set(holders[name])))
            if len(ranks) > 1 and self._rank in ranks:
                sets.setdefault((ranks, parameters[name].dtype), []).append(parameters[name])
        self._sets = [(ranks, members) for (ranks, _), members in sets.items()]

    def num_owners(self) -> dict[nn.Parameter, int]:
        """Returns how many ranks sum their gradients of each parameter."""
        return {parameter: len(ranks) for ranks, members in self._sets for parameter in members}

    def sum_gradients(self) -> None:
        """Replace each gradient by the sum over its owners, added in the order of their ranks on every one.

        A gradient that is None on all owners stays None.
        """
        for ranks, members in self._sets:
            local = _flatten(members, self._group)
            others = [rank for rank in ranks if rank != self._rank]
            received = {rank: torch.empty_like(local) for rank in others}
            works = []
            # NCCL runs the transfers of two ranks one after the other, and a send waits for its receive: the lower
            # rank sends first, and all ranks process the pairs in one order.
            for rank in others:
                to = partial(dist.isend, local, group=self._group, group_dst=rank)
                back = partial(dist.irecv, received[rank], group=self._group, group_src=rank)
                works += [to(), back()] if self._rank < rank else [back(), to()]
            for work in works:
                assert work is not None
                work.wait()
            received[self._rank] = local
            total = received[ranks[0]].clone()
            for rank in ranks[1:]:
                total += received[rank]
            _unflatten(total, members)


def _flatten(members: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Tensor:
    """All gradients in one vector (some may be offloaded to the host), then a flag per parameter: if it has one."""
    flat = [p.new_zeros(p.numel()) if p.grad is None else p.grad.detach().reshape(-1) for p in members]
    flat.append(torch.tensor([p.grad is not None for p in members], dtype=members[0].dtype))
    sent = [on_group_device(gradient, group) for gradient in flat]
    return torch.cat([gradient.to(sent[0].device) for gradient in sent])


def _unflatten(total: Tensor, members: Sequence[nn.Parameter]) -> None:
    present = total[-len(members) :].tolist()
    start = 0
    for parameter, has in zip(members, present, strict=True):
        gradient = total[start : start + parameter.numel()]
        start += parameter.numel()
        parameter.grad = gradient.view(parameter.shape).to(parameter.device, copy=True) if has else None
