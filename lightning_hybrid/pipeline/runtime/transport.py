"""Point-to-point messages between pipeline ranks.

A message is the tensors of one portal for one microbatch. Their shapes are in the step graph, so only their content is
sent; a tensor whose shape depends on data is preceded by a small header. A received tensor has the strides that it had
on the sender: dropout draws in that order.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.tensors import as_sendable
from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.schedule import Channel, Message
from lightning_hybrid.shared_memory.transfers import Transfers, transfers_of

_MAX_DIMS = 8
# Number of sends under way before the oldest is waited for; their tensors stay alive that long.
_SENDS_IN_FLIGHT = 3


class Transport(ABC):
    """Point-to-point transfers between the ranks of one pipeline."""

    channel: Channel = "queue"  # how transfers between two ranks are matched: by order, or by tag

    @abstractmethod
    def send(self, message: Message, peer: int, values: Sequence[Value], tensors: Sequence[Tensor]) -> None:
        """Start to send the tensors of a message, in the shapes of its values; not to be written until ``finish``."""

    @abstractmethod
    def receive(self, message: Message, peer: int, values: Sequence[Value]) -> Callable[[], list[Tensor]]:
        """Post a receive; returns a function that waits for the tensors, which have the shapes of the values."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all sends have completed."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Prepare transfers between these pairs of ranks; collective over the pipeline."""
        del pairs


def _wait(works: Sequence[dist.Work], tensors: Sequence[Tensor], values: Sequence[Value]) -> list[Tensor]:
    for work in works:
        work.wait()
    return [_restore_layout(tensor, value) for tensor, value in zip(tensors, values, strict=True)]


def _restore_layout(tensor: Tensor, value: Value) -> Tensor:
    """A received tensor on the device and with the strides of its value."""
    stride = None if value.dynamic or tensor.shape != value.shape else _dense_stride(value.shape, value.stride)
    if stride is not None:
        tensor = tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
    return tensor.to(value.device) if value.device else tensor


@lru_cache(maxsize=1024)
def _dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a tensor without gaps whose elements lie in the order of these; None for the usual order."""
    dense = torch.empty_like(torch.empty_strided(shape, stride, device="meta"))
    return None if dense.is_contiguous() else dense.stride()


class HostTransport(Transport):
    """Transfers through the shared memory of one host, on CPUs; they carry their shapes, and sends do not wait."""

    channel: Channel = "tags"

    def __init__(self, transfers: Transfers) -> None:
        """Set up on the transfers between the ranks of one pipeline; collective."""
        self._transfers = transfers
        transfers.renew()

    def send(self, message: Message, peer: int, values: Sequence[Value], tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of a message, of any shapes, into shared memory."""
        for position, tensor in enumerate(tensors):
            self._transfers.send(peer, _tag(message, position), tensor)

    def receive(self, message: Message, peer: int, values: Sequence[Value]) -> Callable[[], list[Tensor]]:
        """Return a function that receives the tensors, which have the shapes of the values."""
        return lambda: [self._receive(peer, _tag(message, position), value) for position, value in enumerate(values)]

    def _receive(self, peer: int, tag: int, value: Value) -> Tensor:
        return _restore_layout(self._transfers.receive(peer, tag, getattr(torch, value.dtype)), value)

    def finish(self) -> None:
        """Do nothing: sends complete immediately."""


class GroupTransport(Transport):
    """Transfers over a ``torch.distributed`` process group, one tagged send per tensor."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Set up for the ranks of one pipeline, by pipeline coordinate; tensors are received on ``device``."""
        self._group = group
        self._device = device
        self.channel = "tags" if group._get_backend(device).name() == "gloo" else "queue"
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._connected: set[tuple[int, int]] = set()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let NCCL create the communicator of each pair now, in one order: the first transfer would wait for it."""
        if self.channel == "tags":
            return
        rank = self._group.rank()
        for pair in sorted({(min(pair), max(pair)) for pair in pairs} - self._connected):
            self._connected.add(pair)
            if rank in pair:
                token = torch.zeros(1, device=self._device)
                work = self._group.send([token], pair[1], 0) if rank == pair[0] else self._post(token, pair[0], 0)
                work.wait()

    def send(self, message: Message, peer: int, values: Sequence[Value], tensors: Sequence[Tensor]) -> None:
        """Start to send the tensors of a message, of any shapes, with a header for each shape that depends on data."""
        for position, (value, tensor) in enumerate(zip(values, tensors, strict=True)):
            # A tensor that user code has moved to another device is sent from that of the group.
            tensor = tensor.detach().to(self._device).resolve_conj().resolve_neg().contiguous()
            if value.dynamic:
                shape = [tensor.dim(), *tensor.shape] + [0] * (_MAX_DIMS - tensor.dim())
                self._start(torch.tensor(shape, device=self._device), peer, _tag(message, position, header=True))
            self._start(as_sendable(tensor), peer, _tag(message, position))

    def _start(self, tensor: Tensor, peer: int, tag: int) -> None:
        # The methods of the group: torch.distributed.isend would repeat checks for each tensor.
        self._under_way.append((self._group.send([tensor], peer, tag), tensor))
        while len(self._under_way) > _SENDS_IN_FLIGHT:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        work, _ = self._under_way.popleft()
        work.wait()

    def receive(self, message: Message, peer: int, values: Sequence[Value]) -> Callable[[], list[Tensor]]:
        """Post the receives of a message; wait for headers with shapes: ``lower`` posts no such receive ahead."""
        works, tensors = [], []
        for position, value in enumerate(values):
            shape: Sequence[int] = value.shape
            if value.dynamic:
                header = torch.empty(_MAX_DIMS + 1, dtype=torch.int64, device=self._device)
                self._post(header, peer, _tag(message, position, header=True)).wait()
                dims, *sizes = header.tolist()
                shape = sizes[:dims]
            tensor = torch.empty(shape, dtype=getattr(torch, value.dtype), device=self._device)
            works.append(self._post(as_sendable(tensor), peer, _tag(message, position)))
            tensors.append(tensor)
        return partial(_wait, works, tensors, values)

    def _post(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        return self._group.recv([tensor], peer, tag)

    def finish(self) -> None:
        """Wait until all sends have completed."""
        while self._under_way:
            self._wait_oldest()


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The fastest transport between the ranks of one pipeline; collective."""
    transfers = transfers_of(group) if device.type == "cpu" else None
    return GroupTransport(group, device) if transfers is None else HostTransport(transfers)


def _tag(message: Message, position: int, *, header: bool = False) -> int:
    """A tag that is unique among the messages under way between two ranks."""
    tag = message.microbatch & 0x3FF
    for number, size in ((message.source, 0x40), (message.target, 0x40), (position, 0x100)):
        tag = tag * size + number % size
    return (tag * 2 + (message.direction == "backward")) * 2 + header & 0x7FFFFFFF


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
        """Set up for messages that are under way; ``wait`` waits for one, and returns its tensors.

        The step gets clones of ``cloned`` values, which it writes in place, since autograd leaves must not be written.
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
    """The placeholder that is sent for a value which a broken step did not compute, of its shape: NaN, or zeros."""
    dtype = getattr(torch, value.dtype)
    content = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(value.shape, content, dtype=dtype, device=device)


def _is_of_broken_step(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and tensor.is_floating_point() and bool(tensor.isnan().all())
