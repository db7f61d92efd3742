"""Packages that a process treats as not installed: for a test, or because their import is slow."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Collection, Iterator

# torchmetrics loads them wherever they are installed, which takes longer than to load torch; nothing here needs them.
OPTIONAL = ("matplotlib", "scipy", "transformers")


def hide(packages: Collection[str] = OPTIONAL) -> Callable[[], None]:
    """Hide these packages and their versions from this process, until the returned function is called."""
    original = vars(importlib.metadata.Distribution)["from_name"]
    found = importlib.metadata.Distribution.from_name.__func__

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def from_name(cls, name):
        if name.replace("-", "_") in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(cls, name)

    finder = Missing()
    sys.meta_path.insert(0, finder)
    importlib.metadata.Distribution.from_name = classmethod(from_name)

    def undo():
        sys.meta_path.remove(finder)
        importlib.metadata.Distribution.from_name = original

    return undo


@contextlib.contextmanager
def hidden(packages: Collection[str] = OPTIONAL) -> Iterator[None]:
    """Inside, this process finds none of these packages."""
    undo = hide(packages)
    try:
        yield
    finally:
        undo()
