"""Memory that the tensors of a run take on this rank, by kind and by name, and the peak of a step."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.optimizers.state_file import is_in_state_file
from lightning_hybrid.params.guards import below_read_guards
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.objects.tensors import holds_tensors, inner_tensors
from lightning_hybrid.step.standins.tensors import is_absent


class Holder(NamedTuple):
    """Tensors of one parameter."""

    kind: str  # "parameters", "gradients" or "optimizer_states"
    name: str  # FQN of the parameter
    nbytes: int  # on the device; of memory that several share, counted at the first


@below_read_guards
def find_holders(module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> list[Holder]:
    """Find what this rank holds on a device; the optimizers have states for parameters of the module."""
    seen: set[int] = set()
    states = {id(p): values for optimizer in optimizers for p, values in optimizer.state.items()}
    parameters = [(name, p) for name, p in module.named_parameters() if not is_absent(p)]
    holders = []
    for name, parameter in parameters:
        gradient = parameter.grad
        tensors: dict[str, list[Any]] = {
            "parameters": [parameter],
            "gradients": [] if gradient is None or is_absent(gradient) else [gradient],
            "optimizer_states": flatten(states.get(id(parameter), {}))[0],
        }
        for kind, values in tensors.items():
            nbytes = sum(_new_bytes(value, device, seen) for value in values)
            if nbytes:
                holders.append(Holder(kind, name, nbytes))
    return holders


def bytes_by_kind(holders: Iterable[Holder]) -> dict[str, int]:
    """Sum the bytes of each kind."""
    sums = dict.fromkeys(("parameters", "gradients", "optimizer_states"), 0)
    for holder in holders:
        sums[holder.kind] += holder.nbytes
    return sums


def _new_bytes(value: Any, device: torch.device, seen: set[int]) -> int:
    """The bytes of a tensor's memory, if none of the tensors seen so far uses it and it is not in a file."""
    if not isinstance(value, Tensor) or is_absent(value):
        return 0
    value = value.to_local() if isinstance(value, DTensor) else value
    if holds_tensors(value):  # a quantized state
        return sum(_new_bytes(inner, device, seen) for inner in inner_tensors(value))
    if value.device.type != device.type or value.layout is not torch.strided:
        return value.nbytes if value.device.type == device.type else 0
    try:
        storage = value.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a subclass without a storage of its own
        return value.nbytes
    if pointer in seen or is_in_state_file(pointer):
        return 0
    seen.add(pointer)
    return size


def _allocations(tree: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """When memory was allocated, or released that was allocated in this profile, and how many bytes.

    The profiler also reports releases of earlier memory, at addresses that another profile has seen; with the size of
    that time.
    """
    found, events = [], list(tree)
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    held: set[int] = set()
    for when, address, nbytes in sorted(found):
        if nbytes > 0:
            held.add(address)
        elif address in held:
            held.remove(address)
        else:
            continue
        yield when, nbytes


class PeakMeter:
    """Measures the peak of the memory of tensors between two calls.

    On a GPU it is that of torch's allocator, whose peak is reset; elsewhere the allocations are recorded by torch's
    profiler, so that it is the peak of tensors and not of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: Any = None
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self._released: list[tuple[int, int]] = []  # when, and how many bytes

    @property
    def can_measure(self) -> bool:
        """Whether no other profiler records already."""
        return self._device.type == "cuda" or not torch.autograd._profiler_enabled()

    def start(self, tensors: Iterable[Tensor] = ()) -> None:
        """Begin to measure.

        The profiler does not see the release of what was allocated before. ``tensors``, of any shape, may be released
        before `stop`; others that exist are taken to stay.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        storages = [tensor.untyped_storage() for tensor in tensors]
        for storage in {storage.data_ptr(): storage for storage in storages}.values():  # tensors may share one
            self._watched.append(weakref.ref(storage, partial(self._note_release, storage.nbytes())))
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes a line to stderr whenever it starts
        self._profile = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
        self._profile.__enter__()

    def stop(self, bytes_at_start: int) -> int:
        """Return the peak in bytes since the start, at which tensors took ``bytes_at_start`` (not used on a GPU)."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        profile = self.close()
        changes = [*_allocations(profile.kineto_results.experimental_event_tree()), *self._released]
        used = peak = 0
        for _, nbytes in sorted(changes, key=itemgetter(0)):
            used += nbytes
            peak = max(peak, used)
        return bytes_at_start + peak

    def _note_release(self, nbytes: int, _: object) -> None:
        self._released.append((time.time_ns(), -nbytes))

    def close(self) -> Any:
        """Stop, if it has been started."""
        profile, self._profile = self._profile, None
        self._watched = []
        if profile is not None:
            profile.__exit__(None, None, None)
        return profile
