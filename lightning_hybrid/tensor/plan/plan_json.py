"""Tensor plans as readable JSON, and back, checked against the types of the dataclass fields.

A dataclass is an object that names its class, and its keys are the names of the fields or their metadata ``"key"``. A
mapping with keys other than str is a list of pairs; a value typed as `object` consists of tuples, str and numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_hybrid.tensor.plan.unit_plan import UnitPlan

_PLAIN = (bool, int, float, str, type(None))
_CLASS = "is"


def to_json(plan: UnitPlan) -> dict[str, Any]:
    """Converts a plan to objects that the json module writes.

    Raises:
        TypeError: A value has no JSON form.
    """
    return _written(plan)


def from_json(value: Any) -> UnitPlan:
    """Rebuilds the plan that `to_json` wrote.

    Raises:
        ValueError: This is no plan, or one with other fields.
    """
    plan: UnitPlan = _read(UnitPlan, value)
    return plan


def _written(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value):
        fields = {key: _written(getattr(value, name)) for key, name in _names_by_key(type(value)).items()}
        return {_CLASS: type(value).__name__, **fields}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _written(item) for key, item in value.items()}
        return [[_written(key), _written(item)] for key, item in value.items()]
    if type(value) in (tuple, list):
        return [_written(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [_written(item) for item in sorted(value)]
    raise TypeError(f"a plan with a {type(value).__name__} cannot be written")


def _read(hint: Any, value: Any) -> Any:
    kind, args = get_origin(hint), get_args(hint)
    if hint is object:
        return tuple(_read(object, item) for item in value) if isinstance(value, list) else _plain(value)
    if dataclasses.is_dataclass(hint):
        return _read_class(hint, value)
    if kind in (Union, types.UnionType):
        return _read_one_of(args, value)
    if kind is Literal:
        if value not in args:
            raise ValueError(f"{value!r} is none of {args}")
        return value
    if kind is tuple:
        items = _list(value)
        hints = [args[0]] * len(items) if args[-1] is ... else list(args)
        if len(hints) != len(items):
            raise ValueError(f"{len(items)} values instead of {len(hints)}")
        return tuple(_read(each, item) for each, item in zip(hints, items, strict=True))
    if kind is frozenset:
        return frozenset(_read(args[0], item) for item in _list(value))
    if kind is not None and issubclass(kind, Mapping):
        pairs = value.items() if isinstance(value, dict) else [tuple(_list(pair)) for pair in _list(value)]
        return {_read(args[0], key): _read(args[1], item) for key, item in pairs}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{value!r} instead of a {hint}")
    return value


def _read_class(hint: Any, value: Any) -> Any:
    names, hints = _names_by_key(hint), _hints(hint)
    if not isinstance(value, dict) or value.get(_CLASS) != hint.__name__ or value.keys() - {_CLASS} != names.keys():
        raise ValueError(f"no {hint.__name__} with the fields {sorted(names)}")
    return hint(**{name: _read(hints[name], value[key]) for key, name in names.items()})


def _read_one_of(hints: tuple[Any, ...], value: Any) -> Any:
    for hint in hints:
        try:
            return _read(hint, value)
        except ValueError:
            continue
    raise ValueError(f"{value!r} is none of {hints}")


@functools.cache
def _hints(hint: Any) -> dict[str, Any]:
    return get_type_hints(hint)


def _names_by_key(cls: Any) -> dict[str, str]:
    return {field.metadata.get("key", field.name): field.name for field in dataclasses.fields(cls)}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} instead of a list")
    return value


def _plain(value: Any) -> Any:
    if type(value) not in _PLAIN:
        raise ValueError(f"{value!r} instead of text or a number")
    return value
