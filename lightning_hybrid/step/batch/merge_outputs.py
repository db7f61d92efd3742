"""The merge of per-microbatch outputs to those of the whole batch.

The number of samples of each microbatch says what is one entry per sample.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_hybrid.step.objects.pytree import children_of
from lightning_hybrid.step.standins.absent_tensors import is_absent, values_behind
from lightning_hybrid.step.tracing.recording import StepError


def join(
    parts: Sequence[Any],
    weights: Sequence[float],
    counts: Sequence[int | None],
    *,
    step: str = "",
) -> Any:
    """One result out of what the microbatches returned.

    Tensors are concatenated along the dimension of the samples, floats averaged by the share of samples. Lists with
    one entry per sample are concatenated, other lists joined entry by entry; of dicts each key, from those that have
    it. Anything else is that of the last microbatch.

    Args:
        parts: What each microbatch returned.
        weights: Share of the samples of each.
        counts: Number of samples of each, if known.
        step: Its name, if tensors that cannot be put together are an error.

    Raises:
        StepError: There are such.
    """
    if len(parts) == 1:
        return parts[0]
    return _Join(tuple(weights), tuple(counts), step).of(list(parts))


def weighted_mean(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Sum of ``weight * part``; the mean over samples if the weights are shares of the samples."""
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total = total + part * weight
    return total


@dataclass(frozen=True)
class _Join:
    """That of one place in what is returned."""

    weights: tuple[float, ...]
    counts: tuple[int | None, ...]
    step: str
    path: str = ""

    def of(self, parts: list[Any]) -> Any:
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        if all(isinstance(part, Tensor) for part in parts):
            return self._tensors(parts)
        if any(type(part) is not type(first) for part in parts):
            return parts[-1]
        if isinstance(first, list) or type(first) is tuple:
            return self._lists(parts)
        if isinstance(first, Mapping):
            return self._mappings(parts)
        if isinstance(first, numpy.ndarray):
            return self._arrays(parts)
        if isinstance(first, set | frozenset):
            return type(first)().union(*parts)
        if children_of(first) is not None:
            return self._entries(parts)
        return self._plain(parts)

    def _at(self, key: Any) -> _Join:
        return replace(self, path=f"{self.path}[{key!r}]")

    def _plain(self, parts: list[Any]) -> Any:
        last = parts[-1]
        if not isinstance(last, float) or any(values_behind(part) is not None for part in parts):
            return last
        if all(part == last for part in parts):
            return last
        return sum(part * weight for part, weight in zip(parts, self.weights, strict=True))

    # --- containers --------------------------------------------------------------------------------------------------

    def _lists(self, parts: list[Any]) -> Any:
        lengths = [len(part) for part in parts]
        if self._is_per_sample(parts, lengths):
            found = children_of(parts[-1])
            assert found is not None
            return found[1]([entry for part in parts for entry in part])
        return self._entries(parts)

    def _is_per_sample(self, parts: list[Any], lengths: list[int]) -> bool:
        if len(set(lengths)) > 1:
            return True  # also where what is in the samples decides how many there are
        if lengths != list(self.counts):
            return False
        return isinstance(parts[0], list) or not any(has_rows(entry, lengths[0]) for entry in parts[0])

    def _entries(self, parts: list[Any]) -> Any:
        """Containers of one form, entry by entry."""
        found = [children_of(part) for part in parts]
        columns = [each[0] for each in found if each is not None]
        if len({len(column) for column in columns}) != 1:
            return parts[-1]
        entries = [self._at(place).of(list(column)) for place, column in enumerate(zip(*columns, strict=True))]
        assert found[-1] is not None
        return found[-1][1](entries)

    def _mappings(self, parts: list[Any]) -> Any:
        entries: dict[Any, Any] = {}
        for key in dict.fromkeys(key for part in parts for key in part):
            having = [place for place, part in enumerate(parts) if key in part]
            share = sum(self.weights[place] for place in having) or 1.0
            within = replace(
                self._at(key),
                weights=tuple(self.weights[place] / share for place in having)
                if len(having) < len(parts)
                else self.weights,
                counts=tuple(self.counts[place] for place in having),
            )
            entries[key] = within.of([parts[place][key] for place in having])
        last = parts[-1]
        if type(last) is dict or not isinstance(last, MutableMapping):
            return entries
        # A shallow copy keeps what else the object carries (a ModelOutput's class).
        result = copy.copy(parts[0])
        if isinstance(result, UserDict):
            result.data = dict(result.data)  # copies share their dict
        for key, entry in entries.items():
            result[key] = entry
        return result

    # --- tensors and arrays ------------------------------------------------------------------------------------------

    def _arrays(self, parts: list[Any]) -> Any:
        if any(part.dtype.kind not in "biufc" for part in parts):
            return numpy.concatenate(parts) if all(part.ndim for part in parts) else parts[-1]
        return self._tensors([torch.as_tensor(part) for part in parts]).numpy()

    def _tensors(self, parts: list[Tensor]) -> Tensor:
        if any(is_absent(part) for part in parts):
            return parts[-1]
        first = parts[0]
        if all(part.dim() == 0 for part in parts):
            if first.is_floating_point() or first.is_complex():
                return weighted_mean(parts, self.weights)
            return torch.stack(parts).sum() if first.dtype != torch.bool else parts[-1]
        dim = self._dim_of_samples(parts)
        if dim is not None:
            return torch.cat(parts, dim)
        same_shape = all(part.shape == first.shape for part in parts)
        if same_shape and (first.is_floating_point() or first.is_complex()):
            return weighted_mean(parts, self.weights)
        if all(part.shape[1:] == first.shape[1:] and part.dim() for part in parts):
            return torch.cat(parts)
        if self.step:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise StepError(
                f"{self.step} returns {self.path or 'a tensor'} with shapes {shapes} for microbatches of"
                f" {', '.join(map(str, self.counts))} samples, and what it is for the whole batch cannot be told:"
                " return a list with one entry per sample (list(output)), or tensors of one shape per sample, or set"
                " num_microbatches=1"
            )
        return parts[-1]

    def _dim_of_samples(self, parts: list[Tensor]) -> int | None:
        shapes = [tuple(part.shape) for part in parts]
        dims = [dim for dim in range(len(shapes[0])) if _agree_but_for(shapes, dim)]
        fitting = [dim for dim in dims if all(c in (None, s[dim]) for s, c in zip(shapes, self.counts, strict=True))]
        if 0 in fitting:
            return 0
        if not (fitting and None not in self.counts):
            differing = [dim for dim in dims if len({shape[dim] for shape in shapes}) > 1]
            return differing[0] if len(differing) == 1 else None
        # A tensor that is the same everywhere, such as a weight, has no samples.
        alone = len(fitting) == 1 and any(not torch.equal(part, parts[0]) for part in parts[1:])
        return fitting[0] if alone else None


def has_rows(entry: Any, count: int) -> bool:
    """Whether an entry of a tuple has all samples itself; then the tuple is no list of samples."""
    if isinstance(entry, Tensor | numpy.ndarray):
        return count in entry.shape
    return isinstance(entry, list | tuple | Mapping)


def _agree_but_for(shapes: list[tuple[int, ...]], dim: int) -> bool:
    return len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1 and all(len(s) > dim for s in shapes)
