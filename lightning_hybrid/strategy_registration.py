"""Make the strategies known to Lightning by name, without importing Lightning.

Lightning has no entry point for strategies, so importing this package registers them, in each of Lightning's two
namespaces. What is not imported yet is attended to right after it is, and what cannot be seen from here (planning a
layout, drawing a schedule) never pays for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_hybrid.namespaces.converted_objects import accept_both
from lightning_hybrid.namespaces.lightning_names import NAMESPACES, Namespace

_NAMES: dict[str, dict[str, Any]] = {
    "hybrid3d": {},
    "hybrid3d_fork": {"start_method": "fork"},
    "hybrid3d_notebook": {"start_method": "fork"},
    "hybrid3d_zero1": {"zero_stage": 1},
    "hybrid3d_zero2": {"zero_stage": 2},
    "hybrid3d_zero3": {"zero_stage": 3},
    "hybrid3d_zero3_offload": {"zero_stage": 3, "offload": "cpu"},
}


def register() -> None:
    """Register the strategies and prepare the Trainers, now or as soon as each namespace is imported."""
    waiting: dict[str, Callable[[ModuleType], None]] = {}
    for namespace in NAMESPACES:
        for name, attribute, prepare in (
            (f"{namespace.package}.strategies", "StrategyRegistry", _register_in),
            (f"{namespace.package}.trainer.trainer", "Trainer", _prepare_trainer),
            (f"{namespace.package}.core.saving", "pl_load", _read_folders),
        ):
            module = sys.modules.get(name)
            if module is not None and hasattr(module, attribute):
                prepare(module, namespace)
            else:
                waiting[name] = partial(prepare, namespace=namespace)
    if waiting and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(waiting))


def _register_in(module: ModuleType, namespace: Namespace) -> None:
    for name, options in _NAMES.items():
        if name not in module.StrategyRegistry:
            description = "data, tensor and pipeline parallelism for unmodified LightningModules"
            module.StrategyRegistry.register(name, partial(_build, namespace), description=description, **options)


def _build(namespace: Namespace, **options: Any) -> Any:
    return namespace.load("Hybrid3DStrategy")(**options)


def _prepare_trainer(module: ModuleType, namespace: Namespace) -> None:
    accept_both(module.Trainer, namespace)


def _read_folders(module: ModuleType, namespace: Namespace) -> None:
    """Let ``load_from_checkpoint`` read distributed checkpoints, wherever the module's class comes from."""
    read = module.pl_load
    if hasattr(read, "reads_folders"):
        return

    @functools.wraps(read)
    def read_both(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        from lightning_hybrid.checkpoint.checkpoint_folder import is_folder

        if not is_folder(path):
            return read(path, map_location=map_location, weights_only=weights_only)
        from lightning_hybrid.checkpoint.reading import SavedFolder

        return SavedFolder(Path(path), weights_only=weights_only).checkpoint(map_location)

    read_both.reads_folders = True  # type: ignore[attr-defined]
    module.pl_load = read_both  # type: ignore[attr-defined]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Watches for modules to be imported and attends to each."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        """Args: waiting: what to call with a module, by its name."""
        self._waiting = waiting
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Wrap the loader of the modules of interest."""
        if fullname not in self._waiting or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_attend(module: ModuleType) -> None:
                run(module)
                self._waiting.pop(fullname, lambda _: None)(module)

            spec.loader.exec_module = run_and_attend  # type: ignore[method-assign]
        return spec
