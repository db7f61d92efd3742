"""Tensors from one rank of a host to another, through memory that the sender owns and the receiver maps.

    sender: copy into a free place of its memory -> packet (tag, place, shape)
    receiver: read packets until the tag is there -> copy out -> say at the head of the place that it is free again

A send never waits: what is not yet read needs memory, as much as a schedule has messages under way. Places are as large
as the next power of two, so that a place serves again whatever the next batch's length.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections import deque
from math import prod
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.shared_memory.hidden_operations import hidden
from lightning_hybrid.shared_memory.streams import OfGroups, Streams, given_files

_SMALLEST_PLACE = 4096  # bytes: a page
_HEAD = 64  # bytes of a place before its content: whether it is in use
_FIRST_BYTES = 2**20
_MOST_PACKET_BYTES = 4096
_MOST_CONTENTS = 1000  # tensors that are kept although nobody asks for them, where shapes vary


class Transfers:
    """Sends to, and receives from, the other ranks of a group; one for each group, see `transfers_of`.

    Attributes:
        generation: Raised on all ranks alike before transfers that must not meet those of a run that failed.
    """

    def __init__(self, streams: Streams) -> None:
        """Collective: args: streams: between the ranks."""
        self._streams = streams
        self.generation = 0
        self._memories = {rank: _Memory(file) for rank, file in given_files(streams, _FIRST_BYTES).items()}
        self._own = self._memories[streams.rank]
        # Has a processor that reorders, such as ARM's, read a place before it says that the place is free.
        self._fence = threading.Lock()
        self._end = 0  # of what this rank has dealt out of its memory
        self._places: dict[int, list[int]] = {}  # by size
        # Where what has come begins in the sender's memory, and its shape; by peer, generation and tag.
        self._inbox: dict[tuple[int, int, int], deque[tuple[int, tuple[int, ...]]]] = {}

    @torch.compiler.disable  # the user may have compiled what waits for it
    def send(self, peer: int, tag: int, tensor: Tensor) -> None:
        """Give a tensor to a rank; afterwards it may be written.

        Args:
            peer: The rank.
            tag: Not negative; tensors of one tag arrive in the order in which they were sent.
            tensor: On the CPU.
        """
        place = self._free_place(tensor.nbytes)
        with hidden():
            self._own.content(place, tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
        packet = struct.pack(f"={3 + tensor.dim()}q", tag, self.generation, place, *tensor.shape)
        while not self._streams.send_now(peer, packet):
            # The peer may wait for room too: it has some once its packets are read.
            for sender in self._streams.wait_for_room(peer):
                self._read_packet(sender)

    @torch.compiler.disable
    def receive(self, peer: int, tag: int, dtype: torch.dtype) -> Tensor:
        """Wait for a tensor.

        Args:
            peer: Who sends it.
            tag: As it was sent.
            dtype: Of what is sent; the shape comes with it.

        Raises:
            DistNetworkError: The rank is gone.
            RuntimeError: It does not come within the timeout of the group.
        """
        come = self._inbox.setdefault((peer, self.generation, tag), deque())
        while not come:
            self._read_packet(peer)
        place, shape = come.popleft()
        memory = self._memories[peer]
        with hidden():
            tensor = memory.content(place, shape, dtype).clone()
        with self._fence:
            memory.in_use[place // 8] = 0
        return tensor

    def _free_place(self, num_bytes: int) -> int:
        size = max(_SMALLEST_PLACE, 1 << (num_bytes + _HEAD - 1).bit_length())
        places = self._places.setdefault(size, [])
        for place in places:
            if not self._own.in_use[place // 8]:
                break
        else:
            place = self._end
            self._end += size
            places.append(place)
            self._own.grow(self._end)
        self._own.in_use[place // 8] = 1
        return place

    def _read_packet(self, peer: int) -> None:
        text = self._streams.receive(peer, _MOST_PACKET_BYTES)
        tag, generation, place, *shape = struct.unpack(f"={len(text) // 8}q", text)
        self._inbox.setdefault((peer, generation, tag), deque()).append((place, tuple(shape)))


class _Memory:
    """The memory of one rank.

    Attributes:
        in_use: Its numbers of 8 bytes; those at the head of a place say whether it is.
    """

    def __init__(self, file: int) -> None:
        """Args: file: to map; is this object's from now on."""
        self._file = file
        finalize(self, os.close, file)
        self._map()

    def grow(self, num_bytes: int) -> None:
        """Have at least so many bytes."""
        if num_bytes > self._length:
            os.ftruncate(self._file, max(num_bytes, 2 * self._length))
            self._map()

    def content(self, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at a place; the same one as before where it is asked for again."""
        key = place, shape, dtype
        found = self._contents.get(key)
        return self._made(key) if found is None else found

    @torch.inference_mode(False)  # an evaluation may run in it, and a later step writes to these tensors
    def _made(self, key: tuple[int, tuple[int, ...], torch.dtype]) -> Tensor:
        place, shape, dtype = key
        begin, count = place + _HEAD, prod(shape)
        if begin + count * dtype.itemsize > self._length:
            self._map()  # its owner has let it grow
        if len(self._contents) >= _MOST_CONTENTS:
            self._contents.clear()
        flat = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=begin) if count else torch.empty(0)
        made = self._contents[key] = flat.to(dtype).view(shape)
        return made

    def _map(self) -> None:
        self._length = os.fstat(self._file).st_size
        self._mapped = mmap.mmap(self._file, self._length)
        self.in_use = memoryview(self._mapped).cast("q")
        self._contents: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}


def transfers_of(group: dist.ProcessGroup) -> Transfers | None:
    """Transfers between the ranks of a group; None on all of them where they cannot share memory.

    One for each group, whose first use is collective.
    """
    return _transfers.of(group)


_transfers = OfGroups(Transfers)
