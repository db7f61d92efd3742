"""Registration of the strategies with Lightning by name, without importing Lightning.

Lightning has no entry point for strategies, so importing this package registers them, in each of Lightning's two
namespaces. A module that is not imported yet is prepared right after its import, so that uses without Lightning
(planning a layout, drawing a schedule) do not import it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from lightning_hybrid.checkpoint.load_from_checkpoint import accept_folders
from lightning_hybrid.namespaces.converted_objects import accept_both
from lightning_hybrid.namespaces.lightning_namespaces import NAMESPACES, Namespace

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
    pending: dict[str, Callable[[ModuleType], None]] = {}
    for namespace in NAMESPACES:
        for name, attribute, prepare in (
            (f"{namespace.package}.strategies", "StrategyRegistry", _register_in),
            (f"{namespace.package}.trainer.trainer", "Trainer", accept_both),
            (f"{namespace.package}.core.saving", "pl_load", accept_folders),
        ):
            module = sys.modules.get(name)
            if module is not None and hasattr(module, attribute):
                prepare(module, namespace)
            else:
                pending[name] = partial(prepare, namespace=namespace)
    if pending and not any(isinstance(finder, _ImportWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportWatcher(pending))


def _register_in(module: ModuleType, namespace: Namespace) -> None:
    for name, options in _NAMES.items():
        if name not in module.StrategyRegistry:
            description = "data, tensor and pipeline parallelism for unmodified LightningModules"
            module.StrategyRegistry.register(name, partial(_build, namespace), description=description, **options)


def _build(namespace: Namespace, **options: Any) -> Any:
    return namespace.load("Hybrid3DStrategy")(**options)


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """A finder that calls a function with each pending module, by its name, after its import."""

    def __init__(self, pending: dict[str, Callable[[ModuleType], None]]) -> None:
        self._pending = pending
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._pending or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_prepare(module: ModuleType) -> None:
                run(module)
                self._pending.pop(fullname, lambda _: None)(module)

            spec.loader.exec_module = run_and_prepare  # type: ignore[method-assign]
        return spec
