"""Lazy logits: a tensor of the shape of an output head's result, which holds the hidden states and not the logits.

    hidden ─► head ─► LazyLogits ─► [..., :-1, :] ─► .float() ─► cross_entropy      logits in chunks of rows
                                └─► any other operation                             logits in full, computed once

Slices of positions, reshapes and elementwise operations stay lazy: they are applied to the rows of hidden states, or
later to each chunk. A loss of the rows is computed in chunks. Any other operation reads the full logits, so code of the
user need not be analysed, and gets the values that it would get without chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.logits.chunks import Autocast, Head, RowLoss, RowOp
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
    """Logits that are computed when they are read."""

    call: HeadCall  # the call of the head
    # the hidden states of these logits, of the same shape but for the features in the last dim; the dims other than the
    # vocabulary are in the same order
    rows: Tensor
    row_ops: tuple[RowOp, ...]  # applied to logits of shape (rows, vocabulary) that a linear makes of the rows
    class_dim: int  # the dim of the vocabulary: the last one, or 1 as losses of several dims expect it
    is_detached: bool  # whether no gradient flows back
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
        """Return the lazy result of an operation on full logits of the shape of this tensor.

        ``rows`` are the hidden states of the result, and ``row_op`` is what it does to logits of shape (rows,
        vocabulary). The vocabulary is in the last dim of the result, or in ``class_dim``.
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
            rule = _RULES.get(name)
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


# Rules of operations on lazy logits: what they do to the rows of hidden states, or to each chunk of logits.
# A rule takes the lazy logits, the function, and its arguments; it returns the result, or ``NotImplemented``: then the
# function runs on the full logits, which is always right.

Rule = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


def _op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RowOp:
    """The operation as a function of its first argument."""
    rest, options = args[1:], {name: value for name, value in kwargs.items() if name != "input"}
    return lambda x: func(x, *rest, **options)


def _is_last(x: LazyLogits) -> bool:
    return x.class_dim == len(x.shape) - 1


# --- views ------------------------------------------------------------------------------------------------------------


