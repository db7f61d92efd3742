"""Which of a test's layouts run by default: those that no other one covers. The slow tests run them all.

Two replicas of two stages have stages and replicas, so what breaks with either breaks there. Several stages per rank
and tensor ranks are covered by nothing that has none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from lightning_hybrid.verify import Layout


def under(
    layouts: Iterable[Layout], *, also: Iterable[Layout] = (), slow: Iterable[Layout] = ()
) -> pytest.MarkDecorator:
    """Run a test once per `layout`, the covered ones as slow tests.

    Args:
        layouts: Of the test.
        also: Covered ones that run by default all the same: with this test they come to something else.
        slow: Further ones that only the slow tests run.
    """
    named = {layout.name: layout for layout in layouts}
    kept = {layout.name for layout in also}
    assert kept <= named.keys()
    later = {layout.name: layout for layout in slow}
    sizes = {name: sizes_of(layout) for name, layout in named.items()}
    return _parametrize("layout", {**named, **later}, sizes, kept, set(later))


def under_sizes(layouts: Mapping[str, tuple[int, ...]], *, also: Iterable[str] = ()) -> pytest.MarkDecorator:
    """The same for tests that take `size` (of the world), `pp` and, if the tuples have a third number, `tp`.

    Args:
        layouts: The numbers by name.
        also: Names of covered ones that run by default all the same.
    """
    names = ("size", "pp", "tp")[: len(next(iter(layouts.values())))]
    return _parametrize(names, layouts, {name: _split(*numbers) for name, numbers in layouts.items()}, set(also))


def under_names(layouts: Mapping[str, tuple[int, ...]], *, also: Iterable[str] = ()) -> pytest.MarkDecorator:
    """The same for tests that take the name, as `layout`."""
    sizes = {name: _split(*numbers) for name, numbers in layouts.items()}
    return _parametrize("layout", {name: name for name in layouts}, sizes, set(also))


def _split(size: int, pp: int, tp: int = 1) -> tuple[int, ...]:
    """Replicas, ranks of a pipeline, tensor ranks."""
    return size // (pp * tp), pp, tp


def sizes_of(layout: Layout) -> tuple[int, ...]:
    """Replicas, ranks of a pipeline, tensor ranks, stages of a rank."""
    names = ("pipeline_parallel_size", "tensor_parallel_size", "stages_per_rank")
    return (layout.replicas, *(int(layout.strategy.get(name, 1)) for name in names))


def covered(sizes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Names of those which another one equals or exceeds in every size."""
    return {
        name
        for name, mine in sizes.items()
        if any(mine != other and all(m <= o for m, o in zip(mine, other, strict=True)) for other in sizes.values())
    }


def _parametrize(
    names: str | tuple[str, ...],
    values: Mapping[str, Any],
    sizes: Mapping[str, tuple[int, ...]],
    kept: set[str],
    later: Collection[str] = (),
) -> pytest.MarkDecorator:
    slow = covered(sizes) - kept | set(later)
    each = []
    for name, value in values.items():
        value = value if isinstance(value, tuple) else (value,)
        each.append(pytest.param(*value, id=name, marks=[pytest.mark.slow] if name in slow else []))
    return pytest.mark.parametrize(names, each)
