"""Point-to-point messages between pipeline ranks.

A message is the tensors of one portal for one microbatch. Their shapes are known from the step graph, so nothing but
their content travels; a tensor whose shape depends on data is preceded by a small header. What arrives lies in memory
as it lay where it was made: dropout draws in that order.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.mesh import as_sent
from lightning_hybrid.schedule import Channel, Message
from lightning_hybrid.shared_memory.transfers import Transfers, transfers_of

_MOST_DIMS = 8
# So many sends may be under way before the oldest is waited for; their tensors stay alive that long.
_SENDS_IN_FLIGHT = 3


class Incoming(ABC):
    """A message whose receive was posted."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""


class Transport(ABC):
    """Point-to-point transfers between the ranks of one pipeline.

    Attributes:
        channel: How transfers between two ranks find each other.
    """

    channel: Channel = "queue"

    @abstractmethod
    def send(self, message: Message, peer: int, values: Sequence[Value], tensors: Sequence[Tensor]) -> None:
        """Start to send; the tensors must not be written until ``finish``."""

    @abstractmethod
    def receive(self, message: Message, peer: int, values: Sequence[Value]) -> Incoming:
        """Post a receive and return at once."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything sent has left."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Be ready for transfers between these pairs of ranks; collective over the pipeline."""
        del pairs


class _Posted(Incoming):
    def __init__(self, works: list[dist.Work], tensors: list[Tensor], values: Sequence[Value]) -> None:
        self._works, self._tensors, self._values = works, tensors, values

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return [_in_place(tensor, value) for tensor, value in zip(self._tensors, self._values, strict=True)]


def _in_place(tensor: Tensor, value: Value) -> Tensor:
    """What has arrived, on the device and in the layout of the value."""
    stride = None if value.dynamic or tensor.shape != value.shape else _dense_stride(value.shape, value.stride)
    if stride is not None:
        tensor = tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
    return tensor.to(value.device) if value.device else tensor


@functools.lru_cache(maxsize=1024)
def _dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a tensor without gaps whose elements lie in the order of these; None for the usual order."""
    like = torch.empty_like(torch.empty_strided(shape, stride, device="meta"))
    return None if like.is_contiguous() else like.stride()


class HostTransport(Transport):
    """Transfers through the memory of one host, on CPUs; shapes come with them, and sends wait for nobody."""

    channel: Channel = "tags"

    def __init__(self, transfers: Transfers) -> None:
        """Collective: args: transfers: between the ranks of one pipeline."""
        self._transfers = transfers
        transfers.generation += 1

    def send(self, message: Message, peer: int, values: Sequence[Value], tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of a message to where the peer finds them."""
        for place, tensor in enumerate(tensors):
            self._transfers.send(peer, _tag(message, place), tensor)

    def receive(self, message: Message, peer: int, values: Sequence[Value]) -> Incoming:
        """Note what will come."""
        return _Expected(self._transfers, message, peer, values)

    def finish(self) -> None:
        """Nothing: what was sent has left."""


class _Expected(Incoming):
    def __init__(self, transfers: Transfers, message: Message, peer: int, values: Sequence[Value]) -> None:
        self._transfers, self._message, self._peer, self._values = transfers, message, peer, values

    def wait(self) -> list[Tensor]:
        tensors = []
        for place, value in enumerate(self._values):
            tensor = self._transfers.receive(self._peer, _tag(self._message, place), getattr(torch, value.dtype))
            tensors.append(_in_place(tensor, value))
        return tensors


class GroupTransport(Transport):
    """Transfers over a ``torch.distributed`` process group, one tagged send per tensor."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Args: group: the ranks of one pipeline, by pipeline coordinate. device: where tensors are received."""
        self._group = group
        self._device = device
        self.channel = "tags" if group._get_backend(device).name() == "gloo" else "queue"
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._connected: set[tuple[int, int]] = set()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let NCCL make its communicator of each pair now, in one order: the first transfer of a pair waits for it."""
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
        """Start to send the tensors of a message."""
        for place, (value, tensor) in enumerate(zip(values, tensors, strict=True)):
            # What user code has moved to another device travels by that of the group.
            tensor = tensor.detach().to(self._device).resolve_conj().resolve_neg().contiguous()
            if value.dynamic:
                shape = [tensor.dim(), *tensor.shape] + [0] * (_MOST_DIMS - tensor.dim())
                self._start(torch.tensor(shape, device=self._device), peer, _tag(message, place, header=True))
            self._start(as_sent(tensor), peer, _tag(message, place))

    def _start(self, tensor: Tensor, peer: int, tag: int) -> None:
        # The group's own methods: torch.distributed.isend checks what is known here, for each tensor.
        self._under_way.append((self._group.send([tensor], peer, tag), tensor))
        while len(self._under_way) > _SENDS_IN_FLIGHT:
            self._await_oldest()

    def _await_oldest(self) -> None:
        work, _ = self._under_way.popleft()
        work.wait()

    def receive(self, message: Message, peer: int, values: Sequence[Value]) -> Incoming:
        """Post the receives of a message; one with a header is waited for (see ``program.lower``, ``post_ahead``)."""
        works, tensors = [], []
        for place, value in enumerate(values):
            shape: Sequence[int] = value.shape
            if value.dynamic:
                header = torch.empty(_MOST_DIMS + 1, dtype=torch.int64, device=self._device)
                self._post(header, peer, _tag(message, place, header=True)).wait()
                dims, *sizes = header.tolist()
                shape = sizes[:dims]
            tensor = torch.empty(shape, dtype=getattr(torch, value.dtype), device=self._device)
            works.append(self._post(as_sent(tensor), peer, _tag(message, place)))
            tensors.append(tensor)
        return _Posted(works, tensors, values)

    def _post(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        return self._group.recv([tensor], peer, tag)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._under_way:
            self._await_oldest()


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The fastest transport between the ranks of one pipeline; collective.

    Args:
        group: The ranks, by pipeline coordinate.
        device: Where tensors are received.
    """
    transfers = transfers_of(group) if device.type == "cpu" else None
    return GroupTransport(group, device) if transfers is None else HostTransport(transfers)


def _tag(message: Message, place: int, *, header: bool = False) -> int:
    """A number that two messages under way between the same two ranks never share."""
    tag = message.microbatch & 0x3FF
    for part, size in ((message.source, 0x40), (message.target, 0x40), (place, 0x100)):
        tag = tag * size + part % size
    return (tag * 2 + (message.direction == "backward")) * 2 + header & 0x7FFFFFFF
