"""Unix sockets between the ranks of a group that are on one host.

They carry short messages and descriptors of anonymous files (memory that both ends map). If a rank dies, or closes its
end, ranks that wait for it get an error at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist

_SECONDS_TO_CONNECT = 60.0
_MOST_MILLISECONDS = 2**31 - 1  # that can be polled for
_FILE = b"file"
T = TypeVar("T")


class PeerSockets:
    """One rank's sockets to the other ranks of its group.

    Attributes:
        rank: This rank in its group.
        size: Number of ranks.
        peers: The socket to each of the other ranks; message boundaries are preserved.
        closed: Whether the sockets are closed.
        group: The process group; None until its object is made.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], timeout: float) -> None:
        """Take ``rank`` (this rank), ``peers`` (sockets by rank), ``timeout`` (seconds that each wait may take)."""
        self.rank, self.size, self.timeout = rank, len(peers) + 1, timeout
        self.peers = {peer: peers[peer] for peer in sorted(peers)}
        self.closed = False
        self.group: ReferenceType[dist.ProcessGroup] | None = None
        for stream in self.peers.values():
            # Timeouts of the kernel: Python's cost an additional system call before each operation.
            stream.settimeout(None)
            seconds = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def close(self) -> None:
        """Close the sockets, so that ranks that wait for this one get an error."""
        self.closed = True
        for stream in self.peers.values():
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)  # forked workers may keep it open
            stream.close()

    def send(self, peer: int, content: bytes, *files: int) -> None:
        """Send a short message to a rank, and file descriptors with it.

        Raises:
            DistNetworkError: The rank has closed its connection.
            RuntimeError: It has not read earlier messages within the timeout of the group.
        """
        try:
            if files:
                socket.send_fds(self.peers[peer], [content], files)
            else:
                self.peers[peer].send(content)
        except OSError as error:
            raise self._translated(error, peer) from error

    def send_now(self, peer: int, content: bytes) -> bool:
        """Send a short message to a rank unless that would block; return whether it was sent. Raises as ``send``."""
        try:
            self.peers[peer].send(content, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._translated(error, peer) from error
        return True

    def wait_for_room(self, peer: int) -> list[int]:
        """Wait until a rank can be sent to or any has sent a message; return the ranks that have sent one.

        Raises:
            RuntimeError: Neither happens within the timeout of the group.
        """
        poll, ranks = select.poll(), {stream.fileno(): rank for rank, stream in self.peers.items()}
        for file, rank in ranks.items():
            poll.register(file, select.POLLIN | (select.POLLOUT if rank == peer else 0))
        events = poll.poll(min(1000 * self.timeout, _MOST_MILLISECONDS))
        if not events:
            raise self._translated(BlockingIOError(), peer)
        return [ranks[file] for file, event in events if event != select.POLLOUT]

    def has_message(self, peer: int, milliseconds: int) -> bool:
        """Wait for a message of a rank for so long; return whether there is one, or the connection is closed."""
        poll = select.poll()
        poll.register(self.peers[peer].fileno(), select.POLLIN)
        return bool(poll.poll(milliseconds))

    def receive(self, peer: int, most: int) -> bytes:
        """Wait for a message of a rank, of at most so many bytes.

        Raises:
            DistNetworkError: The rank has closed its connection.
            RuntimeError: No message arrives within the timeout of the group.
        """
        try:
            content = self.peers[peer].recv(most)
        except OSError as error:
            raise self._translated(error, peer) from error
        if not content:
            raise _lost(peer)
        return content

    def receive_file(self, peer: int) -> int:
        """Wait for a message with a file descriptor, which the caller must close; raises as ``receive``."""
        try:
            _, files, *_ = socket.recv_fds(self.peers[peer], len(_FILE), 1)
        except OSError as error:
            raise self._translated(error, peer) from error
        if not files:
            raise _lost(peer)
        return files[0]

    def _translated(self, error: OSError, peer: int) -> RuntimeError:
        if not isinstance(error, BlockingIOError):
            return _lost(peer)
        return RuntimeError(
            f"rank {self.rank} of a group of {self.size} on this host has waited {self.timeout} s for rank {peer} of "
            "it; find out what delays that rank, or set Hybrid3DStrategy(timeout=...) to a longer time"
        )


def _lost(peer: int) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"rank {peer} of a group on this host has closed its connections")


