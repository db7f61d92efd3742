"""Point-to-point transfers of tensors between ranks of one host, in memory that the sender owns and the receiver maps.

    sender: copy into a free block of its memory -> packet (tag, block, shape)
    receiver: read packets until the tag arrives -> copy out -> mark the block as free in its header

A send never waits: unread tensors take memory, as much as a schedule has messages in flight. Block sizes are powers of
two, so that blocks are reused whatever the next batch's length.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from math import prod
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.shared_memory.collectives import hidden_from_modes
from lightning_hybrid.shared_memory.sockets import PeerSockets, PerGroup, exchange_files

_SMALLEST_BLOCK = 4096  # bytes: a page
_HEADER = 64  # bytes of a block before its content, which say whether it is in use
_INITIAL_BYTES = 2**20
_MAX_PACKET_BYTES = 4096
_TAG = 2**62  # of rows of numbers; no other message has it
_MAX_CACHED_VIEWS = 1000  # limit of cached views, which may be unused where shapes vary


class Transfers:
    """Sends to, and receives from, the other ranks of a group; `transfers_of` makes one for each group.

    Attributes:
        generation: Incremented on all ranks before transfers that must not be mixed with those of a failed run.
    """

    def __init__(self, streams: PeerSockets) -> None:
        """Map the memory of all ranks, with the sockets between them; collective."""
        self._streams = streams
        self.generation = 0
        self._memories = {rank: _Memory(file) for rank, file in exchange_files(streams, _INITIAL_BYTES).items()}
        self._own = self._memories[streams.rank]
        # Makes a processor that reorders, such as ARM's, finish reading a block before it is marked as free.
        self._fence = threading.Lock()
        self._end = 0  # end of the memory that this rank has divided into blocks
        self._blocks: dict[int, list[int]] = {}  # by size
        # Offset in the sender's memory and shape of each tensor that has arrived; by peer, generation and tag.
        self._inbox: dict[tuple[int, int, int], deque[tuple[int, tuple[int, ...]]]] = {}

    @torch.compiler.disable  # the user may have compiled the code that calls it
    def renew(self) -> None:
        """Mix nothing that comes with what a failed run has left; on all ranks."""
        self.generation += 1

    def send(self, peer: int, tag: int, tensor: Tensor) -> None:
        """Send a tensor to a rank; it may be written as soon as this returns.

        Args:
            peer: The receiver.
            tag: Not negative; tensors of one tag arrive in the order in which they were sent.
            tensor: A CPU tensor of any shape.
        """
        block = self._free_block(tensor.nbytes)
        with hidden_from_modes():
            self._own.content(block, tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
        packet = struct.pack(f"={3 + tensor.dim()}q", tag, self.generation, block, *tensor.shape)
        while not self._streams.send_now(peer, packet):
            # The peer may wait for room too: its sends go on once its packets are read.
            for sender in self._streams.wait_for_room(peer):
                self._read_packet(sender)

    def has_arrived(self, peer: int, tag: int, *, milliseconds: int) -> bool:
        """Wait for the next tensor of one sender and tag for about so long; return whether `receive` need not wait."""
        while not self._inbox.get((peer, self.generation, tag)):
            if not self._streams.has_message(peer, milliseconds):
                return False
            self._read_packet(peer)
        return True

    @torch.compiler.disable
    def receive(self, peer: int, tag: int, dtype: torch.dtype) -> Tensor:
        """Wait for the next tensor of one sender and tag; returns a copy, of the shape that the message says.

        Raises:
            DistNetworkError: The rank has closed its connection.
            RuntimeError: The tensor does not arrive within the timeout of the group.
        """
        packets = self._inbox.setdefault((peer, self.generation, tag), deque())
        while not packets:
            self._read_packet(peer)
        block, shape = packets.popleft()
        memory = self._memories[peer]
        with hidden_from_modes():
            tensor = memory.content(block, shape, dtype).clone()
        with self._fence:
            memory.in_use[block // 8] = 0
        return tensor

    def _free_block(self, num_bytes: int) -> int:
        size = max(_SMALLEST_BLOCK, 1 << (num_bytes + _HEADER - 1).bit_length())
        blocks = self._blocks.setdefault(size, [])
        for block in blocks:
            if not self._own.in_use[block // 8]:
                break
        else:
            block = self._end
            self._end += size
            blocks.append(block)
            self._own.grow(self._end)
        self._own.in_use[block // 8] = 1
        return block

    def _read_packet(self, peer: int) -> None:
        text = self._streams.receive(peer, _MAX_PACKET_BYTES)
        tag, generation, block, *shape = struct.unpack(f"={len(text) // 8}q", text)
        self._inbox.setdefault((peer, generation, tag), deque()).append((block, tuple(shape)))


class _Memory:
    """The mapped memory of one rank.

    Attributes:
        in_use: The memory as integers of 8 bytes; the first one of a block is its in-use flag.
    """

    def __init__(self, file: int) -> None:
        """Take ``file`` (descriptor of the file to map; this object closes it)."""
        self._file = file
        finalize(self, os.close, file)
        self._map()

    def grow(self, num_bytes: int) -> None:
        """Grow to at least so many bytes."""
        if num_bytes > self._length:
            os.ftruncate(self._file, max(num_bytes, 2 * self._length))
            self._map()

    def content(self, block: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of the tensor in a block; cached by block, shape and dtype."""
        key = block, shape, dtype
        return self._contents[key] if key in self._contents else self._made(*key)

    @torch.inference_mode(False)  # the first use may be in an evaluation, and a later step writes to these tensors
    def _made(self, block: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin, count = block + _HEADER, prod(shape)
        if begin + count * dtype.itemsize > self._length:
            self._map()  # its owner has grown it
        if len(self._contents) >= _MAX_CACHED_VIEWS:
            self._contents.clear()
        flat = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=begin) if count else torch.empty(0)
        made = self._contents[block, shape, dtype] = flat.to(dtype).view(shape)
        return made

    def _map(self) -> None:
        self._length = os.fstat(self._file).st_size
        self._mapped = mmap.mmap(self._file, self._length)
        self.in_use = memoryview(self._mapped).cast("q")
        self._contents: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}


# The transfers between the ranks of a group, one for each; None on all of them where they cannot share memory.
# The first call is collective.
_transfers = PerGroup(Transfers)
transfers_of = _transfers.of


def discard_unread_transfers() -> None:
    """Discard what was sent and not received, in all groups; all ranks call it, and none sends meanwhile."""
    for transfers in _transfers.all():
        transfers.renew()


def start_all_gather(row: Tensor, group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start to all-gather rows of equal length; collective, in one order on all ranks.

    Args:
        row: This rank's row, flat; must not be written until it is gathered.
        group: The process group.

    Returns:
        A function that waits and returns the flat rows, by rank.
    """
    transfers = transfers_of(group) if row.device.type == "cpu" else None
    if transfers is None:
        rows = [torch.empty_like(row) for _ in range(group.size())]
        work = dist.all_gather(rows, row, group=group, async_op=True)

        def wait() -> list[Tensor]:
            """Returns the rows, of the shape of ``row``."""
            if work is not None:
                work.wait()
            return rows

        return wait
    peers = [None if rank == group.rank() else rank for rank in range(group.size())]
    for peer in peers:
        if peer is not None:
            transfers.send(peer, _TAG, row)
    return lambda: [row if peer is None else transfers.receive(peer, _TAG, row.dtype) for peer in peers]
