"""Vocabulary-parallel tensors: weights of embeddings and output heads, and their logits.

    rank 0   logits[..., :25129]    --.
                                       >-- cross_entropy: the same number on both ranks; no rank holds all logits
    rank 1   logits[..., 25129:]    --'

User code gets a tensor of the full shape. Operations with a sharding rule run on the shards; all others run on the full
tensor, which the ranks then all-gather. So the code that reads the logits need not be analysed beforehand.

Below autograd, operations get shards, above it there is one tensor of the full shape. So gradients, hooks and
functions of the user get full shapes, whatever ran on shards.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lightning_hybrid.logits.rules import logits_at, rule_of, vocabulary_last
from lightning_hybrid.logits.vocabulary import Vocabulary, VocabularyShard
from lightning_hybrid.step.objects.names import CONTENT_READS, names
from lightning_hybrid.step.standins.tensors import materialize
from lightning_hybrid.step.tracing.functions import NotIntercepted

# Operations that need the memory of the full tensor.
_OF_CONTENT = CONTENT_READS | names(
    "__repr__ __format__ __deepcopy__ __reduce_ex__ data_ptr storage untyped_storage share_memory_ pin_memory"
    " __contains__"
)


class VocabularyTensor(VocabularyShard):
    """A vocabulary shard whose operations run by sharding rules, or on the full tensor."""

    def full_tensor(self) -> Tensor:
        """All-gathers the full shape; gradients flow back to the shard."""
        return _GatherFull.apply(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the full tensor; of this rank's rows in hooks of saved tensors, where torch gathers nothing."""
        if torch._C._is_torch_function_enabled():
            return super().untyped_storage()
        return self._local.untyped_storage()

    def data_ptr(self) -> int:
        """The address of the first element in `untyped_storage`."""
        return super().data_ptr() if torch._C._is_torch_function_enabled() else self._local.data_ptr()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes on to the kernels, except where autograd would gather the full tensor or need its memory."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if func.__self__.__name__ == "data":
                return args[0].detach()
        elif name in _OF_CONTENT:
            args, kwargs = tree_map(materialize, (args, kwargs))
        elif name == "__setitem__" and isinstance(args[0], cls):
            return _set_item(*args)
        else:
            sharded: Callable[..., Any] | None = None
            if func is F.embedding:
                sharded = embedding_rows
            elif name == "gather" and isinstance(args[0] if args else None, cls):
                sharded = gather_rows
            if sharded is not None and (out := sharded(*args, **kwargs)) is not NotImplemented:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs one kernel by its sharding rule, or on the full tensor."""
        kwargs = kwargs or {}
        rule = rule_of(func)
        if rule is not None:
            out = rule(func, args, kwargs)
            if out is not NotImplemented:
                return out
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return _run_on_full(func, args, kwargs)


def _set_item(x: VocabularyTensor, index: Any, value: Any) -> None:
    """``x[index] = value``: written to the full tensor; each rank keeps its rows."""
    full = x.full_tensor().clone()
    full[materialize(index)] = materialize(value)
    x.copy_(full)


def _run_on_full(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a kernel on full tensors; what it writes to one is copied to this rank's rows."""
    schema = func._schema
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    is_view = not written and any(value.alias_info is not None for value in schema.returns)
    changed: list[tuple[VocabularyShard, Tensor]] = []

    def plain(value: Any) -> Any:
        if not isinstance(value, VocabularyShard):
            return value
        return value.exposed() if is_view else value.gathered()

    def writable(value: Any) -> Any:
        if not isinstance(value, VocabularyShard):
            return value
        changed.append((value, value.gathered().clone()))
        return changed[-1][1]

    names = [argument.name for argument in schema.arguments]
    full_args = [
        tree_map(writable if name in written else plain, value) for name, value in zip(names, args, strict=False)
    ]
    full_kwargs = {name: tree_map(writable if name in written else plain, value) for name, value in kwargs.items()}
    out = func(*full_args, **full_kwargs)
    for shard, full in changed:
        shard.local.copy_(shard.vocabulary.local_rows(full, shard.cut_dim))
        shard.mark_written()

    def as_shard(value: Any) -> Any:
        return next((shard for shard, full in changed if value is full), value)

    return tree_map(as_shard, out) if changed else out


