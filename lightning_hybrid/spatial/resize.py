"""Rules of padding and interpolation: each row of the result is a weighted sum of rows of the input.

    nearest     1 row                    padding by reflection, by the edge: 1 row
    bilinear    2 rows, weights by their distance
    bicubic     4 rows

Torch's own kernel gives the weights: it runs once on the rows of an identity matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.logits.vocabulary import VocabularyShard
from lightning_hybrid.spatial.rows import Interval, Needs, Rows, can_be_sharded, owned
from lightning_hybrid.spatial.windows import is_spatial, local_rows, named, rows_like, unread

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class RowSums:
    """Rows of a result as weighted sums of rows.

    Attributes:
        length: Rows of the input.
        sources: For each row of the result, the rows that it reads; all lists are of one length.
        weights: Their weights; none: a row is copied.
    """

    length: int
    sources: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]] = ()

    @lru_cache(maxsize=1024)  # noqa: B019 (as long as the sums, which are themselves cached)
    def needs(self, size: int) -> Needs | None:
        """What ranks need for their rows of the result; None where it cannot be sharded."""
        if not can_be_sharded(len(self.sources), size):
            return None

        def rows_of(first: int, last: int) -> Interval:
            read = [row for output in self.sources[first : last + 1] for row in output]
            return min(read), max(read) + 1

        return Needs.of(self.length, len(self.sources), size, rows_of)

    @lru_cache(maxsize=1024)  # noqa: B019 (as long as the sums, which are themselves cached)
    @torch.inference_mode(mode=False)  # made in an evaluation, they are used in training too
    def _taps(self, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Any]]:
        """For each tap its places among the fetched rows of a rank, and its weights; None where rows are copied."""
        needs = self.needs(size)
        assert needs is not None
        first, last = owned(len(self.sources), rank, size)
        start = needs.of_ranks[rank][0]
        found: list[tuple[Tensor, Any]] = []
        for tap in range(len(self.sources[0])):
            places = torch.tensor([row[tap] - start for row in self.sources[first:last]], device=device)
            values = [row[tap] for row in self.weights[first:last]]
            found.append((places, torch.tensor(values, dtype=dtype, device=device) if values else None))
        return found

    def _taps_of(self, like: Tensor, dim: int, rank: int, size: int) -> Iterator[tuple[Tensor, Any]]:
        """The taps for tensors of these dims and this dtype, whose weights broadcast."""
        shape = [-1 if k == dim else 1 for k in range(like.dim())]
        for places, weights in self._taps(rank, size, torch.promote_types(like.dtype, torch.float32), like.device):
            yield places, None if weights is None else weights.view(shape)

    def apply(self, x: VocabularyShard) -> VocabularyShard | None:
        """The result's rows of this rank; None where it cannot be sharded."""
        ranks, dim = x.vocabulary.ranks, x.cut_dim
        needs = self.needs(ranks.size)
        if needs is None:
            return None
        rows, total = needs.fetch(x.local, dim, x.vocabulary), None
        for places, weights in self._taps_of(rows, dim, ranks.rank, ranks.size):
            taken = rows.index_select(dim, places)
            addend = taken if weights is None else taken * weights
            total = addend if total is None else total.add_(addend)
        assert total is not None
        return rows_like(x, total.to(x.dtype), len(self.sources))

    def adjoint(self, grad: Tensor, rows: Rows, from_right: int) -> Tensor:
        """The gradient of this rank's input rows, from a gradient of shape (..., rows of the result, ...)."""
        ranks = rows.ranks
        needs = self.needs(ranks.size)
        assert needs is not None
        local = local_rows(grad, Rows(len(self.sources), ranks), from_right)
        dim = local.dim() + from_right
        count = needs.num_fetched(ranks.rank)
        shape = [count if k == dim else length for k, length in enumerate(local.shape)]
        wide = torch.promote_types(local.dtype, torch.float32) if self.weights else local.dtype
        found = local.new_zeros(shape, dtype=wide)
        for places, weights in self._taps_of(local, dim, ranks.rank, ranks.size):
            found.index_add_(dim, places, (local if weights is None else local * weights).to(found.dtype))
        return needs.give_back(found.to(grad.dtype), dim, rows)


# --- what a kernel does to rows, by the kernel itself -----------------------------------------------------------------


