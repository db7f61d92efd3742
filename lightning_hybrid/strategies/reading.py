"""What hooks and optimizers of the user are run in, where a rank holds a part of the module only."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Reads(Protocol):
    """Makes what is read of a module in parts that of the whole."""

    def hook(self, name: str, *, is_complete: bool = True) -> AbstractContextManager[None]:
        """What runs inside reads the whole model; collective. See ``GlobalReads.hook``."""

    def known(self, value: Any) -> Any:
        """``value``, with the content of every tensor in it; collective."""

    def adopt_state(self, state: Mapping[Any, Any]) -> None:
        """An optimizer's state of a parameter is where the parameter is."""