class _GatherFull(torch.autograd.Function, NotIntercepted):
    @staticmethod
    def forward(ctx: Any, x: VocabularyShard) -> Tensor:
        """The plain tensor of the full shape."""
        return x.take_full()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient, of the full shape; each rank gets its rows."""
        return grad


class _Represent(torch.autograd.Function, NotIntercepted):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, vocabulary: Vocabulary) -> VocabularyShard:
        """A `VocabularyTensor` of the full shape from this rank's rows."""
        ctx.dim, ctx.vocabulary = dim, vocabulary
        return VocabularyTensor(local.detach(), dim, vocabulary)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """This rank's rows of the gradient."""
        return local_gradient(grad, ctx.dim, ctx.vocabulary), None, None


def local_gradient(grad: Tensor, dim: int, vocabulary: Vocabulary) -> Tensor:
    """This rank's rows, along ``dim``, of a gradient of the full shape."""
    if isinstance(grad, VocabularyShard) and grad.cut_dim == dim:
        return grad.local
    full = grad.gathered() if isinstance(grad, VocabularyShard) else grad
    return vocabulary.local_rows(full, dim).clone()


def represent(local: Tensor, dim: int, vocabulary: Vocabulary) -> VocabularyShard:
    """Makes a tensor of the full shape from this rank's rows along ``dim``, to which gradients flow back."""
    with torch._C.DisableTorchFunction():  # a mode may be about to represent this very tensor
        made: VocabularyShard = _Represent.apply(local, dim, vocabulary)
    return made


class _Lookup(torch.autograd.Function, NotIntercepted):
    @staticmethod
    def forward(ctx: Any, weight: VocabularyShard, rows: Tensor, padding: int | None) -> Tensor:
        """The rows of each rank, summed over ranks: the shape of ``rows``, and the features last."""
        vocabulary = weight.vocabulary
        local, foreign = vocabulary.located(rows)
        ctx.save_for_backward(local, foreign)
        ctx.weight_like, ctx.padding = (vocabulary, type(weight)), padding
        found = torch.embedding(weight.local, local).masked_fill_(foreign.unsqueeze(-1), 0)
        return vocabulary.summed(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[VocabularyShard, None, None]:
        """The gradient of this rank's rows."""
        local, foreign = ctx.saved_tensors
        vocabulary, kind = ctx.weight_like
        padding = -1
        if ctx.padding is not None:
            padding = ctx.padding % vocabulary.length - vocabulary.offset
            padding = padding if 0 <= padding < vocabulary.local_length else -1
        grad = grad.masked_fill(foreign.unsqueeze(-1), 0)
        dense = torch.ops.aten.embedding_dense_backward(grad, local, vocabulary.local_length, padding, False)
        return kind(dense, 0, vocabulary), None, None


def embedding_rows(
    rows: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding`` on a weight sharded by rows; ``NotImplemented`` where an option needs the rows of all ranks."""
    if not isinstance(weight, VocabularyShard) or weight.cut_dim != 0 or isinstance(rows, VocabularyShard):
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    return _Lookup.apply(weight, rows, padding_idx)


class _Gather(torch.autograd.Function, NotIntercepted):
    @staticmethod
    def forward(ctx: Any, x: VocabularyShard, rows: Tensor) -> Tensor:
        """The values at ``rows``, in their shape."""
        ctx.save_for_backward(rows)
        ctx.like = x.vocabulary, type(x), x.local.shape, x.cut_dim
        last, dim = vocabulary_last(x)
        return logits_at(last, rows.movedim(dim, -1)).movedim(-1, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[VocabularyShard, None]:
        """The gradient of this rank's rows."""
        (rows,) = ctx.saved_tensors
        vocabulary, kind, shape, dim = ctx.like
        local, foreign = vocabulary.located(rows)
        out = grad.new_zeros(shape).scatter_add_(dim, local, grad.masked_fill(foreign, 0))
        return kind(out, dim, vocabulary), None


def gather_rows(x: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    """``torch.gather`` along the sharded dim; ``NotImplemented`` along another dim."""
    if not isinstance(x, VocabularyShard) or not isinstance(dim, int) or dim % x.dim() != x.cut_dim or sparse_grad:
        return NotImplemented
    same = all(index.shape[k] == x.shape[k] for k in range(x.dim()) if k != x.cut_dim)
    return _Gather.apply(x, index) if same and prod(index.shape) else NotImplemented
