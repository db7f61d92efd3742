"""Vocabulary-parallel tensors: weights of embeddings and output heads, and their logits.

    rank 0   logits[..., :25129]    --.
                                       >-- cross_entropy: the same number on both ranks; no rank holds all logits
    rank 1   logits[..., 25129:]    --'

The user's code gets a tensor that says it is the whole. Operations that can be done in parts are; whatever else is
asked of it is done with the whole, which the ranks then send each other. So nothing has to be known beforehand of what
reads the logits.

Below autograd, operations see slices, above it there is one tensor of the whole's shape. So gradients, hooks and
functions of the user's own mean the whole, whatever was done in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lightning_hybrid.step.instrument.autograd_functions import Unwatched
from lightning_hybrid.step.standins.deferred_tensors import whole_of
from lightning_hybrid.tensor.vocabulary.op_rules import rule_of
from lightning_hybrid.tensor.vocabulary.sharded_losses import LOSS_RULES, embedding_rows, gather_rows
from lightning_hybrid.tensor.vocabulary.vocabulary_shard import Slice, Vocabulary

# Asked of memory that a slice has not got.
_OF_CONTENT = frozenset(
    {
        "tolist",
        "numpy",
        "__array__",
        "__dlpack__",
        "__repr__",
        "__format__",
        "__deepcopy__",
        "__reduce_ex__",
        "data_ptr",
        "storage",
        "untyped_storage",
        "share_memory_",
        "pin_memory",
        "__contains__",
    }
)


class VocabularyTensor(Slice):
    """See the module."""

    def whole(self) -> Tensor:
        """See `Deferred`."""
        return _GatherFull.apply(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Autograd goes on to the kernels, except where it would make a whole or ask for memory."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if func.__self__.__name__ == "data":
                return args[0].detach()
        elif name in _OF_CONTENT:
            args, kwargs = tree_map(whole_of, (args, kwargs))
        elif name == "__setitem__" and isinstance(args[0], cls):
            return _set_item(*args)
        else:
            own: Callable[..., Any] | None = None
            if func is F.embedding:
                own = embedding_rows
            elif name == "gather" and isinstance(args[0] if args else None, cls):
                own = gather_rows
            if own is not None and (out := own(*args, **kwargs)) is not NotImplemented:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """One kernel: by its rule, or on the whole."""
        kwargs = kwargs or {}
        rule = LOSS_RULES.get(func.overloadpacket) or rule_of(func)
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
    """``x[index] = value``: written to the whole, of which each rank keeps its part."""
    whole = x.whole().clone()
    whole[whole_of(index)] = whole_of(value)
    x.copy_(whole)


def _run_on_full(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a kernel on wholes; what it writes to one is written to this rank's part."""
    schema = func._schema
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    is_view = not written and any(value.alias_info is not None for value in schema.returns)
    changed: list[tuple[Slice, Tensor]] = []

    def plain(value: Any) -> Any:
        if not isinstance(value, Slice):
            return value
        return value.exposed() if is_view else value.gathered()

    def writable(value: Any) -> Any:
        if not isinstance(value, Slice):
            return value
        changed.append((value, value.gathered().clone()))
        return changed[-1][1]

    names = [argument.name for argument in schema.arguments]
    own_args = [
        tree_map(writable if name in written else plain, value) for name, value in zip(names, args, strict=False)
    ]
    own_kwargs = {name: tree_map(writable if name in written else plain, value) for name, value in kwargs.items()}
    out = func(*own_args, **own_kwargs)
    for given, whole in changed:
        given.local.copy_(given.vocabulary.own(whole, given.cut_dim))
        given.written()

    def handed_back(value: Any) -> Any:
        return next((given for given, whole in changed if value is whole), value)

    return tree_map(handed_back, out) if changed else out


class _GatherFull(torch.autograd.Function, Unwatched):
    """The plain whole; each rank's part of its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Slice) -> Tensor:
        return x.take_full()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Represent(torch.autograd.Function, Unwatched):
    """A rank's part as a tensor that says it is the whole."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, vocabulary: Vocabulary) -> Slice:
        ctx.dim, ctx.vocabulary = dim, vocabulary
        return VocabularyTensor(local.detach(), dim, vocabulary)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if isinstance(grad, Slice) and grad.cut_dim == ctx.dim:
            return grad.local, None, None
        whole = grad.gathered() if isinstance(grad, Slice) else grad
        return ctx.vocabulary.own(whole, ctx.dim).clone(), None, None


def represent(local: Tensor, dim: int, vocabulary: Vocabulary) -> Slice:
    """A tensor that is used as the whole of which this rank holds a part.

    Args:
        local: This rank's part; gradients flow back to it.
        dim: Along which it is cut.
        vocabulary: The rows of each rank.
    """
    with torch._C.DisableTorchFunction():  # a mode may be about to represent this very part
        made: Slice = _Represent.apply(local, dim, vocabulary)
    return made
