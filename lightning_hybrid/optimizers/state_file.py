"""A memory-mapped file of optimizer states, or of parameters between steps, with a few layers in memory at a time.

    step of layer 0   | layer 1 is read ahead
    step of layer 1   | layer 2 is read ahead, layer 0 is evicted (the system writes it back)
    ...

The file is unlinked: it takes space in its folder while the process lives, and no other process can change it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hybrid.errors import OffloadError
from lightning_hybrid.text import sized

_PAGE = mmap.ALLOCATIONGRANULARITY
_POPULATE_WRITE = 23  # Linux 5.14: one call faults all pages in, which is faster than one by one

_FILES: weakref.WeakSet[StateFile] = weakref.WeakSet()


HOST = torch.device("cpu")


def check_mount(what: str, folder: str | Path) -> None:
    """Check that an absolute path begins with a folder that exists: without its disk, files would fill the system's.

    Raises:
        OffloadError: It does not; ``what`` names the option.
    """
    first = Path(*Path(folder).parts[:2])
    if first.is_absolute() and not first.exists():
        raise OffloadError(f"{what}: {first} does not exist; mount the disk, or make the folder", entry="offload-mount")


class StateFile:
    """One file of several regions, each with a mapping of its own.

    Attributes:
        folder: The folder whose disk it uses.
        nbytes: Its length.
        maps: The mapping of each region.
    """

    def __init__(self, folder: str, sizes: Iterable[int], *, content: str = "the optimizer's states") -> None:
        """Reserve the space.

        ``sizes`` are the bytes of each region; ``content`` is in words, for messages.

        Raises:
            OffloadError: The folder cannot be written, or has no room, or is on a disk that is not mounted.
        """
        check_mount(f"offload to {folder!r}", folder)
        self.folder, self._content = folder, content
        self.nbytes = 0
        self.maps: list[mmap.mmap] = []
        _FILES.add(self)
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed in `close`)
        except OSError as error:
            raise OffloadError(
                f"offload to {folder!r}: it cannot be written ({error}); name another folder", entry="offload-write"
            ) from error
        try:
            self.extend(sizes)
        except OffloadError:
            self._file.close()
            raise

    def extend(self, sizes: Iterable[int]) -> None:
        """Reserve space for further regions of these numbers of bytes.

        Raises:
            OffloadError: There is no room; the file is as before.
        """
        lengths = [max(_PAGE, -(-size // _PAGE) * _PAGE) for size in sizes]
        start, end = self.nbytes, self.nbytes + sum(lengths)
        try:
            os.posix_fallocate(self._file.fileno(), start, max(end - start, 1))
        except OSError as error:
            os.ftruncate(self._file.fileno(), start)
            free = shutil.disk_usage(self.folder).free
            raise OffloadError(
                f"offload to {self.folder!r}: {self._content} of this rank take {sized(end)}, and"
                f" {sized(free)} are free there ({error}); name another folder, or use more replicas with"
                " zero_stage=1 or higher",
                entry="offload-write",
            ) from error
        self.nbytes = end
        for length in lengths:
            self.maps.append(mmap.mmap(self._file.fileno(), length, offset=start))
            start += length

    def check(self) -> None:
        """Check that the file has not been truncated: reading past its end would kill the process."""
        if not self.is_complete:
            raise OffloadError(
                f"the file with {self._content} in {self.folder!r} has {self._length} bytes where {self.nbytes} were"
                " reserved: it has been truncated; continue from the latest checkpoint",
                entry="offload-truncated",
            )

    @property
    def is_complete(self) -> bool:
        """Whether the file still has its full length."""
        return self._length >= self.nbytes

    @property
    def _length(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def regions(self) -> list[Region]:
        """All regions, in order."""
        return [Region(self, number) for number in range(len(self.maps))]

    def close(self) -> None:
        """Close the file; tensors in it stay readable as long as they live."""
        self.maps = []
        self._file.close()


def is_in_state_file(address: int) -> bool:
    """Whether the memory at an address of this process belongs to a state file."""
    maps = (torch.frombuffer(mapped, dtype=torch.uint8) for file in _FILES for mapped in file.maps)
    return any(0 <= address - mapped.data_ptr() < mapped.nbytes for mapped in maps)


class Region(NamedTuple):
    """One region of a file."""

    file: StateFile
    number: int

    def tensor(self, offset: int, like: Tensor) -> Tensor:
        """A tensor of the shape and dtype of another one, whose memory is the mapped file.

        ``offset`` is in bytes, a multiple of 16.
        """
        mapped = self.file.maps[self.number]
        content = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=offset)
        return content.view(like.shape)

    def read_ahead(self) -> None:
        """Begin to read it (``MADV_WILLNEED``)."""
        self.file.maps[self.number].madvise(mmap.MADV_WILLNEED)

    def load(self) -> None:
        """Read it into memory."""
        try:
            self.file.maps[self.number].madvise(_POPULATE_WRITE)
        except OSError:  # an older system faults the pages in as they are touched
            self.read_ahead()

    def evict(self) -> None:
        """Evict it from this process's memory; its content stays in the file."""
        self.file.maps[self.number].madvise(mmap.MADV_DONTNEED)


def aligned(nbytes: int) -> int:
    """The next multiple of 16 bytes: where a further tensor may begin."""
    return -(-nbytes // 16) * 16


def state_tensors(entry: Any) -> dict[str, Tensor]:
    """The tensors of one parameter's optimizer state that go to a file: of any shape with more than one element."""
    if not isinstance(entry, dict):
        return {}
    return {name: value for name, value in entry.items() if isinstance(value, Tensor) and value.numel() > 1}