def exchange_files(streams: PeerSockets, num_bytes: int) -> dict[int, int]:
    """Make an anonymous file on each rank and exchange the descriptors; collective. The caller must close them.

    Args:
        streams: The sockets between the ranks.
        num_bytes: Length of each file; pages that are never written need no memory.
    """
    own = os.memfd_create("lightning_hybrid")
    files = {streams.rank: own}
    os.ftruncate(own, num_bytes)
    for peer in streams.peers:
        streams.send(peer, _FILE, own)
    for peer in streams.peers:
        files[peer] = streams.receive_file(peer)
    return files


def close_peer_sockets(group: dist.ProcessGroup) -> None:
    """Close this rank's ends of all sockets between the ranks of a group."""
    for streams in _open.pop(group, []):
        streams.close()


_open: WeakKeyDictionary[dist.ProcessGroup, list[PeerSockets]] = WeakKeyDictionary()


class PerGroup(Generic[T]):
    """A cache of one shared object per process group, made again if its sockets were closed."""

    def __init__(self, make: Callable[[PeerSockets], T]) -> None:
        """Take ``make`` (makes the object; collective over the connected ranks)."""
        self._make = make
        self._made: WeakKeyDictionary[dist.ProcessGroup, tuple[PeerSockets, T] | None] = WeakKeyDictionary()

    def all(self) -> list[T]:
        """Return the objects of all groups."""
        return [made[1] for made in self._made.values() if made is not None]

    def of(self, group: dist.ProcessGroup) -> T | None:
        """Return the object of a group; the first call is collective.

        None on all ranks if it cannot be made on one: the ranks are on several hosts, have another backend than gloo,
        or another system than Linux.
        """
        made = self._made.get(group)
        if group not in self._made or (made is not None and made[0].closed):
            made = self._made[group] = _make_on_all_ranks(group, self._make)
            if made is not None:
                made[0].group = ref(group)
                _open.setdefault(group, []).append(made[0])
                # A forked process that ends must not close its parent's sockets.
                finalize(group, made[0].close).atexit = False
        return None if made is None else made[1]


def _make_on_all_ranks(group: dist.ProcessGroup, make: Callable[[PeerSockets], T]) -> tuple[PeerSockets, T] | None:
    """Make sockets between the ranks of a group and an object over them; None on all if one rank cannot."""
    if group.size() == 1 or dist.get_backend(group) != "gloo":
        return None
    address, host, listener = f"\0{uuid.uuid4()}", "", None
    with contextlib.suppress(OSError, AttributeError):  # not under Linux
        host, listener = _host(), _listen(address, group.size())
    try:
        offers = [("", "")] * group.size()
        dist.all_gather_object(offers, (host, address), group=group)
        hosts, addresses = zip(*offers, strict=True)
        if listener is None or len({*hosts}) > 1:
            return None
        made = _connected(group, listener, addresses, make)
    finally:
        if listener is not None:
            listener.close()
    answers = [False] * group.size()
    dist.all_gather_object(answers, made is not None, group=group)
    if made is not None and not all(answers):
        made[0].close()
        return None
    return made


def _connected(
    group: dist.ProcessGroup, listener: socket.socket, addresses: Sequence[str], make: Callable[[PeerSockets], T]
) -> tuple[PeerSockets, T] | None:
    backend: Any = group._get_backend(torch.device("cpu"))
    try:
        peers = _connect_to_peers(group.rank(), listener, addresses)
    except OSError:
        return None
    streams = PeerSockets(group.rank(), peers, backend.options._timeout.total_seconds())
    try:
        return streams, make(streams)
    except (OSError, RuntimeError):
        streams.close()  # so that the others do not wait for this rank
        return None


def _host() -> str:
    """An identifier that is equal for processes that can connect to each other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")


def _listen(address: str, backlog: int) -> socket.socket:
    listener = _socket()
    listener.bind(address)
    listener.listen(backlog)
    return listener


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_SECONDS_TO_CONNECT)
    return made


def _connect_to_peers(rank: int, listener: socket.socket, addresses: Sequence[str]) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    try:
        for peer, address in enumerate(addresses[:rank]):
            peers[peer] = _socket()
            peers[peer].connect(address)
            peers[peer].send(rank.to_bytes(4, "little"))
        for _ in addresses[rank + 1 :]:
            stream, _ = listener.accept()
            stream.settimeout(_SECONDS_TO_CONNECT)
            peers[int.from_bytes(stream.recv(4), "little")] = stream
    except OSError:
        for stream in peers.values():
            stream.close()
        raise
    return peers
