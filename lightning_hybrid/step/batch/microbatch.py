"""Split a batch into microbatches.

A batch is split only where that provably is right: all its tensors agree on the size of their first dimension. Lists,
arrays and tables of that length go with them, row by row. What else comes with the samples (column names, a tokenizer,
scales) goes to each microbatch as it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_hybrid.step.batch.merge_outputs import join
from lightning_hybrid.step.objects.pytree import children_of, flatten, map_leaves, tensors_inside
from lightning_hybrid.step.objects.tensor_subclasses import detached_copy, of_class

BatchSplitter = Callable[[Any, int], Sequence[Any]]

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class BatchError(ValueError):
    """A batch that cannot be split as asked."""


def batch_size_of(batch: Any) -> int | None:
    """Number of samples in ``batch``; None if its leaves do not agree on one."""
    size, _ = _measure(batch)
    return size


def sizes_of(batches: Sequence[Any]) -> list[int | None]:
    """Number of samples in each."""
    return [batch_size_of(batch) for batch in batches]


def _measure(batch: Any) -> tuple[int | None, str]:
    """The number of samples, or None and the reason."""
    sizes: dict[int, Tensor] = {}
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided:
                return None, f"it holds a tensor of layout {leaf.layout}"
            if leaf.dim():
                sizes.setdefault(leaf.shape[0], leaf)
        elif not isinstance(leaf, _PLAIN) and any(tensor.dim() and len(tensor) > 1 for tensor in tensors_inside(leaf)):
            return None, f"it holds tensors in an object of class {type(leaf).__name__}, whose samples are not known"
    if len(sizes) > 1:
        shapes = [tuple(tensor.shape) for tensor in sizes.values()]
        return None, f"its tensors have different first dimensions: {shapes}"
    if not sizes:
        return None, "it holds no tensor with a batch dimension"
    return next(iter(sizes)), ""


def choose_count(batch: Any, wanted: int | None, num_stages: int, splitter: BatchSplitter | None) -> int:
    """How many microbatches to cut ``batch`` into.

    Args:
        batch: The batch.
        wanted: The user's number; None chooses at most four times the number of stages, and at least two samples each
            where there are enough: layers and metrics take statistics of them.
        num_stages: Number of pipeline stages.
        splitter: The user's own splitter; then ``wanted`` is taken as it is.

    Returns:
        1 where the batch cannot be split.
    """
    if splitter is not None:
        return wanted or max(1, 2 * num_stages)
    size = batch_size_of(batch)
    if size is None:
        return 1
    if wanted is not None:
        return max(1, min(wanted, size))
    if num_stages == 1:
        return 1
    most = max(1, min(size // 2 if size >= 2 * num_stages else size, 4 * num_stages))
    even = [count for count in range(num_stages, most + 1) if size % count == 0]
    return even[-1] if even else most


def why_whole(batch: Any, splitter: BatchSplitter | None) -> str:
    """Why ``batch`` runs as one microbatch whatever is asked for; empty if it can be split."""
    return _measure(batch)[1] if splitter is None else ""


def check_count(batch: Any, wanted: int | None) -> None:
    """Refuse more microbatches than a full batch has samples.

    Raises:
        BatchError: With both numbers.
    """
    size = batch_size_of(batch)
    if wanted is not None and size is not None and wanted > size:
        raise BatchError(
            f"num_microbatches={wanted} but the batch has only {size} samples;"
            f" set num_microbatches={size} or less, or a larger batch_size"
        )


def split_unevenly(batch: Any) -> tuple[list[Any], list[float]]:
    """About a third of a batch and the rest, as ``split`` gives them; nothing if it cannot be cut.

    The sizes have no divisor in common, so that no number of samples but all lies in both parts by their shares.
    """
    size = batch_size_of(batch)
    if size is None or size < 2:
        return [], []
    least = max(2 if size > 4 else 1, size // 3)  # layers may take statistics of several samples
    few = next(few for few in range(least, size) if math.gcd(few, size) == 1)
    return _cut(batch, size, [few, size - few]), [few / size, 1 - few / size]


def split(batch: Any, count: int, splitter: BatchSplitter | None = None) -> tuple[list[Any], list[float]]:
    """Cut ``batch`` into ``count`` microbatches as even as possible.

    Returns:
        The microbatches, and the weight of each: its share of the samples.

    Raises:
        BatchError: The user's splitter gave another number of microbatches.
    """
    if splitter is not None:
        pieces = list(splitter(batch, count))
        if len(pieces) != count:
            raise BatchError(f"batch_splitter was asked for {count} microbatches and gave {len(pieces)}")
        known = [size for piece in pieces if (size := batch_size_of(piece)) is not None]
        total = sum(known)
        if len(known) == len(pieces) and total:
            return pieces, [size / total for size in known]
        return pieces, [1 / count] * count
    if count == 1:
        return [batch], [1.0]
    size = batch_size_of(batch)
    assert size is not None and count <= size
    each, more = divmod(size, count)
    counts = [each + (index < more) for index in range(count)]
    return _cut(batch, size, counts), [part / size for part in counts]


def copied_batch(batch: Any) -> Any:
    """A batch of its own for a run of the step that may write into it; objects that cannot be copied are the same."""
    return map_leaves(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return detached_copy(leaf).requires_grad_(leaf.requires_grad)
    try:
        return copy.deepcopy(leaf)
    except Exception:  # an object of the user's, which need not know how
        return leaf


def join_batches(batches: Sequence[Any]) -> Any:
    """One batch out of those of several replicas.

    Args:
        batches: In order.

    Raises:
        BatchError: What comes out has not their samples.
    """
    if len(batches) == 1:
        return batches[0]
    counts = sizes_of(batches)
    total = sum(count or 0 for count in counts)
    # A batch of two tensors of two samples each is no list of two samples.
    are_columns = all(
        isinstance(batch, list) and all(isinstance(entry, Tensor) and entry.shape[:1] == (count,) for entry in batch)
        for batch, count in zip(batches, counts, strict=True)
    )
    parts = [tuple(batch) for batch in batches] if are_columns else batches
    whole = join(parts, [(count or 0) / max(total, 1) for count in counts], counts)
    if None in counts or batch_size_of(whole) != total:
        raise BatchError(f"the batches of {len(batches)} replicas cannot be concatenated to one")
    return list(whole) if are_columns else whole


def _is_one(item: Any) -> bool:
    """Whether it can be what a list has of one sample: no rows of several are in it."""
    return not any(isinstance(leaf, Tensor | numpy.ndarray) and leaf.ndim for leaf in flatten(item)[0])


def _cut(value: Any, size: int, counts: list[int]) -> list[Any]:
    if isinstance(value, Tensor):
        if not value.dim():
            return [value] * len(counts)
        parts = value.split(counts)
        # What one microbatch writes in place is nothing that another one saved for its backward.
        return [of_class(value, part if value.requires_grad else part.data) for part in parts]
    rows = _rows_of(value, size)
    if rows is not None:
        starts = [sum(counts[:index]) for index in range(len(counts))]
        return [rows[start : start + part] for start, part in zip(starts, counts, strict=True)]
    parts = children_of(value)
    if parts is None:
        return [value] * len(counts)
    children, build = parts
    columns = [_cut(child, size, counts) for child in children]
    return [build([column[index] for column in columns]) for index in range(len(counts))]


def _rows_of(value: Any, size: int) -> Any:
    """What slices of samples are taken from, where something that is no tensor has one row of each; else None."""
    if type(value) in (list, tuple):  # file names, captions, labels
        return value if len(value) == size and all(_is_one(item) for item in value) else None
    if isinstance(value, numpy.ndarray):
        return value if value.shape[:1] == (size,) else None
    is_table = hasattr(type(value), "iloc") and hasattr(value, "__len__")  # such as a DataFrame
    return value.iloc if is_table and len(value) == size else None
