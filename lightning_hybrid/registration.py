"""Registration of the strategies with Lightning by name, without importing Lightning.

Lightning has no entry point for strategies, so importing this package registers them, now or right after the import of
Lightning. Uses without Lightning (planning a layout, drawing a schedule) do not import it.
"""

from __future__ import annotations

import importlib
import os
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, get_args

from lightning_hybrid.checkpoint.loading import accept_folders
from lightning_hybrid.namespace import PACKAGES, extend
from lightning_hybrid.text import meant, wrapped

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_NAMES: dict[str, dict[str, Any]] = {
    "hybrid3d": {},
    "hybrid3d_fork": {"start_method": "fork"},
    "hybrid3d_notebook": {"start_method": "fork"},
    "hybrid3d_zero1": {"zero_stage": 1},
    "hybrid3d_zero2": {"zero_stage": 2},
    "hybrid3d_zero3": {"zero_stage": 3},
    "hybrid3d_zero3_offload": {"zero_stage": 3, "offload": "cpu"},
}


def register(package: ModuleType) -> None:
    """Register the strategies with one of Lightning's packages, or refuse them where the other one is in use."""
    accept_folders(importlib.import_module(f"{package.__name__}.core.saving"))
    extend(warnings, "formatwarning", _wrapped_warning)
    if sys.modules.get(PACKAGES[0], package) is not package:
        extend(package.Trainer, "__init__", _without_ours)
        return
    registry = importlib.import_module(f"{package.__name__}.strategies").StrategyRegistry
    for name, options in _NAMES.items():
        if name not in registry:
            description = "data, tensor and pipeline parallelism for unmodified LightningModules"
            registry.register(name, _build, description=description, **options)
    extend(package.Trainer, "__init__", _with_names)
    if not sys.flags.dev_mode:
        extend(sys, "excepthook", _shortened)


def _wrapped_warning(format_: Callable[..., str], message: Any, category: Any, filename: str, *rest: Any) -> str:
    """Return a warning of this package in lines of 100 characters, without the line of this package that gives it."""
    if filename.startswith(f"{_FOLDER}{os.sep}"):
        return wrapped(f"hybrid3d warning: {message}") + "\n"
    return format_(message, category, filename, *rest)


def name_options(library: ModuleType) -> None:
    """Let errors of jsonargparse, which LightningCLI parses with, end with the nearest options of the strategy."""
    _own("strategies.options.config_errors").hint_at_options(library)


# What is called after the import of a package, in whatever order a script imports it and this one.
PREPARE: dict[str, Callable[[ModuleType], None]] = {**dict.fromkeys(PACKAGES, register), "jsonargparse": name_options}


def _build(**options: Any) -> Any:
    return _own("strategies.hybrid3d").Hybrid3DStrategy(**options)


def _shortened(print_: Callable[..., None], *error: Any) -> None:
    """Print an error that nothing has caught; what this package refuses, by frames of the user's code."""
    _own("strategies.world.traces").Shortening(print_)(*error)


def _with_names(init: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Let the Trainer's errors of an unknown option, strategy, plugin or precision say what was meant of this one."""
    try:
        init(*arguments, **options)
    except Exception as error:
        if text := _meant(str(error), options):
            error.args = (f"{str(error).partition('. ')[0]}; {text}",)
            raise error.with_traceback(None) from None
        if _is_ours(options.get("strategy")):
            _own("strategies.world.traces").shorten(error)
        raise


def _meant(message: str, options: Mapping[str, Any]) -> str:
    """What to write instead of the arguments of a Trainer that fail with a message; "" if they are not about us."""
    strategy, precision = options.get("strategy"), options.get("precision")
    if (unknown := re.search(r"unexpected keyword argument '(\w+)'", message)) and (not strategy or _is_ours(strategy)):
        name, own = unknown[1], _own("strategies.options.options").Options.names()
        near = meant(name, own)
        given = f"{name}={reprlib.repr(options[name])}"
        return f"set it in the strategy: strategy=Hybrid3DStrategy({given})" if name in own else near[2:]
    is_class = isinstance(strategy, type) and issubclass(strategy, _own("strategies.hybrid3d").Hybrid3DStrategy)
    if is_class and "invalid strategy name" in message:
        return "give the strategy an object, not its class: strategy=Hybrid3DStrategy()"
    name = strategy if isinstance(strategy, str) and f"strategy={strategy!r}" in message else ""
    if name.startswith("hybrid") or meant(name, _NAMES):
        return (
            f"set strategy to one of {', '.join(_NAMES)}, or for other options to an object:"
            f" strategy=Hybrid3DStrategy(pipeline_parallel_size=2){meant(name, _NAMES)}"
        )
    if f"Precision {precision!r} is invalid" in message and _is_ours(strategy):
        names = get_args(_own("precision.hybrid").PrecisionName)
        return f"set precision to one of {', '.join(names)}{meant(str(precision), names)}"
    if "Received both `precision=" in message and _is_ours(strategy):
        return f"delete precision={precision!r} to train as the plugin says, or the plugin to train in {precision}"
    if "more than one stateful callback" in message and _is_ours(strategy):
        return "leave one of them out, or give each a state_key of its own"
    if "invalid type for plugin" in message and "Hybrid3DStrategy" in message:
        return "a strategy is no plugin: pass it as strategy=Hybrid3DStrategy(...)"
    return ""


def _own(module: str) -> Any:
    return importlib.import_module(f"lightning_hybrid.{module}")


def _without_ours(init: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Make the Trainer of the package that is not in use refuse objects of this package."""
    for argument in ("strategy", "plugins", "callbacks"):
        value = options.get(argument)
        for each in value if isinstance(value, Collection) and not isinstance(value, str) else (value,):
            if _is_ours(each):
                name = repr(each) if isinstance(each, str) else type(each).__name__
                raise TypeError(
                    f"Trainer({argument}={name}): the Trainer is of pytorch_lightning, but lightning.pytorch was"
                    " imported before it, and lightning_hybrid works with one of them in a process; take the"
                    " Trainer and the module from lightning.pytorch, or import pytorch_lightning first and"
                    " lightning.pytorch nowhere"
                )
    init(*arguments, **options)


def _is_ours(value: object) -> bool:
    if isinstance(value, str):
        return value.startswith("hybrid3d")
    return any(base.__module__.startswith("lightning_hybrid.") for base in type(value).__mro__)
