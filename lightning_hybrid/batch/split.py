"""Split a batch into microbatches.

A batch is split only where that provably is right: all its tensors have the same size in their first dimension. Lists,
arrays and tables of that length are split with them, row by row. Any other object in the batch (column names, a
tokenizer, scales) is passed to each microbatch unchanged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_hybrid.batch.merge import join
from lightning_hybrid.errors import BatchError
from lightning_hybrid.step.objects.pytree import children_of, flatten, map_leaves, tensors_inside
from lightning_hybrid.step.objects.tensors import detached_copy, with_class_of
from lightning_hybrid.text import counted

BatchSplitter = Callable[[Any, int], Sequence[Any]]

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def batch_size_of(batch: Any) -> int | None:
    """Number of samples in ``batch``: the common first dimension of its tensors; None if there is none."""
    size, _ = _samples_of(batch)
    return size


def elements_per_sample(batch: Any) -> float | None:
    """Elements of the tensors of one sample; None if the number of samples is unknown."""
    size = batch_size_of(batch)
    leaves = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()]
    return sum(leaf.numel() for leaf in leaves) / size if size else None


def sizes_of(batches: Sequence[Any]) -> list[int | None]:
    """Number of samples in each batch."""
    return [batch_size_of(batch) for batch in batches]


def _samples_of(batch: Any) -> tuple[int | None, str]:
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
    """Choose the number of microbatches of ``batch``: 1 where it cannot be split.

    ``wanted`` is the user's number, and used unchanged with the user's ``splitter``. None chooses at most four times
    the number of stages, and at least two samples each where there are enough: layers and metrics take statistics of
    them.
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


def why_unsplit(batch: Any, splitter: BatchSplitter | None) -> str:
    """Why ``batch`` runs unsplit, whatever number is requested; empty if it can be split."""
    return _samples_of(batch)[1] if splitter is None else ""


def check_count(batch: Any, wanted: int | None) -> None:
    """Refuse more microbatches than a full batch has samples."""
    check_number(batch_size_of(batch), wanted)


def check_number(size: int | None, wanted: int | None) -> None:
    """Refuse more microbatches than ``size``, the number of samples; None where it is not known."""
    if wanted is not None and size is not None and wanted > size:
        raise BatchError(
            f"num_microbatches={wanted} but the batch has only {counted(size, 'sample')};"
            f" set num_microbatches={size}{' or less' if size > 1 else ''}, or a larger batch_size",
            entry="few-samples",
        )


