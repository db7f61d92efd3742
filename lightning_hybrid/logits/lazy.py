"""Lazy logits: a tensor of the shape of an output head's result, which holds the hidden states and not the logits.

    hidden ─► head ─► LazyLogits ─► [..., :-1, :] ─► .float() ─► cross_entropy      logits in chunks of rows
                                └─► any other operation                             logits in full, computed once

Slices of positions, reshapes and elementwise operations stay lazy: they are applied to the rows of hidden states, or
later to each chunk. A loss of the rows is computed in chunks. Any other operation reads the full logits, so code of the
user need not be analysed, and gets the values that it would get without chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.logits.chunks import Autocast, Head, RowOp
from lightning_hybrid.logits.lazy_rules import rule_of
from lightning_hybrid.step.objects.names import METADATA
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.standins.tensors import ShardedTensorBase, materialize
from lightning_hybrid.step.tracing.functions import NotIntercepted

# Reads that need no content.
_METADATA = METADATA | {"grad_fn", "is_leaf", "__hash__"}


class HeadCall:
    """One call of an output head.

    Attributes:
        head: The head.
        hidden: Its input, of shape (..., features).
        autocast: As at the call.
        version: Of the full logits as they were computed.
    """

    def __init__(self, head: Head, hidden: Tensor) -> None:
        self.head, self.hidden, self.autocast = head, hidden, Autocast.now(hidden.device)
        self._grad = torch.is_grad_enabled()
        self._full: Tensor | None = None
        self.version = 0

    @property
    def is_computed(self) -> bool:
        """Whether the full logits exist."""
        return self._full is not None

    def full_logits(self) -> Tensor:
        """Return the full logits, of shape (..., vocabulary), differentiable; computed once."""
        if self._full is None:
            with torch.set_grad_enabled(self._grad):
                self._full = self.compute(self.hidden)
            self.version = self._full._version
        return self._full

    def compute(self, hidden: Tensor) -> Tensor:
        """Compute full logits of shape (..., vocabulary) under the modes of the call, without keeping them."""
        with torch._C.DisableTorchFunction(), self.autocast.entered():
            return self.head.full_logits(hidden)


class LazyLogits(ShardedTensorBase):
    """Logits that are computed when they are read.

    Attributes:
        call: The call of the head.
        rows: The hidden states of these logits, of the same shape but for the features in the last dim; the dims other
            than the vocabulary are in the same order.
        row_ops: Applied to logits of shape (rows, vocabulary) that a linear makes of the rows.
        class_dim: The dim of the vocabulary: the last one, or 1 as losses of several dims expect it.
        is_detached: Whether no gradient flows back.
    """

    call: HeadCall
    rows: Tensor
    row_ops: tuple[RowOp, ...]
    class_dim: int
    is_detached: bool
    _ops: tuple[RowOp, ...]  # from the call's result to this tensor
    _origin: LazyLogits | None  # what the last of these was applied to
    _full: Tensor | None
    _written: int  # version of the full tensor as it was made; later ones have been written in place

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> LazyLogits:
        """Create it without a graph, in the forward of an autograd function."""
        made: LazyLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)
        return made

    @classmethod
    def of(cls, call: HeadCall, vocabulary: int) -> LazyLogits:
        """Return the result of a call of a head with ``vocabulary`` output features."""
        dtype = call.autocast.dtype_of_product(call.hidden)
        made = cls._make(call, (), (*call.hidden.shape[:-1], vocabulary), dtype, detached=False)
        made.rows, made.row_ops, made.class_dim = call.hidden, (), made.dim() - 1
        return made

    @classmethod
    def _make(
        cls, call: HeadCall, ops: tuple[RowOp, ...], shape: tuple[int, ...], dtype: torch.dtype, *, detached: bool
    ) -> LazyLogits:
        has_grad = torch.is_grad_enabled() and not detached
        anchor = torch.empty(0, requires_grad=has_grad)  # also where only the weight needs a gradient
        with torch.set_grad_enabled(has_grad):
            made: LazyLogits = _Represent.apply(anchor, call.hidden, call, ops, shape, dtype)
        made.is_detached = not has_grad
        made.call, made._ops, made._origin, made._full, made._written = call, ops, None, None, 0
        return made

    def derived(
        self,
        op: RowOp,
        rows: Tensor,
        *,
        dtype: torch.dtype | None = None,
        row_op: RowOp | None = None,
        class_dim: int | None = None,
        detached: bool = False,
    ) -> LazyLogits:
        """Return the lazy result of an operation.

        Args:
            op: The operation, on full logits of the shape of this tensor.
            rows: The hidden states of the result.
            dtype: Of the result; unchanged if None.
            row_op: What it does to logits of shape (rows, vocabulary); nothing if None.
            class_dim: Where the vocabulary is in the result; last if None.
            detached: Whether no gradient flows back from the result.
        """
        shape, vocabulary = [*rows.shape[:-1]], self.shape[self.class_dim]
        shape.insert(len(shape) if class_dim is None else class_dim, vocabulary)
        detached = detached or self.is_detached
        made = type(self)._make(self.call, (*self._ops, op), tuple(shape), dtype or self.dtype, detached=detached)
        made.rows, made.row_ops = rows, self.row_ops if row_op is None else (*self.row_ops, row_op)
        made.class_dim, made._origin = len(shape) - 1 if class_dim is None else class_dim, self
        return made

    @property
    def is_computed(self) -> bool:
        """Whether full logits exist, which code may have changed in place."""
        return self._full is not None or self.call.is_computed

    def full_tensor(self) -> Tensor:
        """The plain tensor of this shape, differentiable; a sharded vocabulary is gathered."""
        full: Tensor = materialize(self.computed())
        return full

    def computed(self) -> Tensor:
        """The logits, of shape (..., vocabulary), computed once; a local shard of the vocabulary where it is sharded.

        They are differentiable, and views share the memory of what they view.
        """
        if self._full is None:
            if self._origin is None:
                self._full, self._written = self.call.full_logits(), self.call.version
            else:
                self._full, self._written = self._full_of(self._origin)
        return self._full

    def _full_of(self, origin: LazyLogits) -> tuple[Tensor, int]:
        """The full tensor, and its version before other code has written into it."""
        source, has_grad = origin.computed(), not self.is_detached  # other code may read it without gradients
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(has_grad), self.call.autocast.entered():
            found: Tensor = self._ops[-1](source)
            if found.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                return found, origin._written
            if source._version != origin._written:  # what was written after this copy of it is not in the copy
                found = self.call.compute(self.call.hidden)
                for op in self._ops:
                    found = op(found)
            return found, found._version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers from metadata, by a rule for lazy logits, or on the full tensor."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        lazy = args[0] if args else kwargs.get("input")
        if isinstance(lazy, LazyLogits) and not lazy.is_computed:
            if name == "grad":
                return None  # it is no leaf
            if name in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if lazy.is_detached and _requires_grad(lazy):
                # The result of a user's autograd function, whose forward has seen lazy logits: torch has its graph.
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            rule = rule_of(name)
            if rule is not None:
                with torch._C.DisableTorchFunction():
                    out = rule(lazy, func, args, kwargs)
                if out is not NotImplemented:
                    return out
        _note(name, args, kwargs)
        args, kwargs = map_leaves(_materialized, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs a kernel of code that torch functions do not show (an autograd function) on full tensors."""
        _note(str(func), args, kwargs or {})
        args, kwargs = map_leaves(lambda x: _materialized(x, detached=True), (args, kwargs or {}))
        return func(*args, **kwargs)