@lru_cache(maxsize=1024)
def _row_sums(run: Kernel, length: int, dtype: torch.dtype, device: torch.device) -> RowSums:
    """Learns the sums that a kernel makes of ``length`` rows: it runs on the rows of an identity matrix."""
    taps: list[list[tuple[int, float]]] = []
    for start in range(0, length, _AT_ONCE):
        count = min(_AT_ONCE, length - start)
        unit = torch.zeros(1, count, length, _COLUMNS, dtype=torch.promote_types(dtype, torch.float32), device=device)
        unit[0, torch.arange(count), start + torch.arange(count)] = 1
        found = run(unit)[0, :, :, 0]
        taps = taps or [[] for _ in range(found.shape[1])]
        for source, row in found.nonzero().tolist():
            taps[row].append((start + source, float(found[source, row])))
    most = max(map(len, taps))
    filled = [row + [(row[0][0], 0.0)] * (most - len(row)) for row in taps]
    is_copy = all(row == [(row[0][0], 1.0)] for row in taps)
    weights = [] if is_copy else [[weight for _, weight in row] for row in filled]
    return RowSums(length, [[source for source, _ in row] for row in filled], weights)


_AT_ONCE = 256
_COLUMNS = 2  # with one, kernels of torch 2.13 that antialias take the channels for columns


