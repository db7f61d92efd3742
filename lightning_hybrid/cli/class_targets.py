"""The user's classes on the command line: ``path.to:Name``, and their arguments ``--module.NAME VALUE``."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.exit_status import UsageError

_OWNERS = ("module", "data")
_WORDS = {"true": True, "false": False, "null": None}

FLAGS = (
    "--module.NAME VALUE and --data.NAME VALUE are arguments of the two classes. A value is read as in Lightning's own"
    " command line: true and false, null, numbers, lists and mappings; other text stays as it is."
)


@dataclass(frozen=True)
class Target:
    """A class or function by its path, with keyword arguments; any process can import and call it.

    Attributes:
        path: ``path.to:Name``, or ``path/to/file.py:Name``.
        arguments: Keyword arguments of the call.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Import it; an error that the imported code raises is raised as it is.

        Raises:
            UsageError: The path names no module and a name in it, or there is none.
        """
        module, colon, name = self.path.rpartition(":")
        if not colon or not module or not name:
            raise UsageError(f"{self.path!r} names no class; write path.to:Name or path/to/file.py:Name")
        folder = os.getcwd()
        if module.endswith(".py"):
            path = Path(module).resolve()
            if not path.exists():
                raise UsageError(f"{self.path!r}: there is no file {path}")
            folder, module = str(path.parent), path.stem
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports another that is not
            raise UsageError(f"{self.path!r}: {error}") from error
        return functools.reduce(self._member, name.split("."), found)

    def _member(self, owner: Any, name: str) -> Any:
        if not hasattr(owner, name):
            near = difflib.get_close_matches(name, dir(owner))
            advice = f"; nearest: {', '.join(near)}" if near else ""
            raise UsageError(f"{self.path!r}: {getattr(owner, '__name__', owner)} has no {name}{advice}")
        return getattr(owner, name)

    def check(self, owner: str) -> None:
        """Import it, and check that it takes the arguments, which the user wrote as ``--owner.NAME``.

        Raises:
            UsageError: It does not.
        """
        loaded = self.load()
        try:
            parameters = inspect.signature(loaded).parameters
        except (TypeError, ValueError):  # it is no function of Python
            return
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for name in self.arguments:
            if name not in parameters:
                near = difflib.get_close_matches(name, parameters) or list(parameters)
                raise UsageError(f"--{owner}.{name}: {self.path} has no argument {name!r}; it has {', '.join(near)}")

    def __call__(self) -> Any:
        """Import it, call it with the arguments, and return the result."""
        return self.load()(**self.arguments)


def targets(module: str, data: str | None, flags: Sequence[str]) -> tuple[Target, Target | None]:
    """Return the module and its data, of which both have been imported: a misspelled path fails once, and here.

    Raises:
        UsageError: A path or an argument is wrong.
    """
    of_module, of_data = arguments_of(flags)
    if of_data and data is None:
        raise UsageError(f"--data.{next(iter(of_data))} is given without --data path.to:DataModule")
    made = Target(module, of_module), None if data is None else Target(data, of_data)
    for owner, target in zip(_OWNERS, made, strict=True):
        if target is not None:
            target.check(owner)
    return made


def split_class_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into what argparse parses, and ``--module.NAME VALUE`` and ``--data.NAME VALUE``."""
    others, flags = list[str](), list[str]()
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith(tuple(f"--{owner}." for owner in _OWNERS)):
            others.append(argument)
            continue
        flags.append(argument)
        if "=" not in argument and remaining and not remaining[0].startswith("--"):
            flags.append(remaining.pop(0))
    return others, flags


def arguments_of(flags: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse ``--module.NAME VALUE`` and ``--data.NAME VALUE`` to two dicts.

    Raises:
        UsageError: Another argument, or one without a value.
    """
    found: dict[str, dict[str, Any]] = {owner: {} for owner in _OWNERS}
    remaining = list(flags)
    while remaining:
        flag, equals, value = remaining.pop(0).partition("=")
        owner, dot, name = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or not dot or owner not in found or not name.isidentifier():
            raise UsageError(f"unknown argument {flag!r}; arguments of the classes are --module.NAME and --data.NAME")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise UsageError(f"{flag} needs a value, such as {flag} true")
            value = remaining.pop(0)
        found[owner][name] = value_of(value)
    return found["module"], found["data"]


def value_of(text: str) -> Any:
    """Parse a value as jsonargparse does without a type: ``false``, ``null``, numbers, lists, mappings, or text."""
    if text in _WORDS:
        return _WORDS[text]
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    if text[:1] in "[{" and text:
        yaml = importlib.import_module("yaml")  # a dependency of Lightning; slow to load, and it has no types
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    return text
