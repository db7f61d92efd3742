"""The process group: operations on tensors of a device, run by gloo on copies in host memory.

Like NCCL's it takes contiguous tensors of its device alone, and orders streams; unlike NCCL's, a work's ``wait`` also
waits on the host, and transfers have tags. Booleans and ``ReduceOp.AVG``, which gloo does not support, are emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from harness.gloo_via_host.copies import PAST, Copies, Event, below_modes, copies_of
from harness.gloo_via_host.work import StagedWork, submit
from harness.python_group import PythonGroup, define_operations, tensors_in
from lightning_hybrid.strategies.world.failures import close_connections

BACKEND = "gloo_via_host"


def register() -> None:
    """Make the backend known to torch.distributed; a second call changes nothing."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, GlooViaHost, devices=["cuda"])


# By operation: the arguments that it reads, and those that it writes.
_OPERATIONS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), ((0,), (0,))),
    **dict.fromkeys(("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"), ((1,), (0,))),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), ((1,), (0,))),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), ((1,), (0,))),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), ((1,), (0,))),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), ((1,), (0,))),
    **dict.fromkeys(("gather", "scatter"), ((1,), (0,))),
    "send": ((0,), ()),
    **dict.fromkeys(("recv", "recv_anysource"), ((), (0,))),
}


class GlooViaHost(PythonGroup):
    """A process group of ranks that may share devices."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        device_type: str = "cuda",
        make_copies: Callable[[torch.device], Copies[Any]] = copies_of,
    ) -> None:
        """Connect the ranks; collective.

        Args:
            store: By which they meet.
            rank: Of this process.
            size: Number of ranks.
            timeout: Of operations.
            device_type: Of all tensors that are communicated.
            make_copies: Makes the copies between a device and the host.
        """
        super().__init__(BACKEND, store, rank, size, timeout, device=device_type)
        self._device_type, self._make_copies = device_type, make_copies
        self._copies: dict[torch.device, Copies[Any]] = {}

    def abort(self) -> None:
        """Close the connections, so that ranks that wait for this one get an error."""
        close_connections(self._inner)

    # -- operations ---------------------------------------------------------------------------------------------------

    def barrier(self, opts: dist.BarrierOptions | None = None) -> StagedWork:  # type: ignore[override]
        """Wait for all ranks, and for what the current stream of this one has been given."""
        options = dist.BarrierOptions()  # without the device, which gloo does not have
        if opts is not None:
            options.timeout = opts.timeout
        copies = self._copies_of(self._current_device())
        mark = copies.mark()
        return submit(StagedWork(mark, partial(self._inner.barrier, options), lambda: mark, lambda _: None, []))

    def _current_device(self) -> torch.device:
        is_cuda = self._device_type == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(self._device_type)

    def _copies_of(self, device: torch.device) -> Copies[Any]:
        if device not in self._copies:
            self._copies[device] = self._make_copies(device)
        return self._copies[device]

    def _collective(self, operation: str, *args: Any, **kwargs: Any) -> StagedWork:
        """Begin an operation of `ProcessGroup` of that name, with its arguments."""
        options = [*args, *kwargs.values()]
        reads, writes = self._arguments_copied(operation, options)
        with below_modes():
            tensors = list(tensors_in(args))
            self._check(operation, tensors)
            copies = self._copies_of(tensors[0].device if tensors else self._current_device())
            mark = copies.mark()
            with torch.inference_mode(False):  # gloo itself may write to these tensors by operations of torch
                hosts = [_map_tensors(copies.host_memory, arg) for arg in args]
                host_args = [_map_tensors(_booleans_as_bytes, host) for host in hosts]
            sources = _tensors_at(reads, args)
            copied: Event = copies.to_host(sources, _tensors_at(reads, hosts), mark) if sources else PAST
            divisor = _replace_reduction(options, tensors, self.size())
        outputs, results = _tensors_at(writes, args), _tensors_at(writes, hosts)

        def copy_back() -> Any:
            with below_modes():
                for result in results if divisor > 1 else ():
                    is_integer = not (result.is_floating_point() or result.is_complex())
                    result.div_(divisor, rounding_mode="trunc" if is_integer else None)
                # `data`: an operation of a C++ backend does not count as a change in place.
                return copies.from_host(results, [output.data for output in outputs], mark)

        start = partial(getattr(self._inner, operation), *host_args, **kwargs)
        return submit(StagedWork(copied, start, copy_back, copies.order_current_stream, outputs))

    def _check(self, operation: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type != self._device_type:
                raise RuntimeError(
                    f"{operation} of a tensor on {tensor.device}: a group of backend {BACKEND!r} communicates tensors"
                    f" on {self._device_type} alone, as NCCL's do; move it to {self._device_type} before"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{operation} of a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}: a group"
                    " communicates contiguous tensors alone; call contiguous() before"
                )

    def _arguments_copied(self, operation: str, options: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions of the arguments that are copied to the host and from it, on this rank."""
        reads, writes = _OPERATIONS[operation]
        root = next((each.rootRank for each in options if hasattr(each, "rootRank")), 0)
        if operation == "broadcast":
            return (reads, ()) if root == self.rank() else ((), writes)
        return (reads, ()) if operation == "reduce" and root != self.rank() else (reads, writes)


define_operations(GlooViaHost, _OPERATIONS)


def _tensors_at(positions: tuple[int, ...], args: Any) -> list[Tensor]:
    return [tensor for position in positions for tensor in tensors_in(args[position])]


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(_map_tensors(function, item) for item in value) if isinstance(value, list | tuple) else value


def _booleans_as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _replace_reduction(args: list[Any], tensors: list[Tensor], size: int) -> int:
    """Replace a reduction that gloo does not support, in the options among these arguments.

    Returns:
        By what results are to be divided afterwards.
    """
    for options in args:
        reduction = getattr(options, "reduceOp", None)
        if reduction is None:
            continue
        if reduction == ReduceOp.AVG:
            options.reduceOp = ReduceOp.SUM
            return size
        if tensors and tensors[0].dtype is torch.bool:  # as NCCL does
            if reduction == ReduceOp.SUM:
                options.reduceOp = ReduceOp.MAX
            elif reduction == ReduceOp.PRODUCT:
                options.reduceOp = ReduceOp.MIN
    return 1
