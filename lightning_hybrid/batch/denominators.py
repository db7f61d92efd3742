"""The denominator (count) of a mean loss, found in the batch and verified by the value of the loss.

A masked language model takes the mean over the tokens whose labels are not ``-100``. Its loss on a batch is then not a
mean over samples of its losses on microbatches, but over these tokens: microbatches are weighted by their *count*. A
step that runs as plain Python has no recorded graph of its loss, so each count that the tensors of a batch offer is
tried: the one with which the mean over microbatches equals the loss of the full batch is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_hybrid.host_copies import read_numbers
from lightning_hybrid.step.objects.pytree import flatten

_IGNORED = -100  # torch's default ``ignore_index``
# Relative differences of losses that may be rounding errors.
_ROUNDING = {torch.float64: 1e-12}
_ROUNDING_OF_SINGLE = 1e-6
_ROUNDING_OF_HALF = 1e-2
# The mean by a count must be closer to the loss of the batch than the mean over samples by its square root.


class Count(NamedTuple):
    """The number of entries of a tensor that are not ignored, or the sum of its entries."""

    position: int  # position of the tensor among those of its batch that have a dimension
    ignored: float | None  # the value of ignored entries; None where the entries are weights
    begin: int = 0  # first entry along the last dimension; 1 where labels are shifted by one
    end: int | None = None  # end along the last dimension; None for all

    def describe(self, batch: Any) -> str:
        """Describe the count in messages, with the place of its tensor in a batch."""
        quantity = "sum" if self.ignored is None else f"number of entries other than {self.ignored:g}"
        where = ", without the first column" if self.begin else ", without the last column" if self.end else ""
        return f"{quantity} of {self._place(batch)}{where}"

    def _place(self, batch: Any) -> str:
        """Where the tensor is in a batch of dicts, lists and tuples, such as ``batch['labels']``."""
        leaves, tensors = tree_flatten_with_path(batch)[0], _tensors(batch)
        found = [path for path, leaf in leaves if self.position < len(tensors) and leaf is tensors[self.position]]
        return f"batch{keystr(found[0])}" if found else f"tensor {self.position} of the batch"

    def of(self, batch: Any) -> float:
        """The count of a batch or microbatch; 0 for a batch with fewer tensors."""
        return float(self.total(batch))

    def total(self, batch: Any) -> Tensor | float:
        """The count, of shape (), which the host has not read yet."""
        tensors = _tensors(batch)
        if self.position >= len(tensors):
            return 0.0
        if self == SAMPLES:
            return float(len(tensors[0]))
        tensor = tensors[self.position].detach()
        if self.begin or self.end is not None:
            tensor = tensor[..., self.begin : self.end]
        return tensor.double().sum() if self.ignored is None else (tensor != self.ignored).sum()

    def weights(self, microbatches: Sequence[Any]) -> list[float] | None:
        """The weights of the microbatches of one batch, which sum to 1; None if all counts are 0."""
        return weights_by([self], microbatches)[0]


SAMPLES = Count(-1, None)  # the number of samples


class Mean(NamedTuple):
    """A scalar of a step for a batch, and for its microbatches."""

    full: float  # the scalar of the full batch
    parts: Sequence[Sequence[float]]  # the scalars of the microbatches, by partition of the batch

    def errors(self, weights: Sequence[Sequence[float]]) -> list[float]:
        """By partition, the absolute error of the weighted mean over microbatches."""
        pairs = zip(self.parts, weights, strict=True)
        return [abs(sum(n * w for n, w in zip(*pair, strict=True) if w) - self.full) for pair in pairs]


def find_counts(
    loss: Mean, batch: Any, partitions: Sequence[tuple[Sequence[Any], Sequence[float]]], dtype: torch.dtype
) -> tuple[Count, ...]:
    """The counts by which microbatches are weighted; none if by samples, or if none is found.

    Several are found where masks and labels select the same entries of this batch, and labels with the samples where
    the losses of microbatches are so alike that either may be. ``partitions`` has the microbatches of each partition,
    and their shares of the samples; the scalar loss has ``dtype``.
    """
    bound = error_bound(loss, [weights for _, weights in partitions], dtype)
    errors: dict[Count, float] = {}
    for count in counts_in(batch) if bound else ():
        weights = [of for microbatches, _ in partitions if (of := count.weights(microbatches)) is not None]
        of_parts = loss.errors(weights) if len(weights) == len(partitions) else [math.nan]
        if all(map(math.isfinite, of_parts)):
            errors[count] = max(of_parts)
    least = min(errors.values(), default=bound)
    if least >= bound:
        return _likely_labels(loss, batch, partitions, dtype)
    rounding = rounding_of(loss.full, dtype)
    near = [count for count, error in errors.items() if error <= max(least + rounding, min(bound, 10 * rounding))]
    # The most common of the nearest; others may prove nearer on a batch where they differ.
    return tuple(sorted(near, key=lambda count: errors[count] > least + rounding))


def _likely_labels(
    loss: Mean, batch: Any, partitions: Sequence[tuple[Sequence[Any], Sequence[float]]], dtype: torch.dtype
) -> tuple[Count, ...]:
    """A count of labels that is as right as the samples, and these: -100 among integers is seldom another thing."""
    near = 10 * rounding_of(loss.full, dtype)
    if dtype not in (torch.float64, torch.float32):  # losses of 16 bits tell less
        of_samples = max(loss.errors([weights for _, weights in partitions]))
        near = max(near, min(of_samples, _ROUNDING_OF_HALF * abs(loss.full)))
    for count in (each for each in counts_in(batch) if each.ignored == _IGNORED):
        weights = [of for microbatches, _ in partitions if (of := count.weights(microbatches)) is not None]
        if len(weights) < len(partitions):
            continue
        is_other = any(not _is_close(each, of) for each, (_, of) in zip(weights, partitions, strict=True))
        if is_other and max(loss.errors(weights)) <= near:
            return count, SAMPLES
    return ()


def weights_by(counts: Sequence[Count], microbatches: Sequence[Any]) -> list[list[float] | None]:
    """The weights of the microbatches by each count; the host reads all counts at once."""
    totals = [count.total(microbatch) for count in counts for microbatch in microbatches]
    numbers, found = iter(read_numbers(totals)), list[list[float] | None]()
    for _ in counts:
        row = [next(numbers) for _ in microbatches]
        total = sum(row)
        found.append([number / total for number in row] if total > 0 else None)
    return found


def weights_differ(counts: Sequence[Count], microbatches: Sequence[Any]) -> bool:
    """Whether several counts give different weights to the microbatches of a batch."""
    weights = weights_by(counts, microbatches)
    return any(not _is_close(other, weights[0]) for other in weights[1:])


def error_bound(number: Mean, weights: Sequence[Sequence[float]], dtype: torch.dtype) -> float:
    """The error below which other weights are accepted; 0 where these weights are right."""
    errors, rounding = number.errors(weights), rounding_of(number.full, dtype)
    error = max(errors)
    if not all(map(math.isfinite, errors)):  # a microbatch without counted entries
        return 10 * rounding
    nearer = math.sqrt(_ROUNDING.get(dtype, _ROUNDING_OF_SINGLE))
    # A term that mixes samples, such as a small loss of a router, hides no count.
    return max(error * nearer, min(10 * rounding, error / 10)) if error > 10 * rounding else 0.0


def rounding_of(number: float, dtype: torch.dtype) -> float:
    """The largest rounding error of a loss."""
    return _ROUNDING.get(dtype, _ROUNDING_OF_SINGLE) * abs(number)


def counts_in(batch: Any) -> list[Count]:
    """The candidate counts of a batch: labels that are not ignored, masks, weights; the most common first.

    Labels that a cross entropy ignores by default are the first: no padding is as likely to be counted.
    """
    found = list(enumerate(_tensors(batch)))
    counts = [
        Count(position, ignored, begin, end)
        for begin, end in ((0, None), (1, None), (0, -1))
        for position, leaf in found
        if not (begin or end) or (leaf.dim() > 1 and leaf.shape[-1] > 1)
        for ignored in _ignored_in(leaf)
    ]
    return sorted(counts, key=lambda count: count.ignored != _IGNORED)


def uneven_masks(batch: Any, microbatches: Sequence[Any], weights: Sequence[float]) -> set[Count]:
    """Counts of labels and masks whose shares per microbatch differ from ``weights``, the shares of samples."""
    counts = [
        Count(position, 0 if leaf.dtype is torch.bool else _IGNORED)
        for position, leaf in enumerate(_tensors(batch))
        if not (leaf.is_floating_point() or leaf.is_complex())
    ]
    pairs = zip(counts, weights_by(counts, microbatches), strict=True)
    return {count for count, by_count in pairs if by_count is not None and not _is_close(by_count, weights)}


def _is_close(some: Sequence[float] | None, others: Sequence[float] | None) -> bool:
    if some is None or others is None:
        return some is others
    return all(abs(one - other) < 1e-9 for one, other in zip(some, others, strict=True))


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()]


def _ignored_in(leaf: Tensor) -> list[float | None]:
    if leaf.is_complex():
        return []
    if leaf.dtype is torch.bool:
        return [0, 1]
    if leaf.is_floating_point():
        return [None, 0] if bool((leaf >= 0).all()) else []
    most_common = int(leaf.flatten().mode().values) if leaf.numel() else 0  # padding, of any index
    return list(dict.fromkeys([_IGNORED, 0, -1, most_common]))