def split_unevenly(batch: Any) -> tuple[list[Any], list[float]]:
    """Split a batch in about a third and the rest, as ``split`` returns them; empty lists if it cannot be split.

    The sizes are coprime, so that no number of samples but all can divide between them by their shares.
    """
    size = batch_size_of(batch)
    if size is None or size < 2:
        return [], []
    least = max(2 if size > 4 else 1, size // 3)  # layers may take statistics of several samples
    few = next(few for few in range(least, size) if math.gcd(few, size) == 1)
    return _split_value(batch, size, [few, size - few]), [few / size, 1 - few / size]


def without_last_sample(batch: Any) -> Any:
    """Return a batch without its last sample, or as it is where two samples would not be left.

    Of this batch and the given one, one has halves of coprime sizes, as ``split_unevenly`` makes them.
    """
    size = batch_size_of(batch)
    return batch if size is None or size < 3 else _split_value(batch, size, [size - 1, 1])[0]


def split(batch: Any, count: int, splitter: BatchSplitter | None = None) -> tuple[list[Any], list[float]]:
    """Split ``batch`` into ``count`` microbatches as evenly as possible; and their shares of the samples."""
    if splitter is not None:
        pieces = list(splitter(batch, count))
        if len(pieces) != count:
            raise BatchError(
                f"batch_splitter was called for {count} microbatches and returned {len(pieces)}", entry="batch-splitter"
            )
        sizes = [size for piece in pieces if (size := batch_size_of(piece)) is not None]
        total = sum(sizes)
        if len(sizes) == len(pieces) and total:
            return pieces, [size / total for size in sizes]
        return pieces, [1 / count] * count
    if count == 1:
        return [batch], [1.0]
    size = batch_size_of(batch)
    assert size is not None and count <= size
    counts = _sizes_of_microbatches(size, count)
    return _split_value(batch, size, counts), [samples / size for samples in counts]


def halves(batch: Any, count: int, splitter: BatchSplitter | None = None) -> list[tuple[Any, list[Any], list[float]]]:
    """Return each of ``count`` microbatches, and its halves with their weights, as ``split`` makes them.

    Where a microbatch is one sample, or a splitter of the user may not split it again, the batch takes their place.
    """
    batch = copied_batch(batch)
    parts, weights = split(batch, count, splitter)
    if splitter is not None or min(batch_size_of(part) or 0 for part in parts) < 2:
        return [(batch, parts, weights)]
    return [(part, *split(part, 2)) for part in parts]


def split_by_sizes(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a batch, or another value with one row for each sample, into parts of these numbers of samples."""
    return _split_value(batch, sum(sizes), list(sizes))


def neighbouring_microbatches(batch: Any, count: int) -> list[Any]:
    """Return each two neighbours of ``count`` microbatches, as ``split`` makes them, as one batch."""
    size = batch_size_of(batch)
    assert size is not None and 2 <= count <= size
    counts = _sizes_of_microbatches(size, count)
    pairs = []
    for index in range(count - 1):
        before, rows = sum(counts[:index]), counts[index] + counts[index + 1]
        pairs.append(_split_value(batch, size, [before, rows, size - before - rows])[1])
    return pairs


def _sizes_of_microbatches(size: int, count: int) -> list[int]:
    each, more = divmod(size, count)
    return [each + (index < more) for index in range(count)]


def copied_batch(batch: Any) -> Any:
    """Copy a batch for a run of the step that may write into it; objects that cannot be copied are passed unchanged."""
    return map_leaves(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return detached_copy(leaf).requires_grad_(leaf.requires_grad)
    try:
        return copy.deepcopy(leaf)
    except Exception:  # a user's object, which need not support it
        return leaf


def join_batches(batches: Sequence[Any]) -> Any:
    """Concatenate the batches of several replicas, in their order, to one."""
    if len(batches) == 1:
        return batches[0]
    counts = sizes_of(batches)
    total = sum(count or 0 for count in counts)
    # A batch of two tensors of two samples each is no list of two samples.
    are_columns = all(
        isinstance(batch, list) and all(isinstance(entry, Tensor) and entry.shape[:1] == (count,) for entry in batch)
        for batch, count in zip(batches, counts, strict=True)
    )
    outputs = [tuple(batch) for batch in batches] if are_columns else batches
    merged = join(outputs, [(count or 0) / max(total, 1) for count in counts], counts)
    if None in counts or batch_size_of(merged) != total:
        raise BatchError(f"the batches of {len(batches)} replicas cannot be concatenated to one", entry="join-batches")
    return list(merged) if are_columns else merged


def _is_single_sample(item: Any) -> bool:
    """Whether a list item can belong to one sample: it contains no tensor with rows of several."""
    return not any(isinstance(leaf, Tensor | numpy.ndarray) and leaf.ndim for leaf in flatten(item)[0])


def _split_value(value: Any, size: int, counts: list[int]) -> list[Any]:
    if isinstance(value, Tensor):
        if not value.dim():
            return [value] * len(counts)
        # In-place writes of one microbatch must not bump the version of tensors that another saved for its backward.
        return [with_class_of(value, rows if value.requires_grad else rows.data) for rows in value.split(counts)]
    rows = _rows_of(value, size)
    if rows is not None:
        starts = [sum(counts[:index]) for index in range(len(counts))]
        return [rows[start : start + samples] for start, samples in zip(starts, counts, strict=True)]
    container = children_of(value)
    if container is None:
        return [value] * len(counts)
    children, build = container
    columns = [_split_value(child, size, counts) for child in children]
    return [build([column[index] for column in columns]) for index in range(len(counts))]


def _rows_of(value: Any, size: int) -> Any:
    """The object to slice by samples, where a value that is no tensor has one row per sample; else None."""
    if type(value) in (list, tuple):  # file names, captions, labels
        return value if len(value) == size and all(_is_single_sample(item) for item in value) else None
    if isinstance(value, numpy.ndarray):
        return value if value.shape[:1] == (size,) else None
    is_table = hasattr(type(value), "iloc") and hasattr(value, "__len__")  # such as a DataFrame
    return value.iloc if is_table and len(value) == size else None
