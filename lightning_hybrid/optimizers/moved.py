"""Offloaded optimizer states: the base class that checks their files, and reads them back at the end.

A step that treats each parameter by itself runs layer by layer (``layer_step``), any other one with all
states at once (``full_step``).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.optimizers.state_file import Region, StateFile
from lightning_hybrid.params import store
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.tensors import is_absent


class MovedStates(ABC):
    """The states of one optimizer; some of them, or of their parameters, are on the host or in a file.

    Attributes:
        file: None where states are in the memory of the host, or where there are none.
    """

    def __init__(self, optimizer: Optimizer, states_on: torch.device, regions: Iterable[Region]) -> None:
        """Take ``optimizer`` (built), ``states_on`` (device of states), ``regions`` (with parameters that it steps)."""
        self._optimizer, self._states_on = optimizer, states_on
        self._files = {region.file for region in regions}
        self.file: StateFile | None = None
        self._undo: Callable[[], None] = lambda: None

    @abstractmethod
    def adopt(self) -> None:
        """Offload states that were loaded."""

    @abstractmethod
    def is_in_file(self, value: Tensor) -> bool:
        """Whether the memory of a state of any shape is in the file."""

    def check(self) -> None:
        """Check that no file has been truncated."""
        for file in self._files:
            file.check()

    def close(self) -> None:
        """Restore the optimizer's own step; states are read from the file, or lost with it."""
        is_lost = self.file is not None and not self.file.is_complete
        if is_lost:
            warnings.warn(
                f"the states of {type(self._optimizer).__name__} are lost: their file was truncated, and is no longer"
                " needed for this run; save no checkpoint from now on",
                stacklevel=2,
            )

        for _, value in self._states():
            if self.is_in_file(value):
                store.move(value, torch.full_like(value, float("nan")) if is_lost else value.clone())
        self._undo()
        if self.file is not None:
            self.file.close()

    def _states(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each state tensor once, with its parameter; move it by its `data`: other code may refer to the object."""
        yielded = set()
        for p, entry in self._optimizer.state.items():
            if isinstance(p, Tensor) and not is_absent(p):
                for value in flatten(entry)[0]:
                    # Those that are worth moving.
                    if not isinstance(value, Tensor) or is_absent(value) or value.layout != torch.strided:
                        continue
                    if value.numel() > 1 and id(value) not in yielded:
                        yielded.add(id(value))
                        yield p, value
