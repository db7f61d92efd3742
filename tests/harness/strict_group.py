"""CPU process groups that refuse what NCCL refuses, and let operations wait for each other as NCCL does.

    with as_on_gpus():           every group made inside, the world's among them
        fit(run)

* Operations of one communicator run one after the other, in the order in which a rank began them. The collectives of a
  group have one communicator, and each pair of its ranks one for both directions, made at the first transfer; or, for
  groups bound to a device (``device_id=``), all of them have a single one.
* Transfers have no tags: the k-th of one rank of a pair matches the k-th of the other, and both wait for it.
* Only dtypes that NCCL supports are sent, and only contiguous memory.

Not detected here: a tensor on the wrong device, and races between streams of a device.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.python_group import PATIENCE, PythonGroup, Refused, check_sendable, define_operations, tensors_in

_COLLECTIVES = (
    "allreduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "scatter",
    "reduce",
    "barrier",
)


class _Work(torch._C._distributed_c10d.Work):
    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self._run, self._done = run, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: timedelta = PATIENCE) -> bool:
        if not self._done.wait((timeout or PATIENCE).total_seconds() or PATIENCE.total_seconds()):
            raise Refused("an operation waits for one that its peer begins later, or never")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


class _Communicator:
    """Runs operations one after the other, in its own thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def begin(self, run: Callable[[], None]) -> _Work:
        work = _Work(run)
        self._queue.put(work)
        return work

    def _serve(self) -> None:
        while True:
            self._queue.get().run()


class StrictGroup(PythonGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, *, bound: bool) -> None:
        super().__init__("strict", store, rank, size, timeout)
        self._bound = bound
        self._communicators: dict[int | None, _Communicator] = {}
        self._num_transfers: dict[int, int] = {}

    def _communicator(self, peer: int | None) -> _Communicator:
        key = None if self._bound else peer
        if key not in self._communicators:
            self._communicators[key] = _Communicator()
        return self._communicators[key]

    def _collective(self, name: str, *args: Any, **kwargs: Any) -> _Work:
        for tensor in tensors_in(args):
            check_sendable(tensor)
        begin = getattr(self._inner, name)
        return self._communicator(None).begin(lambda: _finished(begin(*_as_bytes(args), **kwargs)))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        return self._transfer(tensors[0], peer, sends=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        return self._transfer(tensors[0], peer, sends=False)

    def _transfer(self, tensor: Tensor, peer: int, *, sends: bool) -> _Work:
        check_sendable(tensor)
        number = self._num_transfers[peer] = self._num_transfers.get(peer, 0) + 1
        tag = 2 * number

        def run() -> None:
            local = torch.tensor([int(sends), tensor.nbytes])
            remote = torch.empty_like(local)
            works = [self._inner.send([local], peer, tag), self._inner.recv([remote], peer, tag)]
            for work in works:
                work.wait(PATIENCE)
            if remote.tolist() != [int(not sends), tensor.nbytes]:
                does = "sends" if sends else "receives"
                raise Refused(
                    f"transfer {number} between ranks {self.rank()} and {peer}: one {does} {tensor.nbytes}"
                    f" bytes, the other {'sends' if remote[0] else 'receives'} {int(remote[1])}"
                )
            transfer = self._inner.send if sends else self._inner.recv
            transfer([tensor], peer, tag + 1).wait(PATIENCE)

        return self._communicator(peer).begin(run)


define_operations(StrictGroup, _COLLECTIVES)


def _finished(work: Any) -> None:
    work.wait()


def _as_bytes(value: Any) -> Any:
    """Booleans as bytes, which gloo supports."""
    if isinstance(value, Tensor):
        return value.view(torch.uint8) if value.dtype is torch.bool else value
    return type(value)(map(_as_bytes, value)) if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def as_on_gpus(*, bound: bool = False) -> Iterator[None]:
    """Replace the world's process group by a strict one. Args: bound: as if ``device_id`` were given."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("strict", dist.distributed_c10d._get_default_store())
    dist.barrier()  # the others may be connecting still
    dist.destroy_process_group()

    def make(prefix: Any, rank: int, size: int, timeout: timedelta) -> StrictGroup:
        return StrictGroup(prefix, rank, size, timeout, bound=bound)

    dist.Backend.register_backend("strict", make, devices=["cpu"])
    dist.init_process_group("strict", rank=rank, world_size=size, store=store, timeout=PATIENCE)
    if bound:
        dist.group.WORLD.bound_device_id = torch.device("cpu:0")
    yield
