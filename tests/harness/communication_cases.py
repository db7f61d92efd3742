"""Operations of torch.distributed on small tensors, which find the same over any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

Case = Callable[[dist.ProcessGroup, torch.device], Any]


def values(group: dist.ProcessGroup, device: torch.device, shape: Any = (2, 3), dtype: Any = torch.float32) -> Tensor:
    """Different on each rank, and exact in sums over ranks in each dtype."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, device=device).view(shape) % 13 + 20 * group.rank()).to(dtype)


def _all_reduce(op: Any, dtype: Any = torch.float32) -> Case:
    def run(group: dist.ProcessGroup, device: torch.device) -> Tensor:
        tensor = values(group, device, dtype=dtype)
        dist.all_reduce(tensor, op, group=group)
        return tensor

    return run


def _broadcast(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    tensor = values(group, device)
    dist.broadcast(tensor, group=group, group_src=1)
    return tensor


def _reduce(group: dist.ProcessGroup, device: torch.device) -> Tensor | None:
    tensor = values(group, device)
    dist.reduce(tensor, group=group, group_dst=1)
    return tensor if group.rank() == 1 else None


def _all_gather(group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    tensor = values(group, device)
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor, group=group)
    return found


def _all_gather_into_tensor(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    tensor = values(group, device)
    found = tensor.new_empty(group.size() * 2, 3)
    dist.all_gather_into_tensor(found, tensor, group=group)
    return found


def _reduce_scatter(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    tensor = values(group, device, (group.size(), 3))
    found = tensor.new_empty(3)
    dist.reduce_scatter(found, list(tensor.unbind()), group=group)
    return found


def _reduce_scatter_tensor(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    tensor = values(group, device, (group.size(), 3))
    found = tensor.new_empty(1, 3)
    dist.reduce_scatter_tensor(found, tensor, group=group)
    return found


def _all_to_all_single(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    sent = [group.rank() + peer for peer in range(group.size())]
    tensor = values(group, device, (sum(sent), 2))
    found = tensor.new_empty(sum(sent), 2)
    dist.all_to_all_single(found, tensor, sent, sent, group=group)
    return found


def _all_to_all(group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    tensor = values(group, device, (group.size(), 3))
    found = [tensor.new_empty(3) for _ in range(group.size())]
    dist.all_to_all(found, list(tensor.unbind()), group=group)
    return found


def _gather(group: dist.ProcessGroup, device: torch.device) -> list[Tensor] | None:
    tensor = values(group, device)
    found = [torch.empty_like(tensor) for _ in range(group.size())] if group.rank() == 1 else None
    dist.gather(tensor, found, group=group, group_dst=1)
    return found


def _scatter(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    tensor = values(group, device, (group.size(), 3))
    found = tensor.new_empty(3)
    dist.scatter(found, list(tensor.unbind()) if group.rank() == 1 else None, group=group, group_src=1)
    return found


def _objects(group: dist.ProcessGroup, device: torch.device) -> Any:
    mine = {"rank": group.rank(), "list": [1] * (3 * group.rank() + 1)}
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, mine, group=group)
    box = [mine]
    dist.broadcast_object_list(box, group=group, group_src=1)
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, gathered, group=group, group_dst=0)
    own: list[Any] = [None]
    dist.scatter_object_list(own, rows if group.rank() == 0 else None, group=group, group_src=0)
    dist.barrier(group)
    return rows, box, gathered, own


def _coalesced(group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    tensors = [values(group, device), values(group, device, (4,))]
    group.allreduce_coalesced(tensors).wait()
    return tensors


def _transfers_by_tag(group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """Each rank sends to the next two tensors, which it receives in the other order."""
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sent = [values(group, device), values(group, device, (4,), torch.bool)]
    found = [torch.empty_like(each) for each in sent]
    works = [dist.irecv(found[tag], group=group, group_src=before, tag=tag + 1) for tag in (1, 0)]
    works += [dist.isend(sent[tag], group=group, group_dst=after, tag=tag + 1) for tag in (0, 1)]
    for work in works:
        assert work is not None
        work.wait()
    return found


def _batch_of_transfers(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sent, found = values(group, device), values(group, device)
    ops = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=after),
        dist.P2POp(dist.irecv, found, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return found


def _several_at_once(group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """Awaited in the opposite order."""
    tensors = [values(group, device, (1 + index, 5)) for index in range(6)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[:3]]
    works += [dist.broadcast(tensor, group=group, group_src=1, async_op=True) for tensor in tensors[3:]]
    for work in reversed(works):
        assert work is not None
        work.wait()
    return tensors


CASES: dict[str, Case] = {
    "all_reduce, sum": _all_reduce(ReduceOp.SUM),
    "all_reduce, max": _all_reduce(ReduceOp.MAX),
    "all_reduce, min": _all_reduce(ReduceOp.MIN, torch.int64),
    "all_reduce, product": _all_reduce(ReduceOp.PRODUCT, torch.float64),
    "all_reduce, bfloat16": _all_reduce(ReduceOp.SUM, torch.bfloat16),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "objects": _objects,
    "all_reduce of several": _coalesced,
    "transfers by tag": _transfers_by_tag,
    "batch of transfers": _batch_of_transfers,
    "several at once": _several_at_once,
}
