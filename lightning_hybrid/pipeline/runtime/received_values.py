"""Values received from other stages, waited for when the step first reads them.

Until then the step does what comes before: its contexts are entered, and the operations of earlier stages skipped. So
that is done while the rank would wait anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.schedule import Message


class Arrivals(Mapping[int, Tensor]):
    """The values of some messages, by index in the step graph.

    Attributes:
        waited: Seconds spent waiting so far.
    """

    def __init__(
        self,
        messages: Mapping[Message, list[Value]],
        wait: Callable[[Message], list[Tensor]],
        *,
        cloned: Collection[int],
        has_backward: bool,
    ) -> None:
        """Say what will come.

        Args:
            messages: The values of each.
            wait: Gives the tensors of one.
            cloned: Values that the step writes in place, which leaves must not be.
            has_backward: Whether gradients are sent back.
        """
        self._messages, self._wait = messages, wait
        self._cloned, self._has_backward = cloned, has_backward
        self._message_of = {value.index: message for message, values in messages.items() for value in values}
        self._leaves: dict[int, Tensor] = {}
        self._given: dict[int, Tensor] = {}
        self._grad = torch.is_grad_enabled()
        self.waited = 0.0

    def __getitem__(self, index: int) -> Tensor:
        """A value as the step may see it."""
        if index not in self._given:
            self._receive(self._message_of[index])
        return self._given[index]

    def __contains__(self, index: object) -> bool:
        return index in self._message_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._message_of)

    def __len__(self) -> int:
        return len(self._message_of)

    def leaves(self) -> dict[int, Tensor]:
        """All values as they came, with their gradients after the backward."""
        for index in self._message_of:
            if index not in self._leaves:
                self._receive(self._message_of[index])
        return self._leaves

    def are_of_broken(self) -> bool:
        """Whether something that has come was sent in place of what a broken step did not make."""
        with torch._C.DisableTorchFunction():
            return any(_holds_nothing(leaf.detach()) for leaf in self._leaves.values())

    def _receive(self, message: Message) -> None:
        begin = time.perf_counter()
        # The step's own modes are active here: nothing of this is an operation of the user, nor in their grad mode.
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self._grad):
            tensors = self._wait(message)
            self.waited += time.perf_counter() - begin
            for value, tensor in zip(self._messages[message], tensors, strict=True):
                leaf = tensor.requires_grad_(value.requires_grad and self._has_backward)
                self._leaves[value.index] = leaf
                self._given[value.index] = leaf.clone() if value.index in self._cloned else leaf


def broken_value(value: Value, device: torch.device) -> Tensor:
    """What is sent in place of a value that a broken step did not make: nothing but NaN, or zeros.

    Args:
        value: Of the recording.
        device: Of this rank.
    """
    dtype = getattr(torch, value.dtype)
    content = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(value.shape, content, dtype=dtype, device=device)


def _holds_nothing(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and tensor.is_floating_point() and bool(tensor.isnan().all())