def _requires_grad(value: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return value.requires_grad


def _materialized(value: Any, *, detached: bool = False) -> Any:
    if not isinstance(value, LazyLogits):
        return value
    found = value.computed()
    return found.detach() if detached else found


def _note(operation: str, args: Any, kwargs: Any) -> None:
    """Tell the heads whose logits an operation reads in full."""

    def note(value: Any) -> Any:
        if isinstance(value, LazyLogits):
            value.call.head.read_in_full(operation)
        return value

    map_leaves(note, (args, kwargs))


class _Represent(torch.autograd.Function, NotIntercepted):
    """Makes lazy logits; code that torch does not show to them (an autograd function) gets gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        hidden: Tensor,
        call: HeadCall,
        ops: tuple[RowOp, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> LazyLogits:
        """The lazy logits."""
        ctx.call, ctx.ops, ctx.needs_hidden = call, ops, hidden.requires_grad
        return LazyLogits(shape, hidden, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient of the hidden states; computes the logits again, and adds to the gradients of parameters."""
        hidden = ctx.call.hidden.detach().requires_grad_(ctx.needs_hidden)
        with torch.enable_grad(), ctx.call.autocast.entered():
            logits = ctx.call.compute(hidden)
            for op in ctx.ops:
                logits = op(logits)
        torch.autograd.backward([logits], [grad])
        return None, hidden.grad, None, None, None, None
