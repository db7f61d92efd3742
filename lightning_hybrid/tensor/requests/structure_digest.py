"""A digest of the structure of a unit: the key of its plan in the cache.

Units with one digest have classes with the same code, the same attributes, shapes and arguments, and the same requests.
Weights and functions of other modules are not part of it: a plan that is read under a key is proved again.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.step.objects.source_folders import TENSOR
from lightning_hybrid.tensor.plan.unit_plan import SequenceParallel
from lightning_hybrid.tensor.requests.plan_requests_by_unit import UnitRequests

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_LIBRARIES = ("builtins", "torch.", "lightning.")
_MAX_DEPTH, _MAX_LENGTH = 6, 1000


def digest_of(
    unit: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sizes: tuple[int, int],
    keep_replicated: Mapping[str, str],
    requested: UnitRequests,
    sequence_parallel: SequenceParallel = None,
) -> str:
    """Computes the key of a unit's plan.

    Args:
        unit: The unit.
        args: Positional arguments of one call.
        kwargs: Keyword arguments.
        sizes: Numbers of tensor ranks and of context ranks.
        keep_replicated: Parameters that stay replicated, each with the reason.
        requested: Requests of plans for its modules.
        sequence_parallel: Whether the sequence is sharded over tensor ranks.
    """
    classes = {base for module in unit.modules() for base in type(module).__mro__}
    described = (
        [(name, _module(module)) for name, module in unit.named_modules()],
        sorted(_class(base) for base in classes if not f"{base.__module__}.".startswith(_LIBRARIES)),
        _value((args, dict(kwargs))),
        (sizes, sequence_parallel, sorted(keep_replicated.items()), requested.key),
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
    if isinstance(value, _PLAIN):
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
