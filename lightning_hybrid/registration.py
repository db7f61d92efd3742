"""Make the strategies known to Lightning by name, without importing Lightning.

Lightning has no entry point for strategies, so importing this package registers them. Where Lightning is not imported
yet, that happens right after it is, and what cannot be seen from here (planning a layout, drawing a schedule) never
pays for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_REGISTRIES = "lightning.pytorch.strategies"
_NAMES: dict[str, dict[str, Any]] = {
    "hybrid3d": {},
    "hybrid3d_fork": {"start_method": "fork"},
    "hybrid3d_notebook": {"start_method": "fork"},
}


def register() -> None:
    """Register the strategies now, or as soon as Lightning is imported."""
    module = sys.modules.get(_REGISTRIES)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _register_in(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register_in(module: ModuleType) -> None:
    for name, options in _NAMES.items():
        if name not in module.StrategyRegistry:
            description = "data, tensor and pipeline parallelism for unmodified LightningModules"
            module.StrategyRegistry.register(name, _build, description=description, **options)


def _build(**options: Any) -> Any:
    return importlib.import_module("lightning_hybrid.strategies").Hybrid3DStrategy(**options)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Watches for Lightning's strategies to be imported, registers, and steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Wrap the loader of the one module of interest."""
        if fullname != _REGISTRIES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register_in(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
