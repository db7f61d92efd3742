"""Where this rank's parts of parameters and of gradients are while a step runs, and where they are between steps.

While a step runs, each is at its own home: on the device that computes, on the host, or in a file. Between steps the
user's ``Parameter`` objects show both, and torch wants a parameter and its gradient on one device:

    homes of parameters and gradients     between steps both are
    the same                              there
    different ones                        where the optimizer's states are, so that its step finds all three together

What is shown elsewhere than at home is a copy. It is what counts, since optimizers, hooks and checkpoints that are
loaded write to it, until the next step brings it home.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.zero.memory_mapped_states import Region, aligned

HOST = torch.device("cpu")
KINDS = ("parameters", "gradients", "optimizer_states")


@dataclass(frozen=True)
class Homes:
    """Of the parts on one rank.

    Attributes:
        parameters: Of their parts, while a step runs.
        gradients: Of theirs.
        states: Of the optimizer's states.
    """

    parameters: torch.device
    gradients: torch.device
    states: torch.device

    @classmethod
    def of(cls, offloaded: Iterable[str], device: torch.device) -> Homes:
        """What is offloaded is on the host, a file's memory too.

        Args:
            offloaded: Some of "parameters", "gradients" and "optimizer_states".
            device: That computes.
        """
        away = set(offloaded)
        return cls(*(HOST if kind in away else device for kind in KINDS))

    @property
    def between_steps(self) -> torch.device:
        """Where parameters and gradients are shown."""
        return self.parameters if self.parameters == self.gradients else self.states


class PartsAtHome:
    """The parts of one group's parameters on this rank."""

    def __init__(self, parts: Mapping[str, Tensor], homes: Homes, region: Region | None) -> None:
        """Bring them home.

        Args:
            parts: By FQN; on the device that computes.
            homes: Where to.
            region: Of a file, which is their home then.
        """
        self._homes, self.region = homes, region
        self._shown: dict[str, Tensor] = {}  # of those that are shown elsewhere than at home
        self._parts: dict[str, Tensor] = {}
        places = {} if region is None else _places_in(region, parts)
        for name, part in parts.items():
            if region is None:
                self._parts[name] = part.to(homes.parameters)
            else:
                self._parts[name] = places[name].copy_(part)
            if part.device == homes.between_steps and self._parts[name].device != homes.between_steps:
                self._shown[name] = part
        self.let_go()

    def __getitem__(self, name: str) -> Tensor:
        """The part, at home; nothing of it may be shown elsewhere."""
        assert name not in self._shown
        return self._parts[name]

    def shape(self, name: str) -> torch.Size:
        """The shape of a part."""
        return self._parts[name].shape

    def address(self, name: str) -> int:
        """Where a part begins, at home."""
        return self._parts[name].data_ptr()

    def move(self, name: str, part: Tensor) -> None:
        """Let another tensor, with the same content, be the part."""
        self._parts[name] = part

    @torch.inference_mode(False)  # an evaluation may run in it, and the optimizer writes to what is shown
    @torch.no_grad()
    def shown(self, name: str) -> Tensor:
        """What a parameter holds between steps."""
        part, device = self._parts[name], self._homes.between_steps
        if part.device == device:
            return part
        if name not in self._shown:
            self._shown[name] = part.to(device)
        return self._shown[name]

    @torch.inference_mode(False)
    def shown_gradient(self, gradient: Tensor) -> Tensor:
        """What a parameter's gradient is between steps."""
        return gradient.to(self._homes.between_steps)

    def gradient_at_home(self, gradient: Tensor) -> Tensor:
        """The gradient while a step runs."""
        return gradient.to(self._homes.gradients)

    @torch.no_grad()
    def bring_home(self) -> list[str]:
        """Write what is shown elsewhere to its home; nothing is shown while a step runs.

        Returns:
            FQNs of those that were shown elsewhere.
        """
        for name, shown in self._shown.items():
            self.write(name, shown)
        names, self._shown = list(self._shown), {}
        if names:
            self.let_go()
        return names

    def write(self, name: str, content: Tensor) -> None:
        """Content of the device that computes for a part."""
        part = self._parts[name]
        # Who writes to a file has it written to the disk, which takes longer than to see that nothing is new.
        if self.region is None or not torch.equal(part, content.to(part.device)):
            part.copy_(content)

    def let_go(self) -> None:
        """Parts in a file leave memory."""
        if self.region is not None:
            self.region.let_go()


def _places_in(region: Region, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    offset, places = 0, {}
    for name, part in parts.items():
        places[name] = region.tensor(offset, part)
        offset += aligned(part.nbytes)
    return places
