"""The step of an optimizer that looks at several parameters, with states that rest on the host or in a file.

LBFGS flattens all parameters into one vector and calls the training step in its own; Adafactor and Muon under ZeRO or
over tensor ranks see whole matrices, of which a rank holds parts; an optimizer of the user's may do anything. None of
them can be taken layer by layer. So all states come to where the parameters are, the step is the optimizer's own, with
its closure, and afterwards all states leave again: between steps they take no memory, within one they all do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_hybrid.zero.memory_mapped_states import Region, StateFile
from lightning_hybrid.zero.optimizer_states.offloaded_states import StatesAtRest
from lightning_hybrid.zero.optimizer_states.replaced_step import replace_step
from lightning_hybrid.zero.storage_devices import HOST


class StatesAtOnce(StatesAtRest):
    """All states of one optimizer, which are brought together; of any number and shape, a growing history too."""

    def __init__(
        self,
        optimizer: Optimizer,
        folder: str | None,
        regions: Iterable[Region] = (),
        *,
        states_on: torch.device = HOST,
    ) -> None:
        """Take over the optimizer's steps.

        Args:
            optimizer: Built, and not stepped yet.
            folder: For the file, which grows as states are made; None for memory.
            regions: Of files with parameters that it steps.
            states_on: Where states rest.

        Raises:
            OffloadError: The folder cannot be written.
        """
        self._regions = set(regions)
        super().__init__(optimizer, states_on, self._regions)
        if folder is not None:
            self.file = StateFile(folder, [])
            self._files.add(self.file)
        self._places: dict[int, _Place] = {}  # by where they begin
        self._original = optimizer.step
        self._undo = replace_step(optimizer, lambda _, *args, **kwargs: self._step(*args, **kwargs))

    def adopt(self) -> None:
        """As of ``StatesAtRest``."""
        self._leave()

    def is_in_file(self, value: Tensor) -> bool:
        """As of ``StatesAtRest``; views of what is in it are."""
        return value.device == HOST and _begin(value) in self._places

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        if self.file is not None:
            for place in self._places.values():
                self.file.read_ahead(place.region)
        for p, value in self._states():
            value.data = value.to(p.device)
        try:
            return self._original(*args, **kwargs)
        finally:
            self._leave()

    @torch.no_grad()
    def _leave(self) -> None:
        """All states are where they rest."""
        if self.file is not None:
            self._leave_for(self.file)
        else:
            for _, value in self._states():
                value.data = value.to(self._states_on)
        for region in self._regions:
            region.let_go()

    def _leave_for(self, file: StateFile) -> None:
        """States that the step has made, or put others in place of, go to places in the file that nobody holds."""
        file.check()
        for _, value in self._states():
            if self.is_in_file(value):
                continue
            free = (place for place in self._places.values() if place.nbytes == value.nbytes and place.held.expired())
            place = next(free, None)
            region = file.extend([value.nbytes]) if place is None else place.region
            value.data = file.tensor(region, 0, value).copy_(value)
            self._places[_begin(value)] = _Place(region, value.nbytes, StorageWeakRef(value.untyped_storage()))
        for place in self._places.values():
            file.let_go(place.region)


class _Place(NamedTuple):
    """A region of the file, its bytes, and the storage in it, which views outside of the states may hold too."""

    region: int
    nbytes: int
    held: StorageWeakRef


def _begin(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
