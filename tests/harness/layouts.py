"""Which layouts of a test run by default: those that no other one covers. The slow tests run all.

Two replicas of two stages have stages and replicas, so a failure of either shows there. Several stages per rank
and tensor ranks are covered only by layouts that have them.

In a test with a list of modules, the step of a module does not depend on the number of replicas. So the
first one runs over replicas of stages by default, and the others over stages only, on half as many ranks. Of two
that take the same path through the strategy one is enough: `covered_by` names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

from lightning_hybrid.verify import Layout

NOTHING: Mapping[Any, Any] = {}


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


def each_under(
    names: str,
    modules: Sequence[Any],
    layouts: Iterable[Layout],
    *,
    replicated: Collection[Any] | None = None,
    covered_by: Mapping[Any, Any] = NOTHING,
    slow: Iterable[Layout] = (),
) -> pytest.MarkDecorator:
    """Run a test once per module and `layout`.

    Args:
        names: Of the arguments that one of the modules gives.
        modules: Or tuples of a module and what belongs to it.
        layouts: Of the test.
        replicated: The modules that run over replicas by default; the first one if None.
        covered_by: For modules that only the slow tests run: the one that shows by default what they do.
        slow: Further layouts that only the slow tests run.
    """
    named = {layout.name: layout for layout in (*layouts, *slow)}
    later = {layout.name for layout in slow}
    sizes = {name: sizes_of(layout) for name, layout in named.items()}
    return _each(f"{names},layout", modules, named, sizes, replicated, covered_by, later)


def each(names: str, values: Sequence[Any], *, covered_by: Mapping[Any, Any]) -> pytest.MarkDecorator:
    """Run a test once per value.

    Args:
        names: Of the arguments that one of the values gives.
        values: Or tuples of them.
        covered_by: For values that only the slow tests run: the one that shows by default what they do.
    """
    _check_covered(values, covered_by)
    given = [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id="-".join(_label(part) for part in (value if isinstance(value, tuple) else (value,))),
            marks=[pytest.mark.slow] if value in covered_by else [],
        )
        for value in values
    ]
    return pytest.mark.parametrize(names, given)


def _check_covered(values: Sequence[Any], covered_by: Mapping[Any, Any]) -> None:
    for value, other in covered_by.items():
        assert value in values and other in values and other not in covered_by, f"{value} is not covered by {other}"


def each_under_names(
    names: str,
    modules: Sequence[Any],
    layouts: Mapping[str, tuple[int, ...]],
    *,
    replicated: Collection[Any] | None = None,
    covered_by: Mapping[Any, Any] = NOTHING,
) -> pytest.MarkDecorator:
    """The same for tests that take the name, as `layout`."""
    sizes = {name: _split(*numbers) for name, numbers in layouts.items()}
    return _each(f"{names},layout", modules, {name: name for name in layouts}, sizes, replicated, covered_by, set())


def each_under_sizes(
    names: str,
    modules: Sequence[Any],
    layouts: Mapping[str, tuple[int, ...]],
    *,
    replicated: Collection[Any] | None = None,
) -> pytest.MarkDecorator:
    """The same for tests that take `size`, `pp` and, if the tuples have a third number, `tp`."""
    sizes = {name: _split(*numbers) for name, numbers in layouts.items()}
    arguments = ("size", "pp", "tp")[: len(next(iter(layouts.values())))]
    return _each(",".join((names, *arguments)), modules, layouts, sizes, replicated, NOTHING, set())


def _each(
    names: str,
    modules: Sequence[Any],
    layouts: Mapping[str, Any],
    sizes: Mapping[str, tuple[int, ...]],
    replicated: Collection[Any] | None,
    covered_by: Mapping[Any, Any],
    later: Collection[str],
) -> pytest.MarkDecorator:
    _check_covered(modules, covered_by)
    over_replicas = modules[:1] if replicated is None else replicated
    known = {name: numbers for name, numbers in sizes.items() if name not in later}
    alone = {name: numbers for name, numbers in known.items() if numbers[0] == 1} or known
    each = []
    for module in modules:
        default = known if module in over_replicas else alone
        kept = default.keys() - covered(default)
        values = module if isinstance(module, tuple) else (module,)
        label = "-".join(_label(value) for value in values)
        for name, layout in layouts.items():
            marks = [] if name in kept and module not in covered_by else [pytest.mark.slow]
            given = layout if isinstance(layout, tuple) else (layout,)
            each.append(pytest.param(*values, *given, id=f"{label}-{name}", marks=marks))
    return pytest.mark.parametrize(names, each)


def _label(value: Any) -> str:
    return str(getattr(value, "__name__", value))


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
        for name, own_sizes in sizes.items()
        if any(
            own_sizes != other and all(m <= o for m, o in zip(own_sizes, other, strict=True))
            for other in sizes.values()
        )
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
