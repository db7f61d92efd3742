"""The protocol of a context in which user code reads full parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Reads(Protocol):
    """Replaces reads of a sharded module by reads of the full one."""

    def hook(self, name: str, *, is_complete: bool = True) -> AbstractContextManager[None]:
        """Let code inside read the full model; collective (``CrossStageReads.hook``)."""

    def known(self, value: Any) -> Any:
        """Return ``value`` with the content of every tensor in it; collective."""

    def track_state(self, state: Mapping[Any, Any]) -> None:
        """Track an optimizer's state of a parameter, which is on the parameter's ranks."""

    def tracking(
        self, states: Sequence[Mapping[Any, Any]], copies: Sequence[nn.Module]
    ) -> AbstractContextManager[None]:
        """Track full states of optimizers, and full copies of the module, inside."""

    def is_on_all_ranks(self, tensor: Tensor) -> bool | None:
        """Whether all ranks have the full tensor; None if it is not here, and its location is not recorded."""

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather an object from each rank that has a shard of this copy of the module; collective."""

    def contents_for_file(self, tensors: Sequence[Tensor], *, keep: bool) -> list[Tensor]:
        """Return the full contents of tensors that are not here, for a rank that keeps them; collective."""
