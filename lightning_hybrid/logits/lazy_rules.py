"""Rules of operations on lazy logits: what they do to the rows of hidden states, or to each chunk of logits.

A rule takes the lazy logits, the function, and its arguments; it returns the result, or ``NotImplemented``: then the
function runs on the full logits, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.logits.chunks import Autocast, RowLoss, RowOp

Rule = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


def rule_of(name: str) -> Rule | None:
    """Return the rule of a function by its name; None if it reads full logits."""
    return _RULES.get(name)


def _op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RowOp:
    """The operation as a function of its first argument."""
    rest, options = args[1:], {name: value for name, value in kwargs.items() if name != "input"}
    return lambda x: func(x, *rest, **options)


def _is_last(x: Any) -> bool:
    return x.class_dim == len(x.shape) - 1


# --- views ------------------------------------------------------------------------------------------------------------


def _reshape(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Operations that keep the order of elements, where the vocabulary stays the last dim."""
    op = _op(func, args, kwargs)
    if not _is_last(x) or _has_tensors(args, kwargs):
        return NotImplemented
    shape = op(torch.empty(x.shape, device="meta")).shape
    if not shape or shape[-1] != x.shape[-1]:
        return NotImplemented
    return x.derived(op, x.rows.reshape(*shape[:-1], x.rows.shape[-1]))


def _permute(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
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


def _index(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
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


def _along_dim(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``narrow``, ``select`` and ``index_select`` along another dim than the vocabulary's."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not _is_last(x) or not isinstance(dim, int) or dim % len(x.shape) == x.class_dim:
        return NotImplemented
    op = _op(func, args, kwargs)
    return x.derived(op, op(x.rows)) if dim >= 0 else NotImplemented


# --- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Casts, and operations with numbers."""
    others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
    if not args or "out" in kwargs or any(other.dim() or other.requires_grad for other in others):
        return NotImplemented
    op = _op(func, args, kwargs)
    example = op(torch.ones(1, dtype=x.dtype, device=x.device))
    if not isinstance(example, Tensor) or example.device != x.device or not example.is_floating_point():
        return NotImplemented
    return x.derived(op, x.rows, dtype=example.dtype, row_op=op, class_dim=x.class_dim)


def _same(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``contiguous`` and ``clone``."""
    return x.derived(_op(func, args, kwargs), x.rows, class_dim=x.class_dim)


def _detach(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return x.derived(func, x.rows.detach(), class_dim=x.class_dim, detached=True)


def _log_softmax(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
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


def _loss(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
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


def _argmax(x: Any, func: Any, args: Any, kwargs: Any) -> Any:
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