def _reshape(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Operations that keep the order of elements, where the vocabulary stays the last dim."""
    op = _op(func, args, kwargs)
    if not _is_last(x) or _has_tensors(args, kwargs):
        return NotImplemented
    shape = op(torch.empty(x.shape, device="meta")).shape
    if not shape or shape[-1] != x.shape[-1]:
        return NotImplemented
    return x.derived(op, x.rows.reshape(*shape[:-1], x.rows.shape[-1]))


def _permute(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Operations that reorder dims: the vocabulary stays last, or moves to dim 1, where losses expect it."""
    if not _is_last(x) or len(x.shape) > len(_SIZES) or _has_tensors(args, kwargs):
        return NotImplemented
    op, last = _op(func, args, kwargs), len(x.shape) - 1
    sizes = _SIZES[: last + 1]
    order = [sizes.index(size) for size in op(torch.empty(sizes, device="meta")).shape]
    place = order.index(last)
    others = [dim for dim in order if dim != last]
    if place == last:
        return x.derived(op, x.rows.permute(*order))
    return x.derived(op, x.rows.permute(*others, last), class_dim=1) if place == 1 else NotImplemented


_SIZES = (2, 3, 5, 7, 11)


def _index(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``x[index]``, where the index takes all of the vocabulary."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not _is_last(x) or any(isinstance(item, list) for item in index):
        return NotImplemented
    if any(item is Ellipsis for item in index):
        place = next(number for number, item in enumerate(index) if item is Ellipsis)
        after = sum(_dims_of(item) for item in index[place + 1 :])
        takes_last = after > 0
        if place < len(index) - 1 and not after:  # new dims after that of the vocabulary
            return NotImplemented
    else:
        takes_last = sum(_dims_of(item) for item in index) == len(x.shape)
    if takes_last and not (isinstance(index[-1], slice) and index[-1] == slice(None)):
        return NotImplemented
    return x.derived(lambda full: full[index], x.rows[index])


def _dims_of(item: Any) -> int:
    """Number of dims that an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _along_dim(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``narrow``, ``select`` and ``index_select`` along another dim than the vocabulary's."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not _is_last(x) or not isinstance(dim, int) or dim % len(x.shape) == x.class_dim:
        return NotImplemented
    op = _op(func, args, kwargs)
    return x.derived(op, op(x.rows)) if dim >= 0 else NotImplemented


# --- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Casts, and operations with numbers."""
    others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
    if not args or "out" in kwargs or any(other.dim() or other.requires_grad for other in others):
        return NotImplemented
    op = _op(func, args, kwargs)
    example = op(torch.ones(1, dtype=x.dtype, device=x.device))
    if not isinstance(example, Tensor) or example.device != x.device or not example.is_floating_point():
        return NotImplemented
    return x.derived(op, x.rows, dtype=example.dtype, row_op=op, class_dim=x.class_dim)


def _same(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``contiguous`` and ``clone``."""
    return x.derived(_op(func, args, kwargs), x.rows, class_dim=x.class_dim)


def _detach(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    return x.derived(func, x.rows.detach(), class_dim=x.class_dim, detached=True)


def _log_softmax(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``log_softmax`` along the vocabulary."""
    dim, dtype = args[1] if len(args) > 1 else kwargs.get("dim"), kwargs.get("dtype")
    known = {"input", "dim", "_stacklevel", "dtype"}
    if not isinstance(dim, int) or dim % len(x.shape) != x.class_dim or len(args) > 2 or not known >= kwargs.keys():
        return NotImplemented
    op = _op(func, args, kwargs)
    example = F.log_softmax(torch.ones(1, 2, dtype=x.dtype, device=x.device), 1, dtype=dtype)
    row_op = partial(F.log_softmax, dim=1, dtype=dtype)
    return x.derived(op, x.rows, dtype=example.dtype, row_op=row_op, class_dim=x.class_dim)


def _has_tensors(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values()))


# --- reductions of rows -----------------------------------------------------------------------------------------------


def _loss(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """The loss in chunks, where the vocabulary is in dim 1 and the targets are classes."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, weight, reduction = given.get("target"), given.get("weight"), given.get("reduction", "mean")
    shape, is_input = x.rows.shape[:-1], given.get("input") is x
    if (
        x.class_dim != 1
        or not is_input
        or any(given.get(name) is not None for name in ("size_average", "reduce"))
        or reduction not in ("mean", "sum", "none")
        or not isinstance(target, Tensor)
        or target.dtype is not torch.int64
        or target.device != x.device
        or target.shape != shape
        or not target.numel()
        or (weight is not None and (weight.shape != (x.shape[1],) or weight.requires_grad))
    ):
        return NotImplemented
    options = {"label_smoothing": smoothing} if (smoothing := given.get("label_smoothing", 0.0)) else {}
    function = F.cross_entropy if func.__name__ == "cross_entropy" else F.nll_loss
    head, autocast = x.call.head, Autocast.now(x.device)
    loss = RowLoss(
        function, weight, given.get("ignore_index", -100), reduction, options, x.row_ops, autocast, head.rows
    )
    with torch.set_grad_enabled(torch.is_grad_enabled() and not x.is_detached):
        result = head.loss(x.rows.reshape(-1, x.rows.shape[-1]), target.reshape(-1), loss)
    return result.view(shape) if reduction == "none" else result


def _argmax(x: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``argmax`` along the vocabulary, in chunks that are computed for it."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if not isinstance(dim, int) or dim % len(x.shape) != x.class_dim or not x.rows.numel():
        return NotImplemented

    def largest(logits: Tensor) -> Tensor:
        for op in x.row_ops:
            logits = op(logits)
        return logits.argmax(1)

    found = x.call.head.map_rows(x.rows.reshape(-1, x.rows.shape[-1]), largest, x.call.autocast)
    found = found.view(x.rows.shape[:-1])
    return found.unsqueeze(x.class_dim) if keep else found


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "mT"), _permute),
    "__getitem__": _index,
    **dict.fromkeys(("narrow", "select", "index_select"), _along_dim),
    **dict.fromkeys(("to", "float", "double", "half", "bfloat16", "type"), _elementwise),
    **dict.fromkeys(("div", "mul", "true_divide", "divide", "multiply", "tanh", "neg"), _elementwise),
    **dict.fromkeys(("__truediv__", "__mul__", "__rmul__", "__neg__"), _elementwise),
    **dict.fromkeys(("contiguous", "clone"), _same),
    **dict.fromkeys(("detach", "data"), _detach),
    "log_softmax": _log_softmax,
    "cross_entropy": _loss,
    "nll_loss": _loss,
    "argmax": _argmax,
}
