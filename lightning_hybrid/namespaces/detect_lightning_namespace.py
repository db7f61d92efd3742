"""Lightning's two namespaces, `lightning.pytorch` and `pytorch_lightning`: detection of the one that a file uses.

They are separate packages with separate classes, and each refuses subclasses of the other's. The strategies, precision
plugins and callbacks are written once, against `lightning.pytorch`; `load_twins_for_pytorch_lightning.py` loads them
again, for `pytorch_lightning`. So each public class exists twice, and `lightning_hybrid.Hybrid3DStrategy` is the one
for the importing file. Nothing here imports either namespace.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from lightning_hybrid.namespaces.lightning_namespaces import NAMESPACES, Namespace


def public_names(package: str, *names: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package that exports public classes and imports them on first access.

    Args:
        package: Its `__name__`. A home of one namespace exports its classes, others those for the importing file.
        names: The names in `PUBLIC` that it exports.
    """
    fixed = next((n for n in NAMESPACES if f"{package}.".startswith(f"{n.explicit_home}.")), None)

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return (fixed or namespace_for(_importing_frame(sys._getframe(1)))).load(name)

    return __getattr__


def namespace_for(frame: FrameType | None) -> Namespace:
    """The namespace that the code of a frame uses.

    The first of these rules that selects one of the two: the one that is installed; that the importing file imports, at
    any line; that is running (its command line reads a class path); that is imported. Otherwise `lightning.pytorch`.

    Raises:
        ModuleNotFoundError: Neither is installed.
    """
    candidates = [namespace for namespace in NAMESPACES if _is_installed(namespace)]
    if not candidates:
        raise ModuleNotFoundError(
            "lightning_hybrid needs lightning or pytorch-lightning, but neither is installed; pip install lightning"
        )
    for narrowed in (_named_in, _running_below, lambda _: [n for n in NAMESPACES if n.package in sys.modules]):
        if len(candidates) == 1:
            break
        names = narrowed(frame)
        candidates = names if len(names) == 1 else candidates
    return candidates[0]


def _is_installed(namespace: Namespace) -> bool:
    if namespace.package in sys.modules:
        return True
    try:
        return importlib.util.find_spec(namespace.top) is not None
    except (ImportError, ValueError):
        return False


def _importing_frame(frame: FrameType | None) -> FrameType | None:
    """The frame that accesses a name, without those of the import system, which `from package import name` adds."""
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "importlib":
        frame = frame.f_back
    return frame


def _named_in(frame: FrameType | None) -> list[Namespace]:
    tops = _tops_named_in(_Names(frame.f_code, frame.f_globals)) if frame is not None else ()
    return [namespace for namespace in NAMESPACES if namespace.top in tops]


class _Names:
    """A function's code and the globals of its file: equal to another one while no global has been added."""

    def __init__(self, code: CodeType, names: dict[str, Any]) -> None:
        self.code, self.names = code, names
        self._key = id(code), len(names)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Names) and other._key == self._key


@functools.lru_cache(maxsize=64)  # holds the code, so that its id stays its own
def _tops_named_in(read: _Names) -> set[str]:
    return {module.split(".")[0] for module in _modules_named_in(read.code, read.names)}


def _running_below(frame: FrameType | None) -> list[Namespace]:
    while frame is not None:
        top = str(frame.f_globals.get("__name__")).split(".")[0]
        if running := [namespace for namespace in NAMESPACES if namespace.top == top]:
            return running
        frame = frame.f_back
    return []


def _modules_named_in(code: CodeType, names: dict[str, Any]) -> Iterator[str]:
    """Modules that code imports at any line, and those from which its file has names or base classes."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield str(instruction.argval)
    for value in list(names.values()):
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, FunctionType):
            yield str(value.__module__)
        elif isinstance(value, type):
            yield from (str(base.__module__) for base in type.mro(value) if base is not object)
