"""The protocol of a context in which user code reads full parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Reads(Protocol):
    """Makes what is read of a module in parts that of the whole."""

    def hook(self, name: str, *, is_complete: bool = True) -> AbstractContextManager[None]:
        """What runs inside reads the whole model; collective. See ``CrossStageReads.hook``."""

    def known(self, value: Any) -> Any:
        """``value``, with the content of every tensor in it; collective."""

    def track_state(self, state: Mapping[Any, Any]) -> None:
        """An optimizer's state of a parameter is where the parameter is."""

    def tracking(
        self, states: Sequence[Mapping[Any, Any]], copies: Sequence[nn.Module]
    ) -> AbstractContextManager[None]:
        """What runs inside also reads whole states of optimizers, and whole copies of the module."""

    def is_on_all_ranks(self, tensor: Tensor) -> bool | None:
        """Whether all ranks have the whole of a tensor; None if it is not here, and nobody knows where it is."""

    def gather_objects(self, mine: Any) -> list[Any]:
        """What each rank says that has a part of this copy of the module; collective over them."""

    def contents_for_file(self, tensors: Sequence[Tensor], *, keep: bool) -> list[Tensor]:
        """The whole contents of tensors that are not here, for a rank that keeps them; collective."""
