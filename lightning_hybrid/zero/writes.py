"""Writes to the full parameters of one group, which are found without a message, and copied or digested."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import digest_of_bits
from lightning_hybrid.params.guards import below_read_guards


class GroupWrites:
    """What has been written to the sharded parameters of one group while they are full; callers check that they are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take them by FQN."""
        self._parameters = parameters
        self._versions: dict[str, int] = {}  # when parameters had what all ranks have
        self._aliases: list[tuple[str, Tensor, int]] = []  # from ``.data``, with their versions
        self._gradients: dict[str, tuple[int, int]] = {}  # places and versions of what all ranks have
        self._digests: list[tuple[str, Tensor]] = []

    @property
    def names(self) -> Collection[str]:
        """Of the sharded parameters."""
        return self._parameters.keys()

    @below_read_guards
    def begin(self) -> None:
        """Find what is written from now on."""
        self._aliases.clear()
        self._versions = {name: parameter._version for name, parameter in self._parameters.items()}

    def follow(self, parameter: Tensor, data: Tensor) -> None:
        """Find what is written to ``data``, which code has from a parameter, of the same shape."""
        name = next((name for name, other in self._parameters.items() if other is parameter), None)
        if name is not None:
            self._aliases.append((name, data, data._version))

    @torch.no_grad()
    @below_read_guards
    def collect(self, full: Mapping[str, Tensor]) -> None:
        """Digest what has been written; copy what was assigned, as in ``p.data = 0.9 * p.data``.

        ``full`` are the tensors of full shape, by FQN.
        """
        written = {name for name, data, version in self._aliases if data._version != version}
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != full[name].data_ptr() and parameter.shape == full[name].shape:
                full[name].copy_(parameter.detach())
            elif parameter._version == self._versions[name] and name not in written:
                continue
            self._digests.append((name, digest_of_bits(full[name])))
        self.begin()

    @below_read_guards
    def begin_gradients(self) -> None:
        """Find what is written to full gradients from now on, which all ranks have alike."""
        self._gradients = self._present_gradients()

    @torch.no_grad()
    @below_read_guards
    def collect_gradients(self) -> None:
        """Digest the gradients that have been written, or assigned."""
        for name, found in self._present_gradients().items():
            if self._gradients.get(name) != found:
                gradient = self._parameters[name].grad
                assert gradient is not None
                self._digests.append((f"{name}.grad", digest_of_bits(gradient)))

    def _present_gradients(self) -> dict[str, tuple[int, int]]:
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        return {
            name: (gradient.data_ptr(), gradient._version)
            for name, gradient in gradients.items()
            if gradient is not None and gradient.layout is torch.strided
        }

    def take(self) -> list[tuple[str, Tensor]]:
        """The digests, each of shape (), with the name of the parameter; once."""
        taken, self._digests = self._digests, []
        return taken
