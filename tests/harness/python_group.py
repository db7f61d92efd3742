"""What all process groups of the harness share: methods that torch.distributed demands, and what NCCL refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

PATIENCE = timedelta(seconds=20)
_TYPES = frozenset(
    {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


class Refused(RuntimeError):
    """NCCL would raise, or wait for ever."""


class PythonGroup(ProcessGroup):
    """A process group whose operations are methods, and are run by gloo."""

    supports_splitting = False

    def __init__(
        self, kind: str, store: dist.Store, rank: int, size: int, timeout: timedelta, *, device: str = "cpu"
    ) -> None:
        """Connect the ranks of a group of a registered backend, for tensors of a type of device; collective."""
        super().__init__(rank, size)  # type: ignore[call-arg]  # only this one lets C++ call the methods below
        self._kind, self._device = kind, torch.device(device)
        self._inner = ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._inner._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self._inner._set_default_backend(ProcessGroup.BackendType.GLOO)

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._device]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        """Return the name of the backend."""
        return self._kind

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return self._kind

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name by which torch.distributed knows the group."""
        return dist.distributed_c10d._world.pg_names[self]

    def shutdown(self) -> None:
        """Do nothing: connections are closed with the group."""

    def abort(self) -> None:
        """Do nothing."""


def define_operations(group: type[Any], names: Iterable[str]) -> None:
    """Let a class of groups run each of these operations by its method `_collective`, which gets the name."""

    def operation(name: str) -> Callable[..., Any]:
        def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._collective(name, *args, **kwargs)

        return begin

    for name in names:
        if hasattr(ProcessGroup, name):
            setattr(group, name, operation(name))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def check_sendable(tensor: Tensor) -> None:
    """Refuse a tensor of any shape that NCCL does not take."""
    if tensor.dtype not in _TYPES:
        raise Refused(f"NCCL knows no {tensor.dtype}")
    if not tensor.is_contiguous():
        raise Refused(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps")
