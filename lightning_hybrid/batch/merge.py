"""Merges outputs of microbatches into the output of the full batch.

The number of samples of each microbatch determines which entries are one per sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from lightning_hybrid.errors import StepError
from lightning_hybrid.step.objects.pytree import children_of, flatten, mapping_like
from lightning_hybrid.step.standins.numbers import source_values
from lightning_hybrid.step.standins.tensors import is_absent


class Argument(NamedTuple):
    """A number that a step gives to a metric."""

    metric: str  # its FQN
    call: int  # number of the metric's call in the step
    name: str  # name of the argument, or its position in digits


class Leaf(NamedTuple):
    """A number that a step returns, or appends to a list."""

    place: str  # ``RETURNED``, or "appends to" and the list
    entry: int  # number of the entry among those that the step appends; 0 for what it returns
    path: str  # its place in the containers of the entry


RETURNED = "returns a value"  # the place of what a step returns

# How numbers of parts make that of the whole, where it is no mean.
REDUCTIONS: Mapping[str, Callable[[Sequence[Any]], Any]] = {"sum": sum, "max": max, "min": min}


def join(outputs: Sequence[Any], weights: Sequence[float], counts: Sequence[int | None], *, step: str = "") -> Any:
    """Merge the outputs of the microbatches to one result.

    Tensors are concatenated along the dimension of the samples, floats averaged by the share of samples. Lists with
    one entry per sample are concatenated, other lists merged entry by entry; dicts key by key, from the microbatches
    that have the key. For anything else the output of the last microbatch is returned.
    """
    if len(outputs) == 1:
        return outputs[0]
    return _Merger(tuple(weights), tuple(counts), step).of(list(outputs))


def numbers_in(value: Any) -> dict[str, Any]:
    """The numbers in the containers of a value, by their path."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(value)[0] if is_number(leaf)}


def with_numbers(joined: Any, outputs: Sequence[Any], batch: Microbatches, place: str, entry: int = 0) -> Any:
    """The joined outputs of microbatches, with the numbers whose reduction was measured; see ``Leaf``."""
    columns = [numbers_in(output) for output in outputs]
    found = {}
    for path in columns[0] if all(column.keys() == columns[0].keys() for column in columns) else ():
        column = dict(enumerate(each[path] for each in columns))
        if (number := batch.number_of(Leaf(place, entry, path), column)) is not None:
            found[path] = number
    return tree_map_with_path(lambda path, leaf: found.get(keystr(path), leaf), joined) if found else joined


@dataclass
class Microbatches:
    """How the microbatches of one batch join to it.

    Attributes:
        weights: Of the microbatches in means.
        sizes: Number of samples of each microbatch, if known.
        reductions: By ``Argument``, how microbatches make its number: "mean", "sum", "max" or "min"; where measured.
        by_samples: Arguments whose mean weighs by samples in any case.
        guessed: Numbers among the arguments so far without a measured reduction.
    """

    weights: Sequence[float]
    sizes: Sequence[int | None]
    reductions: Mapping[Any, str] = field(default_factory=dict)
    by_samples: frozenset[Any] = frozenset()
    guessed: set[Argument] = field(default_factory=set, init=False)

    def number_of(self, argument: Argument | Leaf, column: Mapping[int, Any]) -> Any:
        """A number of the full batch from its microbatches', as measured; None for other arguments and other kinds."""
        numbers = list(column.values())
        if not all(map(is_number, numbers)):
            return None
        if arrays := [one for one in numbers if isinstance(one, numpy.ndarray)]:
            number = self.number_of(argument, {i: one[()] for i, one in column.items()})
            return None if number is None else numpy.asarray(number, arrays[0].dtype)
        how = self.reductions.get(argument)
        if how is None:
            if isinstance(argument, Argument):
                self.guessed.add(argument)
            return None
        if (diverged := next((number for number in numbers if number != number), None)) is not None and how != "mean":
            return diverged
        if how == "mean" and all(
            _has_mean(one) if isinstance(one, Tensor) else not isinstance(one, Integral) for one in numbers
        ):
            weights = [(self.sizes[i] or 0) if argument in self.by_samples else self.weights[i] for i in column]
            total = sum(weights) or 1.0
            return weighted_mean(numbers, [weight / total for weight in weights])
        # An integer is a mean only where it was equal in all parts, as an extreme may be.
        return REDUCTIONS.get(how, max)(numbers)

    def scalar_of(self, column: list[Any]) -> Tensor | None:
        """The scalar of the full batch from its microbatches' scalars, where it is known to be no mean of these."""
        return None

    def is_selected(self, microbatch: int, leaf: Any) -> bool:
        """Whether the content of the batch decides how many rows a value of a microbatch, of any shape, has."""
        return False


