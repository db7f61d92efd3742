"""Packages that a fresh process shall take for not installed: because a test says so, or since they load slowly."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Collection

# torchmetrics loads them wherever they are installed, which takes longer than to load torch; nothing here needs them.
OPTIONAL = ("matplotlib", "scipy", "transformers")


def hide(packages: Collection[str] = OPTIONAL) -> None:
    """Let this process find neither these packages nor their versions."""
    found = importlib.metadata.Distribution.from_name.__func__

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def from_name(cls, name):
        if name.replace("-", "_") in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(cls, name)

    sys.meta_path.insert(0, Missing())
    importlib.metadata.Distribution.from_name = classmethod(from_name)
