"""Operations of gloo whose inputs are still being copied to the host: started in order of call, by one thread."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from harness.gloo_via_host.copies import Event

_NO_TIMEOUT = timedelta()


class StagedWork(dist.Work):
    """One operation: copy its inputs to the host, run it over gloo, copy its outputs to the device.

    As with gloo's own work, the host waits in ``wait`` until the ranks have communicated; then the current stream waits
    for the outputs. They are copied once ``wait`` or ``is_completed`` finds that gloo is done.
    """

    def __init__(
        self,
        copied: Event,
        start: Callable[[], Any],
        copy_back: Callable[[], Event],
        order_current_stream: Callable[[Any], None],
        result: Any,
    ) -> None:
        """Take the parts of an operation.

        Args:
            copied: The inputs are on the host.
            start: Starts the operation of gloo, and returns its work.
            copy_back: Begins to copy outputs to the device; returns the event of their arrival.
            order_current_stream: Lets the current stream wait for that event.
            result: The tensors that ``result`` returns.
        """
        super().__init__()
        self._copied, self._start, self._copy_back = copied, start, copy_back
        self._order_current_stream, self._result = order_current_stream, result
        self._started, self._lock = threading.Event(), threading.Lock()
        self._gloo: Any = None
        self._arrived: Event | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Wait for the inputs, then start the operation of gloo; called by the thread that starts all of them."""
        try:
            self._copied.synchronize()
            self._gloo = self._start()
        except BaseException as error:
            self._error = error
        del self._start
        self._started.set()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait on the host for gloo, and let the current stream wait for the outputs.

        Raises:
            RuntimeError: The operation has failed, or the timeout has passed.
        """
        self._finish(timeout)
        self._order_current_stream(self._arrived)
        return True

    def synchronize(self) -> None:
        """Do as ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """Do as ``wait``."""
        self.wait()

    def _finish(self, timeout: timedelta = _NO_TIMEOUT) -> None:
        if not self._started.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None):
            raise RuntimeError(f"the inputs of an operation were not on the host within {timeout}")
        with self._lock:
            if self._error is None and self._arrived is None:
                try:
                    _ = self._gloo.wait(timeout) if timeout > _NO_TIMEOUT else self._gloo.wait()
                    self._arrived = self._copy_back()
                except BaseException as error:
                    self._error = error
                del self._copy_back
                self._gloo = None
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return whether the outputs are on the device, or the operation has failed.

        A transfer between two ranks is only complete after ``wait``, as with gloo.
        """
        if not self._started.is_set() or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._error is not None:
                return True
            is_pending = self._arrived is None and not self._gloo.is_completed()
        finally:
            self._lock.release()
        if is_pending:
            return False
        try:
            self._finish()
        except BaseException:
            return True
        assert self._arrived is not None
        return self._arrived.query()

    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if there is none so far."""
        return self._error

    def result(self) -> Any:
        """Return the output tensors."""
        return self._result

    def get_future(self) -> Future[Any]:
        """Return a future that is complete: waits for the operation."""
        future: Future[Any] = Future()
        try:
            self.wait()
            future.set_result(self._result)
        except BaseException as error:
            future.set_exception(error)
        return future


class _StartingThread:
    """Starts works one after the other. Their inputs depend on no other rank, so none of them waits for long."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[StagedWork] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="start gloo operations", daemon=True).start()

    def submit(self, work: StagedWork) -> None:
        self._works.put(work)

    def _run(self) -> None:
        while True:
            self._works.get().start()


@lru_cache(maxsize=1)
def _thread_of(process: int) -> _StartingThread:
    del process  # a forked process has none of its parent's threads
    return _StartingThread()


_one_thread = threading.Lock()


def submit(work: StagedWork) -> StagedWork:
    """Start a work after all that were submitted in this process before; does not wait."""
    with _one_thread:
        _thread_of(os.getpid()).submit(work)
    return work
