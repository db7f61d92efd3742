"""What the two ways to step an optimizer with offloaded states share: files are watched, states come back.

A step that looks at one parameter at a time is taken layer by layer (``offload``), any other one with all states at
once (``offload_at_once``).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.zero.memory_mapped_states import Region, StateFile


class StatesAtRest(ABC):
    """The states of one optimizer, of which something is on the host, or in a file: they, or what they are states of.

    Attributes:
        file: None where they are in the memory of the host, or where there are none.
    """

    def __init__(self, optimizer: Optimizer, states_on: torch.device, regions: Iterable[Region]) -> None:
        """Args: optimizer: built. states_on: where states are. regions: with parameters that it steps."""
        self._optimizer, self._states_on = optimizer, states_on
        self._files = {region.file for region in regions}
        self.file: StateFile | None = None
        self._undo: Callable[[], None] = lambda: None

    @abstractmethod
    def adopt(self) -> None:
        """States that were loaded go to where they rest."""

    @abstractmethod
    def is_in_file(self, value: Tensor) -> bool:
        """Whether a state's bytes are those of the file."""

    def check(self) -> None:
        """See that files are what they were made.

        Raises:
            OffloadError: One was cut off.
        """
        for file in self._files:
            file.check()

    def close(self) -> None:
        """Give the optimizer its own steps again; states that are in the file are read, or lost with it."""
        is_lost = self.file is not None and not self.file.is_there
        if is_lost:
            warnings.warn(
                f"the states of {type(self._optimizer).__name__} are lost: their file was cut off, and is no longer"
                " needed for this run; save no checkpoint from now on",
                stacklevel=2,
            )

        for _, value in self._states():
            if self.is_in_file(value):
                value.data = torch.full_like(value, float("nan")) if is_lost else value.clone()
        self._undo()
        if self.file is not None:
            self.file.close()

    def _states(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor that is a state once, behind its parameter; moved by its `data`: others may know the object."""
        seen = set()
        for p, entry in self._optimizer.state.items():
            if isinstance(p, Tensor) and not is_absent(p):
                for value in flatten(entry)[0]:
                    if _has_bytes(value) and id(value) not in seen:
                        seen.add(id(value))
                        yield p, value


def _has_bytes(value: Any) -> bool:
    """Whether it is a tensor that is worth moving."""
    is_plain = isinstance(value, Tensor) and not is_absent(value) and value.layout == torch.strided
    return is_plain and value.numel() > 1
