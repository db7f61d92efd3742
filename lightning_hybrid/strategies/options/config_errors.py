"""Errors of config files and command lines of LightningCLI: which option or class of this package was meant.

jsonargparse checks a config by the signatures of classes, before one is made, and names no other options or classes.
Where the error is about this package, the run ends with one line, in place of all options of the Trainer.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

from lightning_hybrid.namespace import extend
from lightning_hybrid.strategies.options.foreign import refuse_foreign
from lightning_hybrid.text import meant, meant_of, wrapped

_PROBLEM = re.compile(r"^( *)(?:- )?Problem with given class_path '([\w.]+)':\n((?:\1 {3,}.*\n?|\n)+)", re.MULTILINE)
_UNKNOWN = re.compile(r"Option '(\w+)' is not accepted")
_NO_CLASS = re.compile(r"module '(lightning_hybrid[\w.]*)' has no attribute '(\w+)'")
_WRONG_VALUE = re.compile(r'Parser key "([\w.]+)":')
_EXPECTED = re.compile(
    r"Expected an? (?!path but)(?:<class ')?(?:typing\.)?(.+?)(?:'>)?(?:\. Got value.*)?$", re.MULTILINE
)
_VALUE = re.compile(r"(?:Got|Given) value: (.*)$", re.MULTILINE)
_NAME_ALONE = re.compile(r"dot import path string: (\w+)")
_OPTION = re.compile(r"NestedArg\(key='(\w+)', val='?([^')]*)'?\)")
_OF_TRAINER = re.compile(r"(?:Group 'trainer' does not accept option '|does not accept option 'trainer\.)(\w+)'")
_RAISED = re.compile(r"^ *- (?!Expected a |Import path )(.+)$", re.MULTILINE)
_MISPLACED = re.compile(r'Parser key "trainer.strategy":.*Strategy is abstract.*Given value: (\{.*)', re.DOTALL)
_PRECISION = re.compile(r'^Parser key "trainer.precision":.*Given value: (.*)', re.DOTALL)
_PRECISIONS = "lightning_hybrid.precision.hybrid"
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "NoneType": "null", "str": "text"}
_PACKAGES = "", ".callbacks", ".optim"  # with the public classes that a config may name
_STRATEGY = "lightning_hybrid.Hybrid3DStrategy"


def hint_at_options(library: Any) -> None:
    """Let errors of jsonargparse on this package be one line, with the nearest names."""
    extend(library.ArgumentParser, "error", _with_hint)
    extend(library.ArgumentParser, "instantiate_classes", _with_own_errors)


def _with_hint(error: Callable[..., Any], parser: Any, message: str, *further: Any, **options: Any) -> Any:
    if not (found := hint(message)):
        return error(parser, message, *further, **options)
    word, text = found
    text = _place(word, getattr(parser, "args", ())) + text
    if not parser.exit_on_error or "JSONARGPARSE_DEBUG" in os.environ:
        return error(parser, text, *further, **options)
    return parser.exit(2, wrapped(f"error: {text}") + "\n")


def _with_own_errors(instantiate: Callable[..., Any], parser: Any, *arguments: Any, **options: Any) -> Any:
    """Report what the strategy refuses in the same way: jsonargparse adds all of its options."""
    try:
        return instantiate(parser, *arguments, **options)
    except ValueError as error:
        if hint(str(error)):
            parser.error(str(error), error)
        raise


def hint(message: str) -> tuple[str, str] | tuple[()]:
    """Return a word of the config that is wrong and what to do, if an error is about this package; else nothing."""
    if (raised := _RAISED.search(message)) and f"Namespace(class_path='{_STRATEGY}'" in message:
        return raised[1].partition("=")[0], raised[1]
    if wrong := [match for match in _PROBLEM.finditer(message) if match[2].startswith("lightning_hybrid.")]:
        _, path, reason = wrong[-1].groups()
        if inner := _PROBLEM.search(reason):
            _, path, reason = inner.groups()
        return _of_class(path, reason.strip())
    if (name := _NAME_ALONE.search(message)) and (found := _of_name(name[1], _OPTION.search(message))):
        return found
    if wrong_precision := _PRECISION.search(message):
        value, names = wrong_precision[1], get_args(importlib.import_module(_PRECISIONS).PrecisionName)
        return value, f"trainer.precision={value}: use one of {', '.join(names)}{meant(value, names)}"
    if misplaced := _MISPLACED.search(message):
        for key in re.findall(r"'(\w+)':", misplaced[1]):
            if key in _options():
                return key, f"put {key} under init_args of the strategy, beside class_path: {_STRATEGY}"
    if (option := _OF_TRAINER.search(message)) and option[1] in _options():
        text = (
            f"{option[1]} is an option of the strategy, not of the Trainer: set trainer.strategy.class_path:"
            f" {_STRATEGY} and trainer.strategy.init_args.{option[1]}"
        )
        return option[1], text
    return ()


def _of_class(path: str, reason: str) -> tuple[str, str]:
    name = path.rpartition(".")[2]
    if no_class := _NO_CLASS.match(reason):
        return no_class[2], f"there is no class {path}{_class_meant(no_class[2])}"
    if unknown := _UNKNOWN.match(reason):
        if path == _STRATEGY:
            try:
                refuse_foreign({unknown[1]: "..."}, _options())
            except (TypeError, ValueError) as error:
                return unknown[1], str(error)
        return unknown[1], f"{name} has no argument {unknown[1]!r}{meant_of(unknown[1], _arguments(path))}"
    if key := _WRONG_VALUE.match(reason):
        kinds = (re.sub(r"^Literal\[(.*)\]$", r"\1", each) for each in _EXPECTED.findall(reason))
        kinds = (re.sub(r"^dot import path string.*", "a class_path with init_args", each) for each in kinds)
        expected = dict.fromkeys(_TYPES.get(kind, kind) for kind in kinds)
        value = _VALUE.findall(reason)[-1:]
        return key[1], f"{name}({key[1]}={', '.join(value)}): use {' or '.join(expected)}"
    return name, f"{path}: {reason.splitlines()[0]}"


def _of_name(name: str, option: re.Match[str] | None) -> tuple[str, str] | tuple[()]:
    """Return the same of a name, such as "hybrid3d", where a class is due."""
    key, value = option.groups() if option else ("", "")
    options = difflib.get_close_matches(key, _options(), n=1)
    if name.startswith("hybrid3d") or (name == "auto" and options):
        flags = f"--trainer.strategy {_STRATEGY} --trainer.strategy.{options[0] if options else key} {value}"
        return name, f"{name!r} is a name without options; use {flags if option else f'class_path: {_STRATEGY}'}"
    return (name, f"there is no class {name}{near}") if (near := _class_meant(name)) else ()


def _class_meant(name: str) -> str:
    """The end of an error about an unknown class: the path of the nearest; "" if none is near."""
    known = {public: f"lightning_hybrid{each}.{public}" for each in _PACKAGES for public in _public(each)}
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {known[near[0]]!r}?" if near else ""


def _place(word: str, arguments: Iterable[str]) -> str:
    """Return the config file that has a word, of those on a command line, and its line."""
    for argument in arguments:
        path = argument.rpartition("=")[2]
        if os.path.isfile(path):
            lines = Path(path).read_text(errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                if re.search(rf"\b{re.escape(word)}\b", line):
                    return f"{path}, line {number}: "
    return ""


def _arguments(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    return [*inspect.signature(getattr(importlib.import_module(module), name)).parameters]


def _options() -> list[str]:
    from lightning_hybrid.strategies.options.options import Options  # late: it imports torch

    return Options.names()


@functools.cache
def _public(package: str) -> tuple[str, ...]:
    names = importlib.import_module(f"lightning_hybrid{package}").__all__
    return tuple(name for name in names if not name.startswith("_"))
