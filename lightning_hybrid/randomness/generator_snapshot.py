"""A snapshot of the random generators of Python, numpy, torch and one accelerator, to be restored later."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


class GeneratorStates:
    """The states of all random generators of this process."""

    def __init__(self, device: torch.device) -> None:
        """Take ``device`` (an accelerator whose generator is included)."""
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()
        self._torch = torch.default_generator.get_state()
        self._device = device
        self._accelerator = accelerator_generator(device)
        self._accelerator_state = None if self._accelerator is None else self._accelerator.get_state()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the states without the generator."""
        return {**self.__dict__, "_accelerator": None}

    def on(self, device: torch.device) -> GeneratorStates:
        """Use the generator of another device, such as that of the process that received these states."""
        self._device, self._accelerator = device, accelerator_generator(device)
        return self

    def are_unchanged(self) -> bool:
        """Whether no generator has been used since."""
        kind, keys, *position = self._numpy
        kind_now, keys_now, *position_now = numpy.random.get_state()
        accelerator, state = self._accelerator, self._accelerator_state
        return (
            random.getstate() == self._python
            and (kind, position) == (kind_now, position_now)
            and numpy.array_equal(keys, keys_now)
            and torch.equal(torch.default_generator.get_state(), self._torch)
            and (accelerator is None or state is None or torch.equal(accelerator.get_state(), state))
        )

    def restore(self) -> None:
        """Restore the generators."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        if self._accelerator is not None and self._accelerator_state is not None:
            self._accelerator.set_state(self._accelerator_state)


def accelerator_generator(device: torch.device) -> torch.Generator | None:
    """The generator of a CUDA device; None for another device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return None
