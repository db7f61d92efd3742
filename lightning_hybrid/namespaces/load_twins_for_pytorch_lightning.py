"""Import hook that loads the files written for `lightning.pytorch` a second time, for `pytorch_lightning`.

A module below `lightning_hybrid.for_pytorch_lightning` has no file of its own. It is the file of the same name below
`lightning_hybrid`, compiled with other names in its import statements. Files and line numbers stay what they are, for
tracebacks and `inspect.getsource`.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from lightning_hybrid.namespaces.lightning_namespaces import LIGHTNING, PUBLIC, PYTORCH_LIGHTNING

_ROOT = Path(__file__).parents[1]
_TWIN_PACKAGES = ("strategies", "precision", "callbacks")


def find_twins() -> None:
    """Make the modules below `lightning_hybrid.for_pytorch_lightning` importable."""
    if not any(isinstance(finder, _TwinFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TwinFinder())


class _TwinFinder(importlib.abc.MetaPathFinder):
    """A finder that maps a twin module to its source file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        home = PYTORCH_LIGHTNING.home + "."
        parts = fullname.removeprefix(home).split(".")
        if not fullname.startswith(home) or parts[0] not in _TWIN_PACKAGES:
            return None
        file = _ROOT.joinpath(*parts)
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        if not file.is_file():
            return None
        return importlib.util.spec_from_file_location(fullname, file, loader=_TwinLoader(fullname, str(file)))


class _TwinLoader(SourceFileLoader):
    """A loader that compiles a file with its imports renamed."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile without the bytecode cache, which has the code of the other namespace."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data, filename=path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                _rename_import(node, path)
            elif isinstance(node, ast.ImportFrom):
                _rename_import_from(node, path)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


def _rename_import(node: ast.Import, path: Any) -> None:
    for alias in node.names:
        renamed = PYTORCH_LIGHTNING.counterpart_of(alias.name)
        # `import lightning.pytorch` binds the name `lightning`, which the code below then reads.
        if (renamed and not alias.asname) or alias.name == LIGHTNING.top:
            raise ImportError(f"{path}:{node.lineno}: write `import {renamed or LIGHTNING.package} as ...`")
        alias.name = renamed or alias.name


def _rename_import_from(node: ast.ImportFrom, path: Any) -> None:
    module = node.module or ""
    renamed = PYTORCH_LIGHTNING.counterpart_of(module)
    if renamed is not None:
        node.module = renamed
    elif node.level or any(
        alias.name in PUBLIC or PYTORCH_LIGHTNING.counterpart_of(f"{module}.{alias.name}") for alias in node.names
    ):
        raise ImportError(f"{path}:{node.lineno}: write out the module whose names are imported")
