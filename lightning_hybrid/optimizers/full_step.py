"""Optimizer step over all parameters at once, with states that are offloaded to the host or to a file between steps.

LBFGS flattens all parameters into one vector and calls the training step itself; Adafactor and Muon under ZeRO or over
tensor ranks use full matrices, of which a rank has shards; an optimizer of the user's may do anything. None of them can
step layer by layer. So all states move to the devices of their parameters, the optimizer's own step runs, with its
closure, and afterwards all states are offloaded again: they take memory within a step only, but then all of them do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_hybrid.optimizers.moved import MovedStates
from lightning_hybrid.optimizers.replacement import Place, replace_step
from lightning_hybrid.optimizers.state_file import HOST, Region, StateFile
from lightning_hybrid.params import store


class AllParametersStep(MovedStates):
    """The offloaded states of one optimizer, moved together; of any number and shape, a growing history included."""

    def __init__(
        self,
        optimizer: Optimizer,
        folder: str | None,
        regions: Iterable[Region] = (),
        *,
        states_on: torch.device = HOST,
    ) -> None:
        """Replace the optimizer's step.

        ``folder`` is for the file, which grows as states are made; ``regions`` are of files with parameters that it
        steps.

        Raises:
            OffloadError: The folder cannot be written.
        """
        self._regions = set(regions)
        super().__init__(optimizer, states_on, self._regions)
        if folder is not None:
            self.file = StateFile(folder, [])
            self._files.add(self.file)
        self._by_address: dict[int, _FileRegion] = {}
        self._original = optimizer.step
        step = lambda _, *args, **kwargs: self._step(*args, **kwargs)  # noqa: E731
        self._undo = replace_step(optimizer, step, Place.STATES, reason="offloaded states, all at once")

    def adopt(self) -> None:
        """Offload states that were loaded."""
        self._offload()

    def is_in_file(self, value: Tensor) -> bool:
        """Whether a state of any shape, or what it is a view of, is in the file."""
        return value.device == HOST and _address(value) in self._by_address

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        if self.file is not None:
            for slot in self._by_address.values():
                slot.region.read_ahead()
        for p, value in self._states():
            store.move(value, value.to(p.device))
        try:
            return self._original(*args, **kwargs)
        finally:
            self._offload()

    @torch.no_grad()
    def _offload(self) -> None:
        """Offload all states."""
        if self.file is not None:
            self._offload_to(self.file)
        else:
            for _, value in self._states():
                store.move(value, value.to(self._states_on))
        for region in self._regions:
            region.evict()

    def _offload_to(self, file: StateFile) -> None:
        """Copy states that the step has made or replaced to regions of the file that no other tensor uses."""
        file.check()
        for _, value in self._states():
            if self.is_in_file(value):
                continue
            free = (old for old in self._by_address.values() if old.nbytes == value.nbytes and old.storage.expired())
            slot = next(free, None)
            if slot is None:
                file.extend([value.nbytes])
            region = Region(file, len(file.maps) - 1) if slot is None else slot.region
            store.move(value, region.tensor(0, value).copy_(value))
            storage = StorageWeakRef(value.untyped_storage())
            self._by_address[_address(value)] = _FileRegion(region, value.nbytes, storage)
        for slot in self._by_address.values():
            slot.region.evict()


class _FileRegion(NamedTuple):
    """A region of the file, its bytes, and a weak reference to its storage, which views elsewhere may use too."""

    region: Region
    nbytes: int
    storage: StorageWeakRef


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
