"""Values received from other stages, waited for when the step first reads them.

Until then the step enters its contexts and skips the operations of earlier stages. So that is done while the rank
would wait anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.schedule import Message


class ReceivedValues(Mapping[int, Tensor]):
    """The received values of some messages, by index in the step graph; a tensor has the shape of its value.

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
        """Set up for messages that are under way.

        Args:
            messages: The values of each message.
            wait: Waits for a message, and returns its tensors.
            cloned: Values that the step writes in place; it gets clones, since autograd leaves must not be written.
            has_backward: Whether gradients are sent back.
        """
        self._messages, self._wait = messages, wait
        self._cloned, self._has_backward = cloned, has_backward
        self._message_of = {value.index: message for message, values in messages.items() for value in values}
        self._leaves: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        self._grad = torch.is_grad_enabled()
        self.waited = 0.0

    def __getitem__(self, index: int) -> Tensor:
        """A value as the step reads it: the leaf, or a clone."""
        if index not in self._inputs:
            self._receive(self._message_of[index])
        return self._inputs[index]

    def __contains__(self, index: object) -> bool:
        return index in self._message_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._message_of)

    def __len__(self) -> int:
        return len(self._message_of)

    def leaves(self) -> dict[int, Tensor]:
        """All values by index, as autograd leaves in their shapes, which have their gradients after the backward."""
        for index in self._message_of:
            if index not in self._leaves:
                self._receive(self._message_of[index])
        return self._leaves

    def include_broken(self) -> bool:
        """Whether a received tensor is the placeholder of a broken step."""
        with torch._C.DisableTorchFunction():
            return any(_is_of_broken_step(leaf.detach()) for leaf in self._leaves.values())

    def _receive(self, message: Message) -> None:
        begin = time.perf_counter()
        # The step's function modes are active here: this is no operation of the user, nor in their grad mode.
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self._grad):
            tensors = self._wait(message)
            self.waited += time.perf_counter() - begin
            for value, tensor in zip(self._messages[message], tensors, strict=True):
                leaf = tensor.requires_grad_(value.requires_grad and self._has_backward)
                self._leaves[value.index] = leaf
                self._inputs[value.index] = leaf.clone() if value.index in self._cloned else leaf


def value_of_broken_step(value: Value, device: torch.device) -> Tensor:
    """The placeholder that is sent for a value which a broken step did not compute: all NaN, or zeros for integers.

    Args:
        value: The value in the recording; gives shape and dtype.
        device: The device of this rank.
    """
    dtype = getattr(torch, value.dtype)
    content = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(value.shape, content, dtype=dtype, device=device)


def _is_of_broken_step(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and tensor.is_floating_point() and bool(tensor.isnan().all())
