"""The Lightning of this process: `lightning.pytorch`, or `pytorch_lightning` under that name.

They are separate packages with the same classes, and each refuses subclasses of the other's. This package is written
for `lightning.pytorch`. In a process that uses `pytorch_lightning`, an import of `lightning.pytorch` gives that, here
and elsewhere. The choice is made when `lightning.pytorch` is first imported, and `sys.modules` is where it is written.
Nothing here imports either before.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, ModuleType
from typing import Any

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_EXTENDED = "_hybrid3d_extended"  # marks functions of other packages that this one has extended
_COUNTERPARTS = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package whose public classes import torch and Lightning: on first access.

    Args:
        package: Its `__name__`.
        modules: The module of each name, below `lightning_hybrid`.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"lightning_hybrid.{modules[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return __getattr__


def package_in_use() -> str:
    """Return the real name of what `lightning.pytorch` is, or would be, in this process."""
    if (loaded := sys.modules.get(PACKAGES[0])) is not None:
        return loaded.__name__
    if PACKAGES[1] in sys.modules or not _is_installed("lightning"):
        return PACKAGES[1]
    return PACKAGES[0]


def follow(code: CodeType) -> None:
    """Choose the package that a file imports, at any line, unless one is imported already or it imports both."""
    if PACKAGES[0] in sys.modules or not _is_installed(PACKAGES[1]):
        return
    names = (str(each.argval) for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
    tops = {name.partition(".")[0] for name in names}
    if PACKAGES[1] in tops and "lightning" not in tops:
        importlib.import_module(PACKAGES[1])


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that gives `pytorch_lightning` its second name, and calls functions after imports of some packages."""

    def __init__(self, prepare: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._prepare = prepare

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname == "lightning":
            _follow_importer()
        counterpart = _counterpart_of(fullname)
        if (counterpart or fullname == "lightning") and package_in_use() == PACKAGES[1]:
            if counterpart is None and _is_installed("lightning"):
                return None
            is_there = importlib.util.find_spec(counterpart or PACKAGES[1]) is not None
            return ModuleSpec(fullname, self, is_package=True) if is_there else None
        if fullname not in self._prepare:
            return None
        spec = _others_find(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_prepare(module: ModuleType) -> None:
                execute(module)
                self._prepare[fullname](module)

            spec.loader.exec_module = execute_and_prepare  # type: ignore[method-assign]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the counterpart in the place of this one, which stays where `lightning` is missing."""
        counterpart = _counterpart_of(module.__name__)
        found = importlib.import_module(counterpart or PACKAGES[1])
        if counterpart is not None:
            sys.modules[module.__name__] = found


def install(prepare: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Install the finder, once, and prepare the packages that are imported already.

    Args:
        prepare: By the name of a package, what is called with it after its import.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(prepare))
    for name, function in prepare.items():
        if name in sys.modules:
            function(sys.modules[name])


def extend(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let ``function(original, ...)`` take the place of a function of another package, for good, once."""
    original = getattr(owner, name)
    if hasattr(original, _EXTENDED):
        return

    @functools.wraps(original)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(extended, _EXTENDED, True)
    setattr(owner, name, extended)


def _counterpart_of(name: str) -> str | None:
    top = ".".join(name.split(".")[:2])
    return _COUNTERPARTS[top] + name[len(top) :] if top in _COUNTERPARTS else None


def _is_installed(top: str) -> bool:
    try:
        return top in sys.modules or _others_find(top, None) is not None
    except ImportError:
        return False


def _others_find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return what the other finders of the process find."""
    finders = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
    return next((spec for finder in finders if (spec := finder.find_spec(name, path)) is not None), None)


def _follow_importer() -> None:
    """Choose by the file that imports this package, where formatters put the imports of `pytorch_lightning` below."""
    frame: FrameType | None = sys._getframe()
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in ("importlib", "lightning_hybrid"):
        frame = frame.f_back
    if frame is not None:
        follow(frame.f_code)