def join_arguments(
    calls: Mapping[int, tuple[tuple[Any, ...], dict[str, Any]]],
    microbatches: Microbatches,
    *,
    call: tuple[str, int] = ("", 0),
    selects: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Join the arguments of a metric's calls on microbatches into the arguments of one call on the full batch.

    Rows are joined also where there are several per sample (tokens), and where a mask selects them: labels have no
    mean, and predictions and targets have as many rows as each other. Integers, and floats without a fraction, that
    are multiples of the number of samples are sums over samples, and so are other integers that differ, unless the
    reduction of an argument of this ``call`` (FQN, number) was measured. ``selects`` tells that the content of the
    batch is known to decide how many rows there are.
    """
    arguments = list(calls.values())
    if len(arguments) == 1:
        return arguments[0]
    counts, weights = [microbatches.sizes[i] for i in calls], [microbatches.weights[i] for i in calls]
    total = sum(weights) or 1.0
    columns = _made_columns(arguments)
    counted = Counter(_rows(column) for column in columns if not _is_along_another_dim(column, counts))
    rows = frozenset(
        _rows(column) for column in columns if selects or counted[_rows(column)] > 1 or not any(map(_has_mean, column))
    )
    shares = tuple(weight / total for weight in weights)
    merger = _ArgumentMerger(shares, tuple(counts), "", microbatches=microbatches, rows=rows)
    # Each by itself: as many arguments as there are samples in a microbatch are no entries of samples.
    args = [merger.of(list(column)) for column in zip(*(args for args, _ in arguments), strict=False)]
    kwargs = merger.of([kwargs for _, kwargs in arguments])
    named = {i: named_arguments(*each) for i, each in calls.items()}
    for name in named_arguments(tuple(args), kwargs):
        column = {i: each[name] for i, each in named.items() if name in each}
        if len(column) > 1 and (number := microbatches.number_of(Argument(*call, name), column)) is not None:
            if name in kwargs:
                kwargs[name] = number
            else:
                args[int(name)] = number
    return tuple(args), kwargs


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call by name, or by position in digits."""
    return {**{str(position): each for position, each in enumerate(args)}, **kwargs}


def is_number(value: Any) -> bool:
    """Whether a value is a real number, or a tensor or array without dimensions of one, that is known on this rank."""
    if isinstance(value, Tensor):
        return not value.dim() and not value.is_complex() and not is_absent(value)
    if isinstance(value, numpy.ndarray):
        return not value.ndim and is_number(value[()])
    return not isinstance(value, bool) and isinstance(value, Real) and source_values(value) is None


def weighted_mean(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Sum of ``weight * output``, numbers or tensors of one shape; the mean over samples if weights are their shares.

    A mean over no element (0 / 0) weighs nothing.
    """
    pairs = [pair for pair in zip(outputs, weights, strict=True) if pair[1]] or [(outputs[0], weights[0])]
    total = pairs[0][0] * pairs[0][1]
    for output, weight in pairs[1:]:
        total = total + output * weight
    return total


@dataclass(frozen=True)
class _Merger:
    """Merges the outputs at one path of the returned containers."""

    weights: tuple[float, ...]
    counts: tuple[int | None, ...]
    step: str
    path: str = ""

    def of(self, outputs: list[Any]) -> Any:
        if len(outputs) == 1:
            return outputs[0]
        first = outputs[0]
        if all(isinstance(output, Tensor) for output in outputs):
            return self._tensors(outputs)
        if any(type(output) is not type(first) for output in outputs):
            return outputs[-1]
        if isinstance(first, list) or type(first) is tuple:
            return self._lists(outputs)
        if isinstance(first, Mapping):
            return self._mappings(outputs)
        if isinstance(first, numpy.ndarray):
            return self._arrays(outputs)
        if isinstance(first, set | frozenset):
            return type(first)().union(*outputs)
        if children_of(first) is not None:
            return self._entries(outputs)
        return self._plain(outputs)

    def _at(self, key: Any) -> _Merger:
        return replace(self, path=f"{self.path}[{key!r}]")

    def _plain(self, outputs: list[Any]) -> Any:
        last = outputs[-1]
        is_float = isinstance(last, Real) and not isinstance(last, Integral)
        if not is_float or any(source_values(output) is not None for output in outputs):
            return last
        if all(output == last for output in outputs):
            return last
        return sum(output * weight for output, weight in zip(outputs, self.weights, strict=True) if weight)

    # --- containers --------------------------------------------------------------------------------------------------

    def _lists(self, outputs: list[Any]) -> Any:
        lengths = [len(output) for output in outputs]
        if self._is_per_sample(outputs, lengths):
            containers = children_of(outputs[-1])
            assert containers is not None
            return containers[1]([entry for output in outputs for entry in output])
        return self._entries(outputs)

    def _is_per_sample(self, outputs: list[Any], lengths: list[int]) -> bool:
        if len(set(lengths)) > 1:
            return True  # also where the number of entries depends on the content of the samples
        if lengths != list(self.counts):
            return False
        return isinstance(outputs[0], list) or not any(has_rows(entry, lengths[0]) for entry in outputs[0])

    def _entries(self, outputs: list[Any]) -> Any:
        """Merge containers of one structure entry by entry."""
        containers = [children_of(output) for output in outputs]
        columns = [each[0] for each in containers if each is not None]
        if len({len(column) for column in columns}) != 1:
            return outputs[-1]
        entries = [self._at(index).of(list(column)) for index, column in enumerate(zip(*columns, strict=True))]
        assert containers[-1] is not None
        return containers[-1][1](entries)

    def _mappings(self, outputs: list[Any]) -> Any:
        entries: dict[Any, Any] = {}
        for key in dict.fromkeys(key for output in outputs for key in output):
            present = [index for index, output in enumerate(outputs) if key in output]
            share = sum(self.weights[index] for index in present) or 1.0
            within = replace(
                self._at(key),
                weights=tuple(self.weights[index] / share for index in present)
                if len(present) < len(outputs)
                else self.weights,
                counts=tuple(self.counts[index] for index in present),
            )
            entries[key] = within.of([outputs[index][key] for index in present])
        return entries if type(outputs[-1]) is dict else mapping_like(outputs[0], entries)

    # --- tensors and arrays ------------------------------------------------------------------------------------------

    def _arrays(self, outputs: list[Any]) -> Any:
        if any(output.dtype.kind not in "biufc" for output in outputs):
            return numpy.concatenate(outputs) if all(output.ndim for output in outputs) else outputs[-1]
        return self._tensors([torch.as_tensor(output) for output in outputs]).numpy()

    def _tensors(self, outputs: list[Tensor]) -> Tensor:
        if any(is_absent(output) for output in outputs):
            return outputs[-1]
        first = outputs[0]
        if all(output.dim() == 0 for output in outputs):
            if first.is_floating_point() or first.is_complex():
                return weighted_mean(outputs, self.weights)
            return torch.stack(outputs).sum() if first.dtype != torch.bool else outputs[-1]
        dim = self._dim_of_samples(outputs)
        if dim is not None:
            return torch.cat(outputs, dim)
        same_shape = all(output.shape == first.shape for output in outputs)
        if same_shape and (first.is_floating_point() or first.is_complex()):
            return weighted_mean(outputs, self.weights)
        if all(output.shape[1:] == first.shape[1:] and output.dim() for output in outputs):
            return torch.cat(outputs)
        if self.step:
            shapes = ", ".join(str(list(output.shape)) for output in outputs)
            raise StepError(
                f"{self.step} returns {self.path or 'a tensor'} with shapes {shapes} for microbatches of"
                f" {', '.join(map(str, self.counts))} samples, which cannot be merged to a tensor of the full batch:"
                " return a list with one entry per sample (list(output)), or tensors of one shape per sample, or set"
                " num_microbatches=1",
                entry="outputs-shapes",
            )
        return outputs[-1]

    def _dim_of_samples(self, outputs: list[Tensor]) -> int | None:
        shapes = [tuple(output.shape) for output in outputs]
        dims = [dim for dim in range(len(shapes[0])) if _agree_except(shapes, dim)]
        fitting = [dim for dim in dims if all(c in (None, s[dim]) for s, c in zip(shapes, self.counts, strict=True))]
        if 0 in fitting:
            return 0
        if not (fitting and None not in self.counts):
            differing = [dim for dim in dims if len({shape[dim] for shape in shapes}) > 1]
            return differing[0] if len(differing) == 1 else None
        # A tensor that is equal in all microbatches, such as a weight, has no dimension of samples.
        is_unique = len(fitting) == 1 and any(not torch.equal(output, outputs[0]) for output in outputs[1:])
        return fitting[0] if is_unique else None


@dataclass(frozen=True)
class _ArgumentMerger(_Merger):
    """Merges the arguments of a metric."""

    microbatches: Microbatches = field(default_factory=lambda: Microbatches((), ()))  # all of them
    # numbers of rows, in each microbatch, of arguments that can only be rows: labels have no mean
    rows: frozenset[tuple[int, ...]] = frozenset()

    def _plain(self, outputs: list[Any]) -> Any:
        last = outputs[-1]
        if isinstance(last, bool) or not isinstance(last, Real) or None in self.counts:
            return super()._plain(outputs)
        is_count = last and all(output % (count or 1) == 0 for output, count in zip(outputs, self.counts, strict=True))
        if is_count or (isinstance(last, Integral) and any(output != last for output in outputs)):
            return sum(outputs)
        return super()._plain(outputs)

    def _tensors(self, outputs: list[Tensor]) -> Tensor:
        first = outputs[0]
        if all(output.dim() == 0 for output in outputs):
            found = self.microbatches.scalar_of(outputs)
            return super()._tensors(outputs) if found is None else found
        if all(output.data_ptr() == first.data_ptr() and output.shape == first.shape for output in outputs):
            return first  # a tensor of the module
        sizes = _rows(outputs)
        per_sample = {size / count if count else 1 for size, count in zip(sizes, self.counts, strict=True)}
        is_whole = len(per_sample) == 1 and next(iter(per_sample)) in range(1, max(sizes) + 1)
        if (is_whole or sizes in self.rows) and len({output.shape[1:] for output in outputs}) == 1:
            return torch.cat(outputs)
        return super()._tensors(outputs)


def _rows(outputs: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(output.shape[0] if output.dim() else 0 for output in outputs)


def _made_columns(arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The arguments, each of all microbatches, that these have made."""
    leaves = [[_as_tensor(leaf) for leaf in flatten(each)[0]] for each in arguments]
    return [column for column in zip(*leaves, strict=False) if _is_made(column)]


def _as_tensor(leaf: Any) -> Any:
    """A tensor of the memory of an array of numbers; other leaves as they are."""
    is_array = isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc"
    return torch.as_tensor(leaf) if is_array else leaf


def _is_made(column: Sequence[Any]) -> bool:
    """Whether the microbatches have made tensors of rows, and no tensor of the module is among them."""
    if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in column):
        return False
    first = column[0]
    return any(is_absent(leaf) or leaf.data_ptr() != first.data_ptr() or leaf.shape != first.shape for leaf in column)


def _has_mean(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _is_along_another_dim(column: Sequence[Tensor], counts: Sequence[int | None]) -> bool:
    """Whether samples may be along another dim than the first one."""
    pairs = [(tuple(leaf.shape), count) for leaf, count in zip(column, counts, strict=True)]
    return any(all(dim < len(s) and s[dim] == c for s, c in pairs) for dim in range(1, len(pairs[0][0])))


def differ_in_rows(arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], counts: Sequence[int | None]) -> bool:
    """Whether microbatches of as many samples have tensors of different numbers of rows: a mask selects these."""
    pairs = [set(zip(counts, _rows(column), strict=True)) for column in _made_columns(arguments)]
    return None not in counts and any(len(each) > len({count for count, _ in each}) for each in pairs)


def has_rows(entry: Any, count: int) -> bool:
    """Whether an entry of a tuple has rows of all samples; then the tuple is no list of samples."""
    if isinstance(entry, Tensor | numpy.ndarray):
        return count in entry.shape
    return isinstance(entry, list | tuple | Mapping)


def _agree_except(shapes: list[tuple[int, ...]], dim: int) -> bool:
    return len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1 and all(len(s) > dim for s in shapes)
