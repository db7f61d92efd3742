"""Registration of the strategies with Lightning by name, without importing Lightning.

Lightning has no entry point for strategies, so importing this package registers them, now or right after the import of
Lightning. Uses without Lightning (planning a layout, drawing a schedule) do not import it.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, get_args

from lightning_hybrid.checkpoint.loading import accept_folders
from lightning_hybrid.errors import add_error_note
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
    connectors = importlib.import_module(f"{package.__name__}.trainer.connectors.accelerator_connector")
    extend(connectors._AcceleratorConnector, "__init__", _with_names)


def _wrapped_warning(format_: Callable[..., str], message: Any, category: Any, filename: str, *rest: Any) -> str:
    """Return a warning of this package in lines of 100 characters, without the line of this package that gives it."""
    if filename.startswith(f"{_FOLDER}{os.sep}"):
        return wrapped(f"hybrid3d warning: {message}") + "\n"
    return format_(message, category, filename, *rest)


def name_options(library: ModuleType) -> None:
    """Let errors of jsonargparse, which LightningCLI parses with, end with the nearest options of the strategy."""
    importlib.import_module("lightning_hybrid.strategies.options.config_errors").hint_at_options(library)


# What is called after the import of a package, in whatever order a script imports it and this one.
PREPARE: dict[str, Callable[[ModuleType], None]] = {**dict.fromkeys(PACKAGES, register), "jsonargparse": name_options}


def _build(**options: Any) -> Any:
    return importlib.import_module("lightning_hybrid.strategies.hybrid3d").Hybrid3DStrategy(**options)


def _with_names(init: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Let Lightning's errors of an unknown strategy, plugin or precision end with what was meant of this package."""
    try:
        init(*arguments, **options)
    except Exception as error:
        if text := _meant(str(error), options):
            add_error_note(error, wrapped(text))
        raise


def _meant(message: str, options: Mapping[str, Any]) -> str:
    """What to write instead of the arguments of a Trainer that fail with a message; "" if they are not about us."""
    strategy, precision = options.get("strategy"), options.get("precision")
    if "invalid strategy name" in message and isinstance(strategy, type) and issubclass(strategy, _own_strategy()):
        return f"give the strategy an object, not its class: strategy={strategy.__name__}()"
    name = strategy if isinstance(strategy, str) and f"strategy={strategy!r}" in message else ""
    if name.startswith("hybrid") or meant(name, _NAMES):
        return (
            f"names of lightning_hybrid are {', '.join(_NAMES)}; other options are arguments:"
            f" strategy=Hybrid3DStrategy(pipeline_parallel_size=2){meant(name, _NAMES)}"
        )
    if f"Precision {precision!r} is invalid" in message and _is_ours(strategy):
        names = get_args(importlib.import_module("lightning_hybrid.precision.hybrid").PrecisionName)
        return f"set precision to one of {', '.join(names)}{meant(str(precision), names)}"
    if "invalid type for plugin" in message and "Hybrid3DStrategy" in message:
        return "a strategy is no plugin: pass it as strategy=Hybrid3DStrategy(...)"
    return ""


def _own_strategy() -> type:
    found: type = importlib.import_module("lightning_hybrid.strategies.hybrid3d").Hybrid3DStrategy
    return found


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
