"""Rules of convolutions and pooling: each rank computes its rows of the result from the rows that these need.

A rule takes the arguments of one kernel and returns its result, or ``NotImplemented``: then it runs on full tensors.
Padding along the sharded dim is added as rows, at the edges of the full tensor only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.logits.vocabulary import Vocabulary, VocabularyShard
from lightning_hybrid.spatial.rows import Interval, Needs, Rows, can_be_sharded, owned

aten = torch.ops.aten


def rows_like(x: VocabularyShard, local: Tensor, length: int) -> VocabularyShard:
    """A shard of a tensor of shape (..., length, ...), along the same dim counted from the end as x."""
    rows = x.vocabulary if length == x.vocabulary.length else Rows(length, x.vocabulary.ranks)
    return type(x)(local, local.dim() + x.from_right, rows)


def local_rows(x: Tensor, rows: Vocabulary, from_right: int) -> Tensor:
    """This rank's rows, (..., rows, ...), of a shard or of a full tensor."""
    if isinstance(x, VocabularyShard):
        if (x.vocabulary.length, x.from_right) == (rows.length, from_right):
            return x.local
        x = x.gathered()
    return rows.local_rows(x, x.dim() + from_right)


def unread(x: VocabularyShard, rows: int) -> Tensor:
    """A tensor of the shape of x with so many rows, for kernels that read the shape alone."""
    return x.local.new_empty(1).expand([rows if dim == x.cut_dim else size for dim, size in enumerate(x.shape)])


def named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a kernel by their names, with its defaults."""
    arguments = func._schema.arguments
    given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    return {each.name: given.get(each.name, each.default_value) for each in arguments}


@dataclass(frozen=True)
class Window:
    """What a convolution or a pooling reads along the sharded dim.

    Attributes:
        kernel: Number of its taps.
        stride: Distance of windows.
        padding: Rows before the first one and after the last one.
        dilation: Distance of taps.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def extent(self) -> int:
        """Rows from the first to the last tap."""
        return (self.kernel - 1) * self.dilation + 1

    def out_length(self, length: int) -> int:
        """Rows of the result."""
        return (length + 2 * self.padding - self.extent) // self.stride + 1

    @lru_cache(maxsize=1024)  # noqa: B019 (a few windows, without tensors)
    def needs(self, length: int, size: int) -> Needs | None:
        """What ranks need for their rows of the result; None where it cannot be sharded."""
        out = self.out_length(length)
        if out < 1 or not can_be_sharded(out, size):
            return None

        def rows_of(first: int, last: int) -> Interval:
            return first * self.stride - self.padding, last * self.stride - self.padding + self.extent

        return Needs.of(length, out, size, rows_of)


def _along(x: VocabularyShard, *sizes: Sequence[int]) -> list[int]:
    """The items of lists of one for each dim of space, for the sharded one; of a list of one, that."""
    return [each[x.from_right] if len(each) > 1 else each[0] for each in sizes]


def _without(x: VocabularyShard, sizes: Sequence[int], value: int = 0) -> list[int]:
    """The list with another value for the sharded dim."""
    spread = list(sizes) if len(sizes) > 1 else list(sizes) * (x.dim() - 2)
    spread[x.from_right] = value
    return spread


def is_spatial(x: Any) -> bool:
    """Whether it is sharded along a dim of space: samples and channels come first."""
    return isinstance(x, VocabularyShard) and x.cut_dim >= 2


def convolution(func: Any, args: Any, kwargs: Any) -> Any:
    """A convolution, or a transposed one, of an input whose rows are sharded."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if not is_spatial(x) or isinstance(weight, VocabularyShard):
        return NotImplemented
    if transposed:
        return _Transposed(x, weight, stride, padding, dilation, output_padding, groups).forward(func, bias)
    window = Window(weight.shape[x.from_right], *_along(x, stride, padding, dilation))
    needs = window.needs(x.vocabulary.length, x.vocabulary.ranks.size)
    if needs is None:
        return NotImplemented
    rows = needs.fetch(x.local, x.cut_dim, x.vocabulary)
    out = func(rows, weight, bias, stride, _without(x, padding), dilation, False, output_padding, groups)
    return rows_like(x, out, window.out_length(x.vocabulary.length))


def convolution_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradients of input, weight and bias."""
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask = args
    if not is_spatial(x) or isinstance(weight, VocabularyShard):
        return NotImplemented
    if transposed:
        own = _Transposed(x, weight, stride, padding, dilation, output_padding, groups)
        return own.backward(func, grad, bias_sizes, mask)
    window = Window(weight.shape[x.from_right], *_along(x, stride, padding, dilation))
    needs = window.needs(x.vocabulary.length, x.vocabulary.ranks.size)
    if needs is None:
        return NotImplemented
    out_rows = Rows(window.out_length(x.vocabulary.length), x.vocabulary.ranks)
    rows = needs.fetch(x.local, x.cut_dim, x.vocabulary)
    local_grad = local_rows(grad, out_rows, x.from_right).contiguous()
    padding = _without(x, padding)
    grads = func(local_grad, rows, weight, bias_sizes, stride, padding, dilation, False, output_padding, groups, mask)
    grad_x = None
    if mask[0]:
        grad_x = x.like(needs.give_back(grads[0], x.cut_dim, x.vocabulary))
    return grad_x, *summed(x.vocabulary, grads[1:])


