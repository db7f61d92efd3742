"""The user's classes on the command line: ``path.to:Name`` or ``FILE.py:Name``, and ``--module.NAME VALUE``."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.exit_status_and_json_output import UsageError

# Flags of the user's classes have a dot, as in LightningCLI; two of its own that name a class have none.
_CLASS_FLAG = re.compile(r"--(\w+\.[\w.]+\+?|optimizer|lr_scheduler)(=.*)?", re.DOTALL)


def load_target(path: str) -> Any:
    """Import a class or function; an error that the imported code raises is raised as it is.

    Args:
        path: ``path.to:Name``, ``path.to.Name``, or ``path/to/file.py:Name``.

    Raises:
        UsageError: The path names no module and a name in it, or there is none.
    """
    module, separator, name = path.rpartition(":" if ":" in path else ".")
    if not separator or not module or not name:
        raise UsageError(f"{path!r} names no class; write path.to:Name or path/to/file.py:Name")
    folder = os.getcwd()
    if module.endswith(".py"):
        file = existing_file(module)
        folder, module = str(file.parent), file.stem
    add_import_folder(folder)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another that is not
        raise UsageError(f"{path!r}: {error}") from error
    return functools.reduce(functools.partial(_member, path), name.split("."), found)


def _member(path: str, owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        near = difflib.get_close_matches(name, dir(owner))
        advice = f"; nearest: {', '.join(near)}" if near else ""
        raise UsageError(f"{path!r}: {getattr(owner, '__name__', owner)} has no {name}{advice}")
    return getattr(owner, name)


def existing_file(path: str) -> Path:
    """Return the absolute path of a file.

    Raises:
        UsageError: There is none.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"{path!r}: there is no file {file}")
    return file


def add_import_folder(folder: str) -> None:
    """Let this process import modules from a folder."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def split_class_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into what the command parses, and the flags of the user's classes.

    Returns:
        The command's arguments; and flags such as ``--model.width=8``, as LightningCLI spells them, where
        ``--module.`` is ``--model.``.
    """
    others, flags = list[str](), list[str]()
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not _CLASS_FLAG.fullmatch(argument):
            others.append(argument)
            continue
        if "=" not in argument and remaining and not remaining[0].startswith("--"):
            argument = f"{argument}={remaining.pop(0)}"
        flags.append(re.sub(r"^--module\.", "--model.", argument))
    return others, flags
