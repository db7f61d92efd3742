"""Where saved tensors go: pinned host memory, on side streams, or a file, written and read by threads.

Both are fetched ahead of their use. The file of a rank has no name once it is open, so that nothing stays of it after
the process. Its space is reused.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import OffloadError
from lightning_hybrid.host_copies import HostCopies
from lightning_hybrid.memory.saved_activations.storage import OnDevice, Unchanged
from lightning_hybrid.optimizers.state_file import check_mount

_MOST_UNWRITTEN = 64 << 20  # of tensors that are yet to be written, and in memory so long
_NUM_THREADS = 2
_MOST_UNCOPIED = 256 << 20  # whose copies may still run while their device memory is held


class CpuTensor(OnDevice):
    """One tensor of the CPU, in its own memory."""

    def __init__(self, tensor: Tensor, original: Tensor) -> None:
        super().__init__(tensor)
        self.unchanged = Unchanged(original)

    def bytes_on_host(self) -> Tensor:
        """Returns it on the host, of shape (n,)."""
        return self._tensor

    def was_written(self) -> None:
        """Notes that there is a copy of it."""
        self.unchanged.seal()


class InPlace:
    """The memory of the CPU, from which a file is written and to which it is read."""

    def put(self, tensor: Tensor, original: Tensor) -> OnDevice:
        """Starts to move a tensor of shape (n,).

        ``original`` is a tensor in the same memory, of any shape: it must not be written to before that has ended.
        """
        return CpuTensor(tensor, original)


class ActivationFile(InPlace):
    """The file of one rank."""

    def __init__(self, folder: str | Path, host: InPlace | None = None) -> None:
        """Creates the file, or raises an `OffloadError`; ``host`` copies from and to a device that is not the CPU."""
        check_mount(f"ActivationOffload(to='disk:{folder}')", folder)
        host = host or InPlace()
        self._host, self._folder = host, folder
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise OffloadError(
                f"ActivationOffload(to='disk:{folder}'): it cannot be written ({error}); name another folder",
                entry="activation-offload-write",
            ) from error
        self._writers = ThreadPoolExecutor(_NUM_THREADS, "write activations")
        self._readers = ThreadPoolExecutor(_NUM_THREADS, "read activations")
        self._free: dict[int, list[int]] = defaultdict(list)  # offsets of free regions, by size
        self._lock, self._end = threading.Lock(), 0
        self._pending: deque[FileTensor] = deque()
        self._pending_bytes = 0

    def put(self, tensor: Tensor, original: Tensor) -> FileTensor:
        """Starts to write a tensor of shape (n,); waits where too many bytes are yet to be written."""
        saved = FileTensor(self, self._host.put(tensor, original), tensor)
        saved.writing = self._writers.submit(saved.write)
        self._pending.append(saved)
        self._pending_bytes += saved.nbytes
        while self._pending and (self._pending_bytes > _MOST_UNWRITTEN or self._pending[0].writing.done()):
            written = self._pending.popleft()
            self._pending_bytes -= written.nbytes
            written.wait_until_written()
        return saved

    def drain(self) -> None:
        """Waits for all writes."""
        while self._pending:
            self._pending.popleft().wait_until_written()
        self._pending_bytes = 0

    def reserve(self, nbytes: int) -> tuple[int, int]:
        """Reserves a region; returns its offset and size: at most an eighth larger, so that few sizes are reused."""
        grain = 1 << max(12, nbytes.bit_length() - 4)
        size = -(-nbytes // grain) * grain
        with self._lock:
            if self._free[size]:
                return self._free[size].pop(), size
            self._end += size
            return self._end - size, size

    def free(self, offset: int, size: int) -> None:
        """Makes a region free."""
        with self._lock:
            self._free[size].append(offset)

    def write(self, content: Tensor, offset: int) -> None:
        """Writes a tensor of shape (n,) in host memory."""
        view = _bytes_of(content)
        try:
            while len(view):
                done = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise OffloadError(
                f"ActivationOffload(to='disk:{self._folder}'): {len(view)} bytes cannot be written ({error}); free"
                " space there, name another folder, or set a smaller fraction",
                entry="activation-offload-write",
            ) from error

    def read(self, content: Tensor, offset: int) -> Tensor:
        """Reads into a tensor of shape (n,) in host memory, and returns it."""
        view = _bytes_of(content)
        while len(view):
            done = os.preadv(self._file.fileno(), [view], offset)
            if done <= 0:
                raise OffloadError(
                    f"ActivationOffload(to='disk:{self._folder}'): {len(view)} bytes are missing in its file, which was"
                    " truncated; continue from the latest checkpoint",
                    entry="activation-offload-write",
                )
            view, offset = view[done:], offset + done
        return content

    def submit_read(self, tensor: FileTensor) -> Future[Tensor]:
        """Starts to read a tensor of shape (n,) into host memory."""
        return self._readers.submit(tensor.read)

    def close(self) -> None:
        """Ends the threads, and gives the space back."""
        self._writers.shutdown(wait=True, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._file.close()


class FileTensor(OnDevice):
    """One tensor in the file, or on its way there."""

    writing: Future[None]

    def __init__(self, file: ActivationFile, source: Any, tensor: Tensor) -> None:
        self._file, self._device = file, tensor.device
        self._dtype, self._length, self.nbytes = tensor.dtype, len(tensor), tensor.nbytes
        self._source: CpuTensor | None = source  # until it is written
        self._unchanged = source.unchanged
        self._region: tuple[int, int] | None = None
        self._reading: Future[Tensor] | None = None

    def write(self) -> None:
        """Writes it; in a thread of the file."""
        source = self._source
        assert source is not None
        offset, size = self._file.reserve(self.nbytes)
        try:
            self._file.write(source.bytes_on_host(), offset)
        except BaseException:
            self._file.free(offset, size)
            raise
        source.was_written()
        self._region, self._source = (offset, size), None

    def wait_until_written(self) -> None:
        """Waits for the write, and raises its error."""
        if not self.writing.cancelled():
            self.writing.result()

    def prefetch(self) -> None:
        """Starts to read it, if it has been written."""
        if self._reading is None and self._source is None:
            self._reading = self._file.submit_read(self)

    def read(self) -> Tensor:
        """Reads it into host memory, as a tensor of shape (n,); in a thread of the file."""
        assert self._region is not None
        pinned = self._device.type == "cuda"
        return self._file.read(torch.empty(self._length, dtype=self._dtype, pin_memory=pinned), self._region[0])

    def get(self) -> Tensor:
        """Returns it on its device, of shape (n,); what has not been written yet comes from memory."""
        self.writing.cancel()
        if self.writing.done():
            self.wait_until_written()
        source = self._source
        self._unchanged.check()
        if source is not None:
            return source.get()
        self.prefetch()
        assert self._reading is not None
        host = self._reading.result()
        return host if self._device.type == "cpu" else host.to(self._device, non_blocking=True)

    def release(self) -> None:
        """Makes its region of the file free; it is not needed any more."""
        if not self.writing.cancel() and not self.writing.done():
            self.writing.add_done_callback(lambda _: self._free())
        else:
            self._free()

    def _free(self) -> None:
        reading = self._reading
        if reading is not None and not reading.cancel() and not reading.done():
            reading.add_done_callback(lambda _: self._free())
            return
        region, self._region = self._region, None
        if region is not None:
            self._file.free(*region)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a tensor of shape (n,) on the host."""
    content: Any = tensor.view(torch.uint8).numpy()
    return memoryview(content)