@dataclass(frozen=True)
class Kernel:
    """One kernel with the options of the sharded dim, which leaves the columns as they are.

    Attributes:
        func: It, for two dims of space.
        options: All but its input.
    """

    func: Any
    options: tuple[Any, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        """Run on rows (1, channels, rows, columns)."""
        with torch._C.DisableTorchFunction():
            found: Tensor = self.func(rows, *self.options)
        return found


def _interpolation(func: Any, options: Sequence[Any], length: int, out_length: int, from_right: int) -> Any:
    """The kernel of two dims for the sharded one alone, and the options of the full kernel for the others."""
    name = func.overloadpacket.__name__
    dims = 3 if "3d" in name else 2
    corners, factors = options[: len(options) - dims], list(options[len(options) - dims :])
    factor, factors[from_right] = factors[from_right], None
    of_rows = getattr(aten, name.removesuffix("_backward").replace("trilinear", "bilinear").replace("3d", "2d")).default
    return Kernel(of_rows, ((out_length, _COLUMNS), *corners, factor, None)), (*corners, *factors)


def upsample(func: Any, args: Any, kwargs: Any) -> Any:
    """Interpolation, of the sharded dim by sums of rows, of others by the kernel."""
    x, sizes, *options = named(func, args, kwargs).values()
    if not is_spatial(x):
        return NotImplemented
    kernel, rest = _interpolation(func, options, x.vocabulary.length, sizes[x.from_right], x.from_right)
    sums = _row_sums(kernel, x.vocabulary.length, x.dtype, x.device)
    if sums.needs(x.vocabulary.ranks.size) is None:
        return NotImplemented
    out_sizes = list(sizes)
    out_sizes[x.from_right] = x.vocabulary.local_length
    smallest_first = sizes[x.from_right] > x.vocabulary.length
    if smallest_first:  # the other dims of fewer rows
        x = x.like(func(x.local, out_sizes, *rest)) if _changes(x, sizes) else x
        return sums.apply(x)
    out = sums.apply(x)
    assert out is not None
    if not _changes(x, sizes):
        return out
    out_sizes[x.from_right] = out.vocabulary.local_length
    return out.like(func(out.local, out_sizes, *rest))


def _changes(x: VocabularyShard, sizes: Sequence[int]) -> bool:
    dims = range(x.dim() - len(sizes), x.dim())
    return any(x.shape[dim] != size for dim, size in zip(dims, sizes, strict=True) if dim != x.cut_dim)


def upsample_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the input."""
    grad, sizes, in_sizes, *options = named(func, args, kwargs).values()
    if not is_spatial(grad):
        return NotImplemented
    length, from_right = in_sizes[grad.from_right], grad.from_right
    kernel, rest = _interpolation(func, options, length, sizes[from_right], from_right)
    sums = _row_sums(kernel, length, grad.dtype, grad.device)
    if sums.needs(grad.vocabulary.ranks.size) is None or not can_be_sharded(length, grad.vocabulary.ranks.size):
        return NotImplemented
    rows = Rows(length, grad.vocabulary.ranks)
    changes = any(sizes[k] != in_sizes[k + 2] for k in range(len(sizes)) if k - len(sizes) != from_right)

    def others(local: Tensor) -> Tensor:
        if not changes:
            return local
        outer, inner = list(sizes), list(in_sizes)
        outer[from_right] = inner[from_right] = local.shape[from_right]
        found: Tensor = func(local.contiguous(), outer, inner, *rest)
        return found

    if sizes[from_right] > length:
        return rows_like(grad, others(sums.adjoint(grad, rows, from_right)), length)
    return rows_like(grad, sums.adjoint(grad.like(others(grad.local)), rows, from_right), length)


# --- padding ----------------------------------------------------------------------------------------------------------


def _of_sharded_dim(x: VocabularyShard, pads: Sequence[int]) -> tuple[int, int, list[int]]:
    """Rows before and after, and the pads of other dims; torch lists the last dim first."""
    place = 2 * (-x.from_right - 1)
    if place + 1 >= len(pads):
        return 0, 0, list(pads)
    others = [0 if k in (place, place + 1) else pad for k, pad in enumerate(pads)]
    return pads[place], pads[place + 1], others


def constant_pad(func: Any, args: Any, kwargs: Any) -> Any:
    """Padding by a constant; negative pads take rows away."""
    x, pads, *value = args
    before, after, others = _of_sharded_dim(x, pads)
    length, size = x.vocabulary.length, x.vocabulary.ranks.size
    out_length = length + before + after
    if not can_be_sharded(out_length, size):
        return NotImplemented
    fill = value[0] if value else 0
    needs = Needs.of(length, out_length, size, lambda first, last: (first - before, last - before + 1))
    rows = needs.fetch(x.local, x.cut_dim, x.vocabulary, fill=fill)
    out = F.pad(rows, others, value=fill) if any(others) else rows
    return rows_like(x, out.clone() if out is x.local else out, out_length)


def _padding(func: Any, x: Tensor, before: int, after: int, length: int) -> RowSums:
    """What a kernel of padding does to rows."""
    name = func.overloadpacket.__name__.removesuffix("_backward").replace("3d", "2d")
    return _row_sums(Kernel(getattr(aten, name).default, ((0, 0, before, after),)), length, x.dtype, x.device)


def pad(func: Any, args: Any, kwargs: Any) -> Any:
    """Padding by reflection, or by the edge."""
    x, pads = args
    if not is_spatial(x):
        return NotImplemented
    before, after, others = _of_sharded_dim(x, pads)
    out = _padding(func, x, before, after, x.vocabulary.length).apply(x) if before or after else x
    if out is None:
        return NotImplemented
    return out.like(func(out.local, others)) if any(others) else out


def pad_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the input."""
    grad, x, pads = args
    if not is_spatial(x):
        return NotImplemented
    before, after, others = _of_sharded_dim(x, pads)
    length, ranks = x.vocabulary.length, x.vocabulary.ranks
    sums = _padding(func, x, before, after, length) if before or after else None
    if sums is not None and sums.needs(ranks.size) is None:
        return NotImplemented
    rows = Rows(length + before + after, ranks)
    local = local_rows(grad, rows, x.from_right)
    if any(others):
        local = func(local.contiguous(), unread(x, local.shape[x.cut_dim]), others)
    if sums is None:
        return x.like(local)
    return x.like(sums.adjoint(type(x)(local, x.cut_dim, rows), x.vocabulary, x.from_right))


_UPSAMPLES = (
    *(aten.upsample_nearest2d, aten.upsample_nearest3d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d),
    *(aten.upsample_bilinear2d, aten.upsample_trilinear3d, aten.upsample_bicubic2d),
    *(aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa),
)
_PADS = ("reflection_pad2d", "reflection_pad3d", "replication_pad2d", "replication_pad3d")

RULES = {
    aten.constant_pad_nd: constant_pad,
    **dict.fromkeys(_UPSAMPLES, upsample),
    **{getattr(aten, f"{kind.__name__}_backward"): upsample_backward for kind in _UPSAMPLES},
    **{getattr(aten, name): pad for name in _PADS},
    **{getattr(aten, f"{name}_backward"): pad_backward for name in _PADS},
}
