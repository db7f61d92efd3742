"""Unix sockets between the ranks of a group that are on one host.

They carry short messages and files without a name (memory that both ends map). A rank that dies, or closes its end, is
noticed by whoever waits for it at once.
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
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

_SECONDS_TO_CONNECT = 60.0
_MOST_MILLISECONDS = 2**31 - 1  # that can be polled for
_FILE = b"file"
T = TypeVar("T")


class Streams:
    """One rank's ends.

    Attributes:
        rank: This one, in its group.
        size: How many there are.
        peers: The stream to each of the others; what is sent at once arrives at once.
        timeout: In seconds, of each wait.
        closed: Whether nothing can be sent any more.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], timeout: float) -> None:
        """Args: rank: this one. peers: by rank. timeout: in seconds, of each wait."""
        self.rank, self.size, self.timeout = rank, len(peers) + 1, timeout
        self.peers = {peer: peers[peer] for peer in sorted(peers)}
        self.closed = False
        for stream in self.peers.values():
            # The kernel's own timeouts: Python's cost a system call before each one.
            stream.settimeout(None)
            seconds = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def close(self) -> None:
        """Have whoever waits for this rank get an error."""
        self.closed = True
        for stream in self.peers.values():
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)  # also for the workers that were forked and hold it open
            stream.close()

    def send(self, peer: int, content: bytes, *files: int) -> None:
        """Send a short message to a rank, and files with it.

        Raises:
            DistNetworkError: The rank is gone.
            RuntimeError: It has not read what it was sent within the timeout of the group.
        """
        try:
            if files:
                socket.send_fds(self.peers[peer], [content], files)
            else:
                self.peers[peer].send(content)
        except OSError as error:
            raise self._meaning(error, peer) from error

    def send_now(self, peer: int, content: bytes) -> bool:
        """Send a short message to a rank unless that needs waiting, and say whether; raises as ``send`` does."""
        try:
            self.peers[peer].send(content, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._meaning(error, peer) from error
        return True

    def wait_for_room(self, peer: int) -> list[int]:
        """Wait until something can be sent to a rank or was sent by any; the ranks that have sent something.

        Raises:
            RuntimeError: Neither comes within the timeout of the group.
        """
        poll, ranks = select.poll(), {stream.fileno(): rank for rank, stream in self.peers.items()}
        for file, rank in ranks.items():
            poll.register(file, select.POLLIN | (select.POLLOUT if rank == peer else 0))
        events = poll.poll(min(1000 * self.timeout, _MOST_MILLISECONDS))
        if not events:
            raise self._meaning(BlockingIOError(), peer)
        return [ranks[file] for file, event in events if event != select.POLLOUT]

    def receive(self, peer: int, most: int) -> bytes:
        """Wait for a message of a rank.

        Args:
            peer: The rank.
            most: Bytes that it may have.

        Raises:
            DistNetworkError: The rank is gone.
            RuntimeError: It does not come within the timeout of the group.
        """
        try:
            content = self.peers[peer].recv(most)
        except OSError as error:
            raise self._meaning(error, peer) from error
        if not content:
            raise _lost(peer)
        return content

    def receive_file(self, peer: int) -> int:
        """Wait for a message that brings a file, which is the caller's then; raises as ``receive`` does."""
        try:
            _, files, *_ = socket.recv_fds(self.peers[peer], len(_FILE), 1)
        except OSError as error:
            raise self._meaning(error, peer) from error
        if not files:
            raise _lost(peer)
        return files[0]

    def _meaning(self, error: OSError, peer: int) -> RuntimeError:
        if not isinstance(error, BlockingIOError):
            return _lost(peer)
        return RuntimeError(
            f"rank {self.rank} of a group of {self.size} on this host has waited {self.timeout} s for rank {peer} of "
            "it; see what keeps that one, or set Hybrid3DStrategy(timeout=...) to a longer time"
        )


def _lost(peer: int) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"rank {peer} of a group on this host has closed its connections")


def given_files(streams: Streams, num_bytes: int) -> dict[int, int]:
    """A file without a name from each rank, this one's own included, by rank; collective. Whoever asks closes them.

    Args:
        streams: Between the ranks.
        num_bytes: How long they are; what nobody writes to needs no memory.
    """
    own = os.memfd_create("lightning_hybrid")
    files = {streams.rank: own}
    os.ftruncate(own, num_bytes)
    for peer in streams.peers:
        streams.send(peer, _FILE, own)
    for peer in streams.peers:
        files[peer] = streams.receive_file(peer)
    return files


def close_streams(group: dist.ProcessGroup) -> None:
    """Close this rank's ends of all streams between the ranks of a group."""
    for streams in _open.pop(group, []):
        streams.close()


_open: WeakKeyDictionary[dist.ProcessGroup, list[Streams]] = WeakKeyDictionary()


class OfGroups(Generic[T]):
    """What the ranks of a group have together, made once for each group; anew where its streams were closed."""

    def __init__(self, make: Callable[[Streams], T]) -> None:
        """Args: make: collective over the ranks that some streams connect."""
        self._make = make
        self._made: WeakKeyDictionary[dist.ProcessGroup, tuple[Streams, T] | None] = WeakKeyDictionary()

    def of(self, group: dist.ProcessGroup) -> T | None:
        """That of a group; collective where it is asked for first.

        None on all ranks of it if one cannot: they are on several hosts, communicate by something else than gloo, or
        have a system other than Linux.
        """
        made = self._made.get(group)
        if group not in self._made or (made is not None and made[0].closed):
            made = self._made[group] = _agreed(group, self._make)
            if made is not None:
                _open.setdefault(group, []).append(made[0])
                # A forked process that ends must not close what its parent has.
                finalize(group, made[0].close).atexit = False
        return None if made is None else made[1]


def _agreed(group: dist.ProcessGroup, make: Callable[[Streams], T]) -> tuple[Streams, T] | None:
    """What is made over streams between the ranks of a group, and these; None on all if it cannot be made on one."""
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
    group: dist.ProcessGroup, listener: socket.socket, addresses: Sequence[str], make: Callable[[Streams], T]
) -> tuple[Streams, T] | None:
    backend: Any = group._get_backend(torch.device("cpu"))
    try:
        peers = _join(group.rank(), listener, addresses)
    except OSError:
        return None
    streams = Streams(group.rank(), peers, backend.options._timeout.total_seconds())
    try:
        return streams, make(streams)
    except (OSError, RuntimeError):
        streams.close()  # so that the others do not wait for this rank
        return None


def _host() -> str:
    """Processes for which this is the same can connect to each other."""
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


def _join(rank: int, listener: socket.socket, addresses: Sequence[str]) -> dict[int, socket.socket]:
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