def summed(rows: Vocabulary, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of parameters, of any shapes, summed over the ranks in one message."""
    present = [grad for grad in grads if grad is not None]
    if not present:
        return list(grads)
    flat = rows.summed(torch.cat([grad.reshape(-1) for grad in present]))
    parts = iter(flat.split([grad.numel() for grad in present]))
    return [None if grad is None else next(parts).view(grad.shape) for grad in grads]


class _Transposed:
    """A transposed convolution: a rank computes more than its rows of the result, and keeps these."""

    def __init__(
        self,
        x: VocabularyShard,
        weight: Tensor,
        stride: Any,
        padding: Any,
        dilation: Any,
        output_padding: Any,
        groups: int,
    ) -> None:
        self._x, self._weight, self._groups = x, weight, groups
        self._stride, self._dilation = stride, dilation
        self._padding, self._output_padding = _without(x, padding), _without(x, output_padding)
        size, length = x.vocabulary.ranks.size, x.vocabulary.length
        step, before, spread, further = _along(x, stride, padding, dilation, output_padding)
        extent = (weight.shape[x.from_right] - 1) * spread + 1
        self.out_length = (length - 1) * step - 2 * before + extent + further
        self.can_be_sharded = can_be_sharded(self.out_length, size)

        def rows_of(first: int, last: int) -> Interval:
            start = max(0, -(-(first + before - extent + 1) // step))
            end = min(length, (last + before) // step + 1)
            return (start, end) if start < end else (min(start, length - 1), min(start, length - 1) + 1)

        self._needs = Needs.of(length, self.out_length, size, rows_of)
        first, last = owned(self.out_length, x.vocabulary.ranks.rank, size)
        start, end = self._needs.of_ranks[x.vocabulary.ranks.rank]
        self._skipped = first - (start * step - before)  # rows of the local result that belong to the rank before
        self._made, self._kept = (end - start - 1) * step + extent, last - first

    def forward(self, func: Any, bias: Tensor | None) -> Any:
        """The rows of the result."""
        x = self._x
        if not self.can_be_sharded:
            return NotImplemented
        rows = self._needs.fetch(x.local, x.cut_dim, x.vocabulary)
        made = func(rows, self._weight, None, *self._options())
        out = self._moved(made, self._skipped, self._kept)
        if bias is not None:
            out = out + bias.view(-1, *(1 for _ in range(out.dim() - 2)))
        return rows_like(x, out.contiguous(), self.out_length)

    def _options(self) -> tuple[Any, ...]:
        return self._stride, self._padding, self._dilation, True, self._output_padding, self._groups

    def _moved(self, rows: Tensor, start: int, count: int) -> Tensor:
        """``count`` rows from ``start`` on, which may be beyond both ends, where they are 0."""
        dim = self._x.cut_dim
        length = rows.shape[dim]
        first, last = max(0, min(start, length)), max(0, min(start + count, length))
        inner = rows.narrow(dim, first, last - first)
        before = min(count, max(0, -start))
        after = count - before - (last - first)
        if not before and not after:
            return inner
        pads = [0, 0] * (rows.dim() - 1 - dim) + [before, after]
        return torch.nn.functional.pad(inner, pads)

    def backward(self, func: Any, grad: Tensor, bias_sizes: Any, mask: Any) -> Any:
        """The gradients of input, weight and bias."""
        x = self._x
        if not self.can_be_sharded:
            return NotImplemented
        local_grad = local_rows(grad, Rows(self.out_length, x.vocabulary.ranks), x.from_right)
        of_made = self._moved(local_grad, -self._skipped, self._made).contiguous()
        rows = self._needs.fetch(x.local, x.cut_dim, x.vocabulary)
        found = func(of_made, rows, self._weight, None, *self._options(), [mask[0], mask[1], False])
        grad_x = x.like(self._needs.give_back(found[0], x.cut_dim, x.vocabulary)) if mask[0] else None
        dims = [dim for dim in range(local_grad.dim()) if dim != 1]
        of_bias = local_grad.sum(dims) if mask[2] else None
        return grad_x, *summed(x.vocabulary, [found[1] if mask[1] else None, of_bias])


# --- pooling ----------------------------------------------------------------------------------------------------------


def _pool_window(x: VocabularyShard, kernel: Any, stride: Any, padding: Any, dilation: Any = (1,)) -> Window:
    return Window(*_along(x, kernel, stride or kernel, padding, dilation))


def max_pool(func: Any, args: Any, kwargs: Any) -> Any:
    """Maxima of windows, and the flat positions of these in the full plane."""
    x, kernel, stride, padding, dilation, ceil_mode = named(func, args, kwargs).values()
    if not is_spatial(x) or ceil_mode:
        return NotImplemented
    window = _pool_window(x, kernel, stride, padding, dilation)
    needs = window.needs(x.vocabulary.length, x.vocabulary.ranks.size)
    if needs is None:
        return NotImplemented
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    rows = needs.fetch(x.local, x.cut_dim, x.vocabulary, fill=lowest)
    out, indices = func(rows, kernel, stride, _without(x, padding), dilation, False)
    out_length = window.out_length(x.vocabulary.length)
    return rows_like(x, out, out_length), rows_like(x, _moved_rows(indices, x, rows, needs, +1), out_length)


def _moved_rows(indices: Tensor, x: VocabularyShard, rows: Tensor, needs: Needs, sign: int) -> Tensor:
    """Flat positions in the fetched plane as those in the full one, or (``sign`` -1) the other way round."""
    start = needs.of_ranks[x.vocabulary.ranks.rank][0]
    dims = range(x.cut_dim + 1, x.dim())
    inner = 1
    for dim in dims:
        inner *= x.shape[dim]
    outer_dims = range(2, x.cut_dim)
    if not list(outer_dims):
        return indices if not start else indices.add_(start * inner) if sign > 0 else indices - start * inner
    local, full = (inner * rows.shape[x.cut_dim], inner * x.shape[x.cut_dim])
    source, target = (local, full) if sign > 0 else (full, local)
    outer, rest = indices.div(source, rounding_mode="floor"), indices % source
    return outer * target + rest + sign * start * inner


def max_pool_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the input."""
    grad, x, kernel, stride, padding, dilation, ceil_mode, indices = args
    if not is_spatial(x) or ceil_mode or not isinstance(indices, VocabularyShard):
        return NotImplemented
    window = _pool_window(x, kernel, stride, padding, dilation)
    needs = window.needs(x.vocabulary.length, x.vocabulary.ranks.size)
    if needs is None:
        return NotImplemented
    rows = unread(x, needs.num_fetched(x.vocabulary.ranks.rank))
    places = _moved_rows(indices.local, x, rows, needs, -1)
    local_grad = local_rows(grad, indices.vocabulary, x.from_right).contiguous()
    found = func(local_grad, rows, kernel, stride, _without(x, padding), dilation, False, places)
    return x.like(needs.give_back(found, x.cut_dim, x.vocabulary))


def avg_pool(func: Any, args: Any, kwargs: Any) -> Any:
    """Averages of windows."""
    x, kernel, stride, padding, ceil_mode, counts_padding, divisor = named(func, args, kwargs).values()
    window = _average_window(x, kernel, stride, padding, ceil_mode, counts_padding)
    needs = None if window is None else window.needs(x.vocabulary.length, x.vocabulary.ranks.size)
    if window is None or needs is None:
        return NotImplemented
    rows = needs.fetch(x.local, x.cut_dim, x.vocabulary)
    out = func(rows, kernel, stride, _without(x, padding), False, counts_padding, divisor)
    return rows_like(x, out, window.out_length(x.vocabulary.length))


def _average_window(x: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, counts: bool) -> Window | None:
    """The window; None where the number of rows that are averaged differs at the edges."""
    if not is_spatial(x) or ceil_mode:
        return None
    window = _pool_window(x, kernel, stride, padding)
    return window if counts or not window.padding else None


def avg_pool_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the input."""
    grad, x, kernel, stride, padding, ceil_mode, counts_padding, divisor = args
    window = _average_window(x, kernel, stride, padding, ceil_mode, counts_padding)
    needs = None if window is None else window.needs(x.vocabulary.length, x.vocabulary.ranks.size)
    if window is None or needs is None:
        return NotImplemented
    out_rows = Rows(window.out_length(x.vocabulary.length), x.vocabulary.ranks)
    local_grad = local_rows(grad, out_rows, x.from_right).contiguous()
    rows = unread(x, needs.num_fetched(x.vocabulary.ranks.rank))
    found = func(local_grad, rows, kernel, stride, _without(x, padding), False, counts_padding, divisor)
    return x.like(needs.give_back(found, x.cut_dim, x.vocabulary))


RULES = {
    aten.convolution: convolution,
    aten.convolution_backward: convolution_backward,
    aten.max_pool2d_with_indices: max_pool,
    aten.max_pool3d_with_indices: max_pool,
    aten.max_pool2d_with_indices_backward: max_pool_backward,
    aten.max_pool3d_with_indices_backward: max_pool_backward,
    aten.avg_pool2d: avg_pool,
    aten.avg_pool3d: avg_pool,
    aten.avg_pool2d_backward: avg_pool_backward,
    aten.avg_pool3d_backward: avg_pool_backward,
}
