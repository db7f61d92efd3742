"""A cache of tensor plans in a file, so that a second run only proves the plans that the first one found.

A plan that was read is proved like a new one, in all settings, before it is used. A file that is torn, stale or of
another program counts as empty, and neither that nor a folder that cannot be written is an error.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import os
import sys
import threading
import types
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.step.objects.names import TENSOR
from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.tensors import ShardedTensorBase, full_shape
from lightning_hybrid.tensor.plan import UnitPlan
from lightning_hybrid.tensor.proof.narrow import narrow_layer
from lightning_hybrid.tensor.proof.proof import prove_cached
from lightning_hybrid.tensor.search.requests import UnitRequests
from lightning_hybrid.tensor.search.unit import plan_unit
from lightning_hybrid.text import counted

FILE_NAME = "tensor_plans.json"
_MAX_PLANS = 500
_ABOUT = "how layers are sharded over tensor ranks; found by a search, which starts anew if this file is deleted"
_PLAIN = (bool, int, float, str, type(None))
_CLASS = "is"
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_LIBRARIES = ("builtins", "torch.", "lightning.")
_MAX_DEPTH, _MAX_LENGTH = 6, 1000


class PlanCache:
    """Plans units, and reads and writes their plans in a file.

    Attributes:
        path: The file.
        num_read: Number of plans that were read and proved again.
        num_searched: Number of plans that were searched.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Takes ``folder`` (of the file, made where it is missing)."""
        self.path = Path(folder) / FILE_NAME
        self.num_read = self.num_searched = 0
        self._plans = self._read()
        self._searched: dict[str, Any] = {}

    def find(
        self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, **options: Any
    ) -> UnitPlan:
        """A unit's plan, from the file if its proof passes and else from `plan_unit`; arguments as there."""
        key = digest_of(unit, args, kwargs, size, options)
        with contextlib.suppress(Exception):
            read = from_json(self._plans[key]["plan"])
            if not _fits_unit(read, unit, size, options):
                raise ValueError("a plan for another unit")
            # A plan that shards nothing is right, and may be for a unit that cannot be tried.
            plan = prove_again(unit, args, kwargs, read) if read.is_sharded else read
            if plan is not None:
                self.num_read += 1
                return plan
        plan = plan_unit(unit, args, kwargs, size, **options)
        self.num_searched += 1
        with contextlib.suppress(TypeError):
            written = to_json(replace(plan, calls=frozenset(), num_trials=0, seconds=0.0))
            self._searched[key] = {"unit": type(unit).__qualname__, "plan": written}
        return plan

    def save(self) -> str | None:
        """Adds the searched plans to the file; returns why it could not be written, or None."""
        if not self._searched:
            return None
        others = {key: value for key, value in self._read().items() if key not in self._searched}
        entries = dict([*others.items(), *self._searched.items()][-_MAX_PLANS:])
        # Renamed when complete: another run may be reading.
        partial = self.path.with_name(f".{FILE_NAME}.{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"about": _ABOUT, "plans": entries}, indent=1))
            os.replace(partial, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            return f"{type(error).__name__}: {error}"
        return None

    def summary(self, unwritten: str | None) -> str:
        """Describes where plans came from; `unwritten` is the reason why the file could not be written, if any."""
        text = f"found for {counted(self.num_searched, 'layer')}, and read for {self.num_read} from {self.path}"
        return text if unwritten is None else f"{text}, which is not written for the next run: {unwritten}"

    def _read(self) -> dict[str, Any]:
        try:
            plans = json.loads(self.path.read_text())["plans"]
        except Exception:
            return {}
        return plans if isinstance(plans, dict) else {}


def prove_again(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: UnitPlan) -> UnitPlan | None:
    """Proves a plan on a narrow copy of the unit if there is one, else on the unit, as `prove_cached`."""
    kept = {unit.get_parameter(name).shape[dim] for name, dim in plan.vocabulary.items()}
    narrow = narrow_layer(unit, args, kwargs, plan.size * plan.context, kept)
    return prove_cached(unit, args, kwargs, plan) if isinstance(narrow, str) else narrow.prove_cached(plan)


def _fits_unit(plan: UnitPlan, unit: nn.Module, size: int, options: Mapping[str, Any]) -> bool:
    """Whether a plan fits a unit; one that shards parameters which others read does not, although it is proved."""
    names = {name for name, _ in (*unit.named_parameters(), *unit.named_buffers())}
    sharded = {name for name, placement in plan.placements.items() if isinstance(placement, Shard)}
    if plan.size != size or plan.placements.keys() != names or sharded & set(options.get("keep_replicated") or ()):
        return False
    if plan.by in ("", "tensor"):
        return plan.full_sequence_plan is None
    full_sequence_plan = plan.full_sequence_plan
    same_storage = full_sequence_plan.placements == plan.placements if full_sequence_plan is not None else size == 1
    return plan.context == options.get("context", 1) and same_storage


# Tensor plans as readable JSON, and back, checked against the types of the dataclass fields.
# A dataclass is an object that names its class. A mapping with keys other than str is a list of pairs; a value typed as
# `object` consists of tuples, str and numbers.


def to_json(value: Any) -> Any:
    """Converts a plan, or a value in one, to objects that the json module writes.

    Raises:
        TypeError: A value has no JSON form.
    """
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_CLASS: type(value).__name__, **fields}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return [[to_json(key), to_json(item)] for key, item in value.items()]
    if type(value) in (tuple, list):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [to_json(item) for item in sorted(value)]
    raise TypeError(f"a plan with a {type(value).__name__} cannot be written")


def from_json(value: Any, hint: Any = UnitPlan) -> Any:
    """Rebuilds the plan, or the value of another type, that `to_json` wrote.

    Raises:
        ValueError: This is no plan, or one with other fields.
    """
    kind, args = get_origin(hint), get_args(hint)
    if hint is object and isinstance(value, list):
        return tuple(from_json(item, object) for item in value)
    if hint is object and type(value) in _PLAIN:
        return value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = _hints(hint)
        if not isinstance(value, dict) or value.get(_CLASS) != hint.__name__ or value.keys() - {_CLASS} != hints.keys():
            raise ValueError(f"no {hint.__name__} with the fields {sorted(hints)}")
        return hint(**{name: from_json(value[name], each) for name, each in hints.items()})
    if kind in (Union, types.UnionType):
        for each in args:
            with contextlib.suppress(ValueError):
                return from_json(value, each)
        raise ValueError(f"{value!r} is none of {args}")
    if kind is Literal:
        if value not in args:
            raise ValueError(f"{value!r} is none of {args}")
        return value
    if kind is tuple:
        items = from_json(value, list)
        hints_of_items = [args[0]] * len(items) if args[-1] is ... else list(args)
        if len(hints_of_items) != len(items):
            raise ValueError(f"{len(items)} values instead of {len(hints_of_items)}")
        return tuple(map(from_json, items, hints_of_items))
    if kind is frozenset:
        return frozenset(from_json(item, args[0]) for item in from_json(value, list))
    if kind is not None and issubclass(kind, Mapping):
        pairs = value.items() if isinstance(value, dict) else [from_json(pair, list) for pair in from_json(value, list)]
        return {from_json(key, args[0]): from_json(item, args[1]) for key, item in pairs}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{value!r} instead of a {hint}")
    return value


@functools.cache
def _hints(hint: Any) -> dict[str, Any]:
    return get_type_hints(hint)


# A digest of the structure of a unit: the key of its plan in the cache.
# Units with one digest have classes with the same code, the same attributes, shapes and arguments, and the same
# requests. Weights and functions of other modules are not part of it: a plan that is read under a key is proved again.


def digest_of(
    unit: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int, options: Mapping[str, Any]
) -> str:
    """Computes the key of a unit's plan for a call, with the size and options of `plan_unit`."""
    asked = {name: value.key if isinstance(value, UnitRequests) else value for name, value in options.items() if value}
    classes = {base for module in unit.modules() for base in type(module).__mro__}
    described = (
        [(name, _module(module)) for name, module in unit.named_modules()],
        sorted(_class(base) for base in classes if not f"{base.__module__}.".startswith(_LIBRARIES)),
        _value((args, dict(kwargs))),
        (size, sorted(asked.items())),
        (torch.__version__, sys.version_info[:3], _search_source()),
    )
    return hashlib.sha256(repr(described).encode()).hexdigest()


@functools.cache
def _search_source() -> str:
    """A digest of the search's source: a plan of another version is searched again."""
    files = sorted(Path(TENSOR).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _module(module: nn.Module) -> Any:
    tensors = [(name, tensor is None or _value(tensor)) for name, tensor in module._parameters.items()]
    tensors += [(name, tensor is None or _value(tensor)) for name, tensor in module._buffers.items()]
    attributes = [(name, _value(value)) for name, value in vars(module).items() if name not in _SKIPPED]
    return _name(type(module)), tensors, attributes


def _value(value: Any, depth: int = 0, within: bool = False) -> Any:
    """Describes a value; an object (a configuration) by its attributes, objects in it by their class."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), value.requires_grad
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if isinstance(value, (tuple, list, set, frozenset, Mapping)):
        if depth == _MAX_DEPTH or len(value) > _MAX_LENGTH:
            return _name(type(value)), len(value)
        if isinstance(value, Mapping):
            # Keys that are no text are ids of hooks, which are counted over the process.
            pairs = [(name if isinstance(name, str) else "", item) for name, item in value.items()]
            return [(name, _value(item, depth + 1, within)) for name, item in pairs]
        items = [_value(item, depth + 1, within) for item in value]
        return items if isinstance(value, (tuple, list)) else sorted(map(repr, items))
    if isinstance(value, FunctionType):
        return _name(value), _code(value.__code__)
    if isinstance(value, type):
        return _name(value)
    if within or isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        return _name(type(value))
    return _name(type(value)), [(name, _value(item, depth + 1, True)) for name, item in vars(value).items()]


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _class(base: type) -> Any:
    members = [(name, member) for name, member in vars(base).items() if isinstance(member, FunctionType)]
    return _name(base), [(name, _code(member.__code__)) for name, member in members]


def _code(code: CodeType) -> Any:
    """Describes instructions and their lines: the rules of a plan name calls by line."""
    constants = [_code(item) if isinstance(item, CodeType) else _value(item) for item in code.co_consts]
    return code.co_filename, code.co_firstlineno, code.co_code, code.co_names, constants


def lines_of_branch(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: UnitPlan) -> frozenset[int]:
    """The lines that called torch in a proof of a plan with these arguments; none if it is not proved by them."""
    leaves, spec = flatten((args, kwargs))
    args, kwargs = unflatten([_without_shards(leaf) for leaf in leaves], spec)
    proved: list[UnitPlan | None] = []

    def prove() -> None:
        with contextlib.suppress(Exception):
            proved.append(prove_again(_of_full_shapes(unit), args, kwargs, plan))

    # A thread has none of the run's modes: autocast, inference, the hooks of saved tensors, function modes.
    thread = threading.Thread(target=prove, name="proof of a tensor plan", daemon=True)
    thread.start()
    thread.join()
    return frozenset() if not proved or proved[0] is None else proved[0].calls


def _without_shards(leaf: Any) -> Any:
    """A tensor of the shape of a sharded one, without values: to read these is collective."""
    if not isinstance(leaf, ShardedTensorBase):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def _of_full_shapes(unit: nn.Module) -> nn.Module:
    """A copy of a unit whose parameters have their full shapes and no values; it has the unit's other tensors."""
    memo: dict[int, Any] = {}
    for parameter in unit.parameters():
        empty = torch.empty(full_shape(parameter), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for tensor in (value for module in unit.modules() for value in vars(module).values() if isinstance(value, Tensor)):
        memo.setdefault(id(tensor), tensor)
    memo |= {id(buffer): buffer for buffer in unit.buffers()}
    twin: nn.Module = copy.deepcopy(unit, memo)
    return twin