class HostMemory(InPlace):
    """Moves tensors of one CUDA device to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, HostCopies(device)
        self._pending: deque[HostTensor] = deque()  # whose device memory is held, as their copies run
        self._pending_bytes = 0

    def put(self, tensor: Tensor, original: Tensor) -> HostTensor:
        """Starts to copy a tensor of shape (n,); its memory is free on the compute stream after that."""
        [host], copied = self._copies.to_host([tensor])
        saved = HostTensor(tensor, original, self, host, copied)
        self._pending.append(saved)
        self._pending_bytes += tensor.nbytes
        self._free_copied()
        return saved

    def _free_copied(self) -> None:
        """Frees the device memory of what has been copied, and of the oldest where too many bytes are pending."""
        while self._pending and (self._pending_bytes > _MOST_UNCOPIED or self._pending[0].copied.query()):
            first = self._pending.popleft()
            # The compute stream waits, not the host: memory that it allocates from now on may be the source's.
            torch.cuda.current_stream(self._device).wait_event(first.copied)
            self._pending_bytes -= first.host.nbytes
            first.drop_source()

    def take(self, host: Tensor, copied: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        """Starts to copy a tensor of shape (n,) to the device; returns it, and the event of its arrival."""
        self._free_copied()
        return self._copies.to_device(host, copied)


class HostTensor(CpuTensor):
    """One tensor in host memory, or on its way there."""

    def __init__(
        self, source: Tensor, original: Tensor, memory: HostMemory, host: Tensor, copied: torch.cuda.Event
    ) -> None:
        super().__init__(host, original)
        self.host, self.copied, self._memory = host, copied, memory
        self._source: Tensor | None = source
        self._fetched: tuple[Tensor, torch.cuda.Event] | None = None

    def drop_source(self) -> None:
        """Drops the tensor on the device: its copy is complete for work on the compute stream."""
        self._source = None
        self.unchanged.seal()

    def prefetch(self) -> None:
        """Starts to copy it to the device, if it has left it."""
        if self._fetched is None and self._source is None:
            self._fetched = self._memory.take(self.host, self.copied)

    def get(self) -> Tensor:
        """Returns it on the device, of shape (n,), for work on the current stream."""
        self.unchanged.check()
        if self._source is not None:
            return self._source
        self.prefetch()
        assert self._fetched is not None
        tensor, event = self._fetched
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
        return tensor

    def bytes_on_host(self) -> Tensor:
        """Waits for the copy; returns the host's tensor, of shape (n,)."""
        self.copied.synchronize()
        return self.host

    def was_written(self) -> None:
        """Does nothing: its content is on the host, and nothing writes to that."""
