"""Groups of ranks that a layer is sharded over, as one of them sees it: all-reduce, all-gather, all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.collectives.tensors import LinearMap, all_gather_single, reduce_scatter_single
from lightning_hybrid.params.placement import Shard, embed_in_zeros, join, padded, shard_tensor
from lightning_hybrid.shared_memory.collectives import shared_memory
from lightning_hybrid.tensor.plan import Axis


class Ranks:
    """The ranks that a layer is sharded over, as one of them sees it; in this class it is the only one.

    Attributes:
        rank: The number of this rank among them.
        size: The number of ranks.
        overlaps: Whether a sum runs while this rank computes.
    """

    rank, size = 0, 1
    overlaps = False

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor of any shape over the ranks, in place."""

    def start_all_reduce(self, tensor: Tensor) -> Arriving:
        """Begins to sum a contiguous tensor of any shape over the ranks, in place."""
        self.all_reduce(tensor)
        return Arriving(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""
        return [tensor]

    def start_all_gather(self, tensor: Tensor) -> Arriving:
        """Begins to gather the tensors of all ranks, of one shape: ``(ranks, *shape)`` arrives."""
        return Arriving(torch.stack(self.all_gather(tensor)))

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """All-to-all: sends one block to each rank; returns the block from each rank, in these shapes."""
        return blocks

    def reduce_scatter(self, blocks: list[Tensor]) -> Tensor:
        """Sums over the ranks their blocks for this rank; a block for one rank has one shape on all of them."""
        total, *rest = self.exchange(blocks, [blocks[self.rank].shape] * self.size)
        for block in rest:
            total = total + block
        return total

    def shift(self, flat: Tensor, numel: int) -> Arriving:
        """Sends a flat tensor to the next rank; one of ``numel`` elements arrives from the rank before."""
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        none, shapes = flat[:0], [torch.Size((numel if rank == before else 0,)) for rank in range(self.size)]
        return Arriving(self.exchange([flat if k == following else none for k in range(self.size)], shapes)[before])


class Arriving:
    """A tensor that other ranks send or add to while this one computes."""

    def __init__(self, tensor: Tensor, *works: dist.Work) -> None:
        self._tensor, self._works = tensor, works

    def wait(self) -> Tensor:
        """The tensor, of the shape that was expected, once it is complete."""
        for work in self._works:
            work.wait()
        return self._tensor


ONE_RANK = Ranks()


class GroupRanks(Ranks):
    """The ranks of a process group: through shared memory where they are on one host, else by its collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Sets up shared memory, which is collective for the first object of a group."""
        self.group = group
        self._memory = shared_memory(group)
        self.rank = group.rank()
        self.size = group.size()
        # gloo's reduce-scatter is an all-reduce, of twice the bytes.
        self._reduces_shares = dist.get_backend(group) != "gloo"
        self.overlaps = self._memory is None and self.size > 1

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor of any shape over the ranks, in place."""
        if self._memory is not None:
            self._memory.all_reduce(_as_real(tensor))
        else:
            dist.all_reduce(_as_real(tensor), group=self.group)

    def start_all_reduce(self, tensor: Tensor) -> Arriving:
        """Begins to sum a contiguous tensor of any shape over the ranks, in place."""
        if not self.overlaps:
            return super().start_all_reduce(tensor)
        work = dist.all_reduce(_as_real(tensor), group=self.group, async_op=True)
        return Arriving(tensor, work)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""
        if self._memory is not None:
            return self._memory.all_gather(tensor.contiguous())
        return list(self._gather(tensor, async_op=False).wait().unbind())

    def start_all_gather(self, tensor: Tensor) -> Arriving:
        """Begins to gather the tensors of all ranks, of one shape: ``(ranks, *shape)`` arrives."""
        return self._gather(tensor, async_op=True) if self.overlaps else super().start_all_gather(tensor)

    def _gather(self, tensor: Tensor, *, async_op: bool) -> Arriving:
        flat = tensor.new_empty(self.size * tensor.numel())
        sent = _as_real(tensor.reshape(-1))
        work = all_gather_single(_as_real(flat), sent, group=self.group, async_op=async_op)
        return Arriving(flat.view(self.size, *tensor.shape), *([work] if async_op else []))

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """All-to-all: sends one block to each rank; returns the block from each rank, in these shapes."""
        counts = [shape.numel() for shape in shapes]
        if self._memory is not None:
            real = [_as_real(block.reshape(-1)).view(-1) for block in blocks]
            each = 2 if blocks[0].is_complex() else 1
            received = self._memory.exchange(real, [each * count for count in counts])
            if blocks[0].is_complex():
                received = [torch.view_as_complex(block.view(-1, 2)) for block in received]
        else:
            flat, sent = blocks[0].new_empty(sum(counts)), [block.numel() for block in blocks]
            dist.all_to_all_single(_as_real(flat), _as_real(_joined(blocks)), counts, sent, group=self.group)
            received = list(flat.split(counts))
        return [block.view(shape) for block, shape in zip(received, shapes, strict=True)]

    def reduce_scatter(self, blocks: list[Tensor]) -> Tensor:
        """Sums over the ranks their blocks for this rank; a block for one rank has one shape on all of them."""
        if not self._reduces_shares:
            return super().reduce_scatter(blocks)
        own, width = blocks[self.rank], max(block.numel() for block in blocks)
        if len({block.shape for block in blocks}) > 1:  # rows of a message have one length
            blocks = [F.pad(block.reshape(-1), (0, width - block.numel())) for block in blocks]
        # No view: autograd refuses in-place operations on results of its functions that are views.
        total = own.new_empty(own.shape if own.numel() == width else width)
        reduce_scatter_single(_as_real(total.view(-1)), _as_real(_joined(blocks)), group=self.group)
        return total if total.shape == own.shape else total[: own.numel()].view(own.shape).clone()

    def shift(self, flat: Tensor, numel: int) -> Arriving:
        """Sends a flat tensor to the next rank; one of ``numel`` elements arrives from the rank before."""
        if self._memory is not None or self.size == 1:
            return super().shift(flat, numel)
        sent, counts = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size], counts[(self.rank - 1) % self.size] = flat.numel(), numel
        received = flat.new_empty(numel)
        work = dist.all_to_all_single(_as_real(received), _as_real(flat), counts, sent, group=self.group, async_op=True)
        return Arriving(received, work)


def as_ranks(group: dist.ProcessGroup | Ranks) -> Ranks:
    """The ranks of a group."""
    return GroupRanks(group) if isinstance(group, dist.ProcessGroup) else group


class PairedRanks(Ranks):
    """The ranks of two axes together: `rank = outer rank * inner size + inner rank`."""

    def __init__(self, outer: Ranks, inner: Ranks) -> None:
        self._outer, self._inner = outer, inner
        self.rank, self.size = outer.rank * inner.size + inner.rank, outer.size * inner.size

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor of any shape over the ranks of both axes, in place."""
        self._inner.all_reduce(tensor)
        self._outer.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""
        of_inner = torch.stack(self._inner.all_gather(tensor))
        return [block for blocks in self._outer.all_gather(of_inner) for block in blocks.unbind()]

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Is not needed, for blocks of any shape: positions are exchanged over one axis."""
        raise NotImplementedError


def paired(outer: Ranks, inner: Ranks) -> Ranks:
    """The ranks of two axes together; the ranks of one axis where the other has a single rank."""
    if inner.size == 1:
        return outer
    return inner if outer.size == 1 else PairedRanks(outer, inner)


def _joined(blocks: list[Tensor]) -> Tensor:
    """The flat blocks one after another; views of one shape are copied once."""
    if len({block.shape for block in blocks}) == 1:
        return torch.stack(blocks).view(-1)
    return torch.cat([block.reshape(-1) for block in blocks])


def _as_real(tensor: Tensor) -> Tensor:
    """A view as real numbers: gloo supports no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass
class Readers:
    """The readers of a value that has entered a region."""

    # each allocates a new tensor for its gradient, as products with weights do: it can be summed in place
    fresh: bool = False

    def add(self, *, fresh: bool) -> None:
        """Count one more reader."""
        self.fresh &= fresh


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, readers: Readers) -> Tensor:
        ctx.ranks, ctx.readers = ranks, readers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.readers.fresh or torch.is_grad_enabled():
            # The gradient that autograd passes in may be in use elsewhere too.
            grad = grad.clone(memory_format=torch.contiguous_format)
        return _Leave.apply(grad.contiguous(), ctx.ranks), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        ctx.mark_dirty(tensor)
        ranks.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(grad, ctx.ranks, Readers()), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, placements: tuple[Shard | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of the same shapes."""
        ctx.ranks, ctx.placements = ranks, placements
        ctx.set_materialize_grads(False)
        ctx.made = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The sums, of the same shapes; None for a parameter that no rank has used, which optimizers leave alone."""
        ranks = ctx.ranks
        full = []
        for grad, placement, (shape, dtype, device) in zip(grads, ctx.placements, ctx.made, strict=True):
            own = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            full.append(own if placement is None else embed_in_zeros(own, placement, ranks.rank, ranks.size))
        used = full[0].new_ones(len(full))
        for index, grad in enumerate(grads):
            if grad is None:
                used[index] = 0
        # One message for all of them: they are small.
        flat = _Leave.apply(torch.cat([*(grad.reshape(-1) for grad in full), used]), ranks)
        *sums, users = flat.split([*(grad.numel() for grad in full), len(full)])
        totals: list[Tensor | None] = []
        for total, like, grad, placement, count in zip(sums, full, grads, ctx.placements, users, strict=True):
            if grad is None and not count:  # read only where this rank has not used it
                totals.append(None)
                continue
            whole = total.view_as(like)
            totals.append(whole if placement is None else shard_tensor(whole, placement, ranks.rank, ranks.size))
        return None, None, *totals


def enter(tensor: Tensor, ranks: Ranks, readers: Readers | None = None) -> Tensor:
    """Lets a replicated value of any shape enter a region: its gradient is summed over the ranks.

    ``readers`` are the operations that read it, complete when the forward ends; any by default.
    """
    return tensor if ranks.size == 1 else _Enter.apply(tensor, ranks, readers or Readers())


def leave(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Sums the ranks' addends, in place: the result is a replicated value of their shape."""
    return tensor if ranks.size == 1 else _Leave.apply(tensor.contiguous(), ranks)


def gather(tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """All-gathers the ranks' features along ``dim``, of one shape on all ranks: the result is a replicated value."""
    if ranks.size == 1:
        return tensor
    return LinearMap.apply(
        tensor,
        lambda local: torch.cat(ranks.all_gather(local), dim),
        lambda full: full.chunk(ranks.size, dim)[ranks.rank].contiguous(),
    )


def sum_gradients(tensors: list[Tensor], placements: list[Shard | None], ranks: Ranks) -> list[Tensor]:
    """Sums the gradients of parameters that ranks hold in common and use on different features, in one message.

    A placement says which shard of a parameter a rank has (one that ranks repeat is summed), None that it is full.
    The results have the shapes of the tensors.
    """
    with torch._C.DisableTorchFunctionSubclass():  # experts that other ranks share refuse reads of user code
        return list(_SumGradients.apply(ranks, tuple(placements), *tensors))


def local_shard(full: Tensor, placement: Shard, ranks: Ranks) -> Tensor:
    """This rank's shard of a tensor of full shape that all ranks have; its gradient is full on each of them."""
    return LinearMap.apply(
        full,
        lambda full: shard_tensor(full, placement, ranks.rank, ranks.size),
        lambda local: join(ranks.all_gather(padded(local, placement).contiguous()), placement),
    )


Kind = Literal["all_reduce", "all_gather", "all_to_all"]


class Collective(NamedTuple):
    """One collective of a rank."""

    kind: Kind  # its name
    nbytes: int  # of the tensor that the rank puts in
    axis: Axis = "tensor"  # "tensor" or "context"


class CountedRanks(Ranks):
    """One of several ranks; the others are not there.

    Attributes:
        done: The collectives so far; ranks of two axes may share one list.
    """

    def __init__(self, rank: int, size: int, axis: Axis = "tensor", done: list[Collective] | None = None) -> None:
        self.rank, self.size, self._axis = rank, size, axis
        self.done: list[Collective] = [] if done is None else done

    def all_reduce(self, tensor: Tensor) -> None:
        """Count an all-reduce; the tensor, of any shape, stays as it is."""
        self._add("all_reduce", tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Count an all-gather; the tensor of each rank, of the same shape."""
        self._add("all_gather", tensor)
        return [tensor.detach()] * self.size

    def exchange(self, blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Count an all-to-all; a tensor from each rank, in these shapes."""
        if self.size > 1:
            self.done.append(Collective("all_to_all", sum(block.nbytes for block in blocks), self._axis))
        return [blocks[0].new_empty(shape) for shape in shapes]

    def _add(self, kind: Kind, tensor: Tensor) -> None:
        if self.size > 1:
            self.done.append(Collective(kind, tensor.nbytes, self._axis))
