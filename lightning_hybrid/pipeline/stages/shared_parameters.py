"""Tied parameters: the sum of their gradients over the pipeline ranks that hold them.

A tied embedding lives on the stage that looks tokens up and on the stage that makes logits. Each has a part of its
gradient; every holder needs the sum before clipping and stepping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.mesh import where_sent


class SharedParameters:
    """The parameters that this rank holds together with others."""

    def __init__(
        self, holders: Mapping[str, Sequence[int]], parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
    ) -> None:
        """Args: holders: pipeline ranks by FQN. parameters: by FQN. group: the ranks of this pipeline."""
        self._group = group
        self._rank = group.rank()
        sets: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for name in sorted(holders):
            ranks = tuple(sorted(set(holders[name])))
            if len(ranks) > 1 and self._rank in ranks:
                sets.setdefault((ranks, parameters[name].dtype), []).append(parameters[name])
        self._sets = [(ranks, members) for (ranks, _), members in sets.items()]

    def broadcast_first(self) -> None:
        """Give every holder the content of the first."""
        for ranks, members in self._sets:
            for parameter in members:
                if self._rank == ranks[0]:
                    for other in ranks[1:]:
                        content = where_sent(parameter.detach().contiguous(), self._group)
                        dist.send(content, group=self._group, group_dst=other)
                else:
                    content = torch.empty_like(parameter, memory_format=torch.contiguous_format)
                    content = where_sent(content, self._group)
                    dist.recv(content, group=self._group, group_src=ranks[0])
                    parameter.detach().copy_(content)

    def sum_gradients(self) -> None:
        """Replace each gradient by the sum over its holders, added in the order of their ranks on every one.

        A gradient that no holder has stays None.
        """
        for ranks, members in self._sets:
            own = _flatten(members, self._group)
            others = [rank for rank in ranks if rank != self._rank]
            received = {rank: torch.empty_like(own) for rank in others}
            works = []
            # NCCL carries out the transfers of two ranks one after the other, and a send waits for its receive: the
            # lower rank sends first, and all ranks take the pairs in one order.
            for rank in others:
                to = partial(dist.isend, own, group=self._group, group_dst=rank)
                back = partial(dist.irecv, received[rank], group=self._group, group_src=rank)
                works += [to(), back()] if self._rank < rank else [back(), to()]
            for work in works:
                assert work is not None
                work.wait()
            received[self._rank] = own
            total = received[ranks[0]].clone()
            for rank in ranks[1:]:
                total += received[rank]
            _unflatten(total, members)


def _flatten(members: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Tensor:
    """All gradients, some of which may be at rest on the host, then one element per parameter: whether it has one."""
    parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.detach().reshape(-1) for p in members]
    parts.append(torch.tensor([p.grad is not None for p in members], dtype=members[0].dtype))
    sent = [where_sent(part, group) for part in parts]
    return torch.cat([part.to(sent[0].device) for part in sent])


def _unflatten(total: Tensor, members: Sequence[nn.Parameter]) -> None:
    present = total[-len(members) :].tolist()
    start = 0
    for parameter, has in zip(members, present, strict=True):
        part = total[start : start + parameter.numel()]
        start += parameter.numel()
        parameter.grad = part.view(parameter.shape).to(parameter.device, copy=True) if has else None
