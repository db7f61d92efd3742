"""A memory-mapped file of optimizer states, or of parameters between steps, with a few layers in memory at a time.

    step of layer 0   | layer 1 is read ahead
    step of layer 1   | layer 2 is read ahead, layer 0 is evicted (the system writes it back)
    ...

The file is unlinked: it takes space in its folder while the process lives, and no other process can change it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PAGE = mmap.ALLOCATIONGRANULARITY
_POPULATE_WRITE = 23  # Linux 5.14: one call faults all pages in, which is faster than one by one


class OffloadError(OSError):
    """The file for offloaded states cannot be created, or has been truncated."""


class StateFile:
    """One file of several regions, each with a mapping of its own.

    Attributes:
        folder: The folder whose disk it uses.
    """

    def __init__(self, folder: str, sizes: Iterable[int], *, content: str = "the optimizer's states") -> None:
        """Reserve the space.

        Args:
            folder: Created if it does not exist.
            sizes: Bytes of each region.
            content: Its content in words, for messages.

        Raises:
            OffloadError: The folder cannot be written, or has no room.
        """
        self.folder, self._content = folder, content
        self.nbytes = 0
        self._maps: list[mmap.mmap] = []
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed in `close`)
        except OSError as error:
            raise OffloadError(f"offload to {folder!r}: it cannot be written ({error}); name another folder") from error
        try:
            self.extend(sizes)
        except OffloadError:
            self._file.close()
            raise

    def extend(self, sizes: Iterable[int]) -> int:
        """Reserve space for further regions.

        Args:
            sizes: Bytes of each.

        Returns:
            The number of the first one.

        Raises:
            OffloadError: There is no room; the file is as before.
        """
        lengths = [max(_PAGE, -(-size // _PAGE) * _PAGE) for size in sizes]
        first, start, end = len(self._maps), self.nbytes, self.nbytes + sum(lengths)
        try:
            os.posix_fallocate(self._file.fileno(), start, max(end - start, 1))
        except OSError as error:
            os.ftruncate(self._file.fileno(), start)
            free = shutil.disk_usage(self.folder).free
            raise OffloadError(
                f"offload to {self.folder!r}: {self._content} of this rank take {end / 2**20:,.1f} MiB, and"
                f" {free / 2**20:,.1f} MiB are free there ({error}); name another folder, or use more replicas with"
                " zero_stage=1 or higher"
            ) from error
        self.nbytes = end
        for length in lengths:
            self._maps.append(mmap.mmap(self._file.fileno(), length, offset=start))
            start += length
        return first

    def tensor(self, region: int, offset: int, like: Tensor) -> Tensor:
        """A tensor in a region, of the shape and dtype of another one; its memory is the mapped file.

        Args:
            region: Number of the region.
            offset: Bytes from its start; a multiple of 16.
            like: The other tensor.
        """
        content = torch.frombuffer(self._maps[region], dtype=like.dtype, count=like.numel(), offset=offset)
        return content.view(like.shape)

    def check(self) -> None:
        """Check that the file has not been truncated: reading past its end would kill the process.

        Raises:
            OffloadError: It has been.
        """
        if not self.is_complete:
            raise OffloadError(
                f"the file with {self._content} in {self.folder!r} has {self._length} bytes where {self.nbytes} were"
                " reserved: it has been truncated; go on from the latest checkpoint"
            )

    @property
    def is_complete(self) -> bool:
        """Whether the file still has its full length."""
        return self._length >= self.nbytes

    @property
    def _length(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read_ahead(self, region: int) -> None:
        """Begin to read a region (``MADV_WILLNEED``)."""
        self._maps[region].madvise(mmap.MADV_WILLNEED)

    def load(self, region: int) -> None:
        """Read a region into memory."""
        try:
            self._maps[region].madvise(_POPULATE_WRITE)
        except OSError:  # an older system faults the pages in as they are touched
            self._maps[region].madvise(mmap.MADV_WILLNEED)

    def evict(self, region: int) -> None:
        """Evict a region from this process's memory; its content stays in the file."""
        self._maps[region].madvise(mmap.MADV_DONTNEED)

    def resident_bytes(self) -> int:
        """Bytes of the file in this process's memory; 0 where the system does not report it."""
        return sum(_resident_bytes(mapped) for mapped in self._maps)

    def close(self) -> None:
        """Close the file; tensors in it stay readable as long as they live."""
        self._maps = []
        self._file.close()


class Region(NamedTuple):
    """One region of a file."""

    file: StateFile
    number: int

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """Delegate to ``StateFile.tensor``."""
        return self.file.tensor(self.number, offset, like)

    def read_ahead(self) -> None:
        """Begin to read it."""
        self.file.read_ahead(self.number)

    def evict(self) -> None:
        """Evict it from this process's memory."""
        self.file.evict(self.number)


def _resident_bytes(mapped: mmap.mmap) -> int:
    """Bytes of a mapping in the memory of this process, by /proc/self/pagemap: quick in a large process too."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    pages = array("Q")
    try:
        with open("/proc/self/pagemap", "rb") as of_process:
            of_process.seek(start // mmap.PAGESIZE * pages.itemsize)
            pages.frombytes(of_process.read(len(mapped) // mmap.PAGESIZE * pages.itemsize))
    except OSError:
        return 0
    return sum(page >> 63 for page in pages) * mmap.PAGESIZE  # the highest bit: it is present


def aligned(nbytes: int) -> int:
    """The next multiple of 16 bytes: where a further tensor may begin."""
    return -(-nbytes // 16) * 16


def state_tensors(entry: Any) -> dict[str, Tensor]:
    """The tensors of an optimizer's state for one parameter that go to a file: those of more than one number."""
    if not isinstance(entry, dict):
        return {}
    return {name: value for name, value in entry.items() if isinstance(value, Tensor) and value.numel() > 1}
