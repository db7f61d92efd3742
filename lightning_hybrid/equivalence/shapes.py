"""The torch calls of a run on fake tensors with their shapes, and whether two runs differ by width alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_hybrid.equivalence.division import Division, have_same_shards
from lightning_hybrid.step.tracing.lines import TorchCallSites

# Functions that select a part of a tensor: a dim that is divided must stay one, since the part is then a share of it.
_SELECTIONS = frozenset(
    {"__getitem__", "narrow", "select", "split", "split_with_sizes", "chunk", "tensor_split", "unbind", "index_select"}
)
_MOST_FACTORS = 2  # sizes in one product that are divided


class ShapeTrace(TorchCallSites):
    """Records each call of a torch function, its lines, and the numbers and shapes in its arguments and results.

    Attributes:
        numbers: For each call, the tokens of its arguments and those of its results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[tuple[list[Any], list[Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(_tokens((args, kwargs or {})))
        result = super().__torch_function__(func, types, args, kwargs)
        self.numbers.append((given, list(_tokens(result))))
        return result

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """The shapes of all tensors in the run."""
        tokens = (token for pair in self.numbers for side in pair for token in side)
        return (token for token in tokens if isinstance(token, tuple))


def _tokens(value: Any) -> Iterator[Any]:
    """The shapes, as tuples, integers and names of types and dtypes in a value."""
    if isinstance(value, Tensor):
        yield str(value.dtype)
        yield tuple(value.shape)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} of {len(value)}"
        for item in value:
            yield from _tokens(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _tokens(item)
    elif isinstance(value, slice):
        yield "slice"
        yield from _tokens((value.start, value.stop, value.step))
    else:
        yield value if isinstance(value, (bool, int, str)) else type(value).__name__


def difference_but_width(full: ShapeTrace, narrow: ShapeTrace, factor: int) -> str:
    """What differs between two runs beside sizes that are divided by a factor; "" if nothing does."""
    for index, (wide, small) in enumerate(zip(full.calls, narrow.calls, strict=False)):
        name = getattr(wide[0], "__name__", str(wide[0]))
        if _code_of(wide[0]) != _code_of(small[0]) or wide[1] != small[1]:
            return f"call {index} is {name} in the full unit and {getattr(small[0], '__name__', '')} in the narrow one"
        sides = list(zip(full.numbers[index], narrow.numbers[index], strict=True))
        for found, wanted in sides:
            if len(found) != len(wanted) or not all(_fits(a, b, factor) for a, b in zip(found, wanted, strict=True)):
                return f"{name} has {found} in the full unit and {wanted} in the narrow one"
        if name in _SELECTIONS and not _keeps_divided_dims(*sides):
            return f"{name} selects a fixed number of features"
    if len(full.calls) != len(narrow.calls):
        return f"the full unit makes {len(full.calls)} calls and the narrow one {len(narrow.calls)}"
    return ""


def why_not_same_program(full: ShapeTrace, narrow: ShapeTrace, division: Division, size: int) -> str:
    """Why a narrow copy cannot take the place of a wide module, by an unsharded run of each; "" if it can.

    ``size`` is the number of ranks that widths are sharded over.
    """
    if difference := difference_but_width(full, narrow, division.factor):
        return difference
    equal, pairs = _sizes_that_differ(full, narrow)
    # Rules are found by sizes: one that is divided must not become equal to another.
    if both := {division.of(length) for length in division.sizes} & (equal - {1}):
        return f"of two sizes that differ both would be {min(both)}"
    # A number of heads that follows from a width and the features of a head.
    heads = [a for a, b in pairs if a not in division.sizes and not have_same_shards(a, b, size)]
    return f"{heads[0]} heads would be divided" if heads else ""


def _code_of(function: Any) -> Any:
    """What identifies a function; one that is defined in a call is another object in each."""
    return getattr(function, "__code__", function)


def _sizes_that_differ(full: ShapeTrace, narrow: ShapeTrace) -> tuple[set[int], set[tuple[int, int]]]:
    """The sizes that are equal in two runs, and the pairs that differ in dims before the last."""
    equal: set[int] = set()
    pairs: set[tuple[int, int]] = set()
    for wide, small in zip(full.shapes(), narrow.shapes(), strict=True):
        equal.update(a for a, b in zip(wide, small, strict=True) if a == b)
        pairs.update((a, b) for a, b in zip(wide[:-1], small[:-1], strict=True) if a != b)
    return equal, pairs


def _fits(wide: Any, small: Any, factor: int) -> bool:
    if isinstance(wide, tuple) and isinstance(small, tuple):
        return len(wide) == len(small) and all(_fits(a, b, factor) for a, b in zip(wide, small, strict=True))
    if type(wide) is not int or type(small) is not int:
        return bool(wide == small)
    return any(wide == small * factor**power for power in range(_MOST_FACTORS + 1))


def _keeps_divided_dims(given: tuple[list[Any], list[Any]], results: tuple[list[Any], list[Any]]) -> bool:
    least, most = next(_num_divided(*given), (0, 0))
    return all(low <= most and least <= high for low, high in _num_divided(*results))


def _num_divided(wide: list[Any], small: list[Any]) -> Iterator[tuple[int, int]]:
    """The least and the largest number of dims of each tensor that are divided: an empty dim may be."""
    for a, b in zip(wide, small, strict=True):
        if isinstance(a, tuple):
            least = sum(size != other for size, other in zip(a, b, strict=True))
            yield least, least + a.count(0)
