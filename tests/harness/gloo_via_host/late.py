"""Process groups of `harness.gloo_via_host` on the CPU, also over copies and a current stream that run late.

with over_the_host():            every group made inside, the world's among them
    fit(run)
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.gloo_via_host.copies import Copies, HostCopies, below_modes, copies_of
from harness.gloo_via_host.group import GlooViaHost

NAME = "via_host_of_tests"


def register(make_copies: Callable[[torch.device], Copies[Any]] = copies_of, name: str = NAME) -> str:
    """Register the backend for CPU tensors under a name, which is returned; once per process and name."""
    if name not in dist.Backend.backend_list:

        def make(store: Any, rank: int, size: int, timeout: Any) -> GlooViaHost:
            return GlooViaHost(store, rank, size, timeout, device_type="cpu", make_copies=make_copies)

        dist.Backend.register_backend(name, make, devices=["cpu"])
    return name


@contextlib.contextmanager
def over_the_host() -> Iterator[None]:
    """Replace the world's process group by one of the backend."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("via_host", dist.distributed_c10d._get_default_store())
    dist.barrier()  # the others may be connecting still
    dist.destroy_process_group()
    dist.init_process_group(register(), rank=rank, world_size=size, store=store)
    yield


class LateEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self.query, self.synchronize, self.set = self._reached.is_set, self._reached.wait, self._reached.set


class LateStream:
    """Runs functions in order, in a thread; each begins some milliseconds late."""

    def __init__(self, seconds: float = 0.005) -> None:
        self._seconds = seconds
        self._queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            function = self._queue.get()
            time.sleep(self._seconds)
            with below_modes():
                function()

    def enqueue(self, function: Callable[[], Any]) -> None:
        self._queue.put(function)

    def record(self) -> LateEvent:
        event = LateEvent()
        self.enqueue(event.set)
        return event

    def wait(self, event: LateEvent) -> None:
        self.enqueue(event.synchronize)

    def synchronize(self) -> None:
        assert self.record().synchronize(20)


class LateCopies(Copies[LateEvent]):
    """Copies on streams that run late, as the current stream does. New host memory has other values."""

    def __init__(self) -> None:
        self.current, self._to_host, self._from_host = (LateStream() for _ in range(3))

    def mark(self) -> LateEvent:
        return self.current.record()

    def host_memory(self, like: Tensor) -> Tensor:
        return HostCopies().host_memory(like).fill_(77)

    def to_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor], mark: LateEvent) -> LateEvent:
        return self._copy(self._to_host, sources, targets, mark)

    def from_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor], mark: LateEvent) -> LateEvent:
        return self._copy(self._from_host, sources, targets, mark)

    def _copy(
        self, stream: LateStream, sources: Sequence[Tensor], targets: Sequence[Tensor], mark: LateEvent
    ) -> LateEvent:
        stream.wait(mark)
        for source, target in zip(sources, targets, strict=True):
            stream.enqueue(lambda source=source, target=target: target.copy_(source))
        return stream.record()

    def order_current_stream(self, event: LateEvent) -> None:
        self.current.wait(event)
