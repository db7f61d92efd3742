"""Records what the ranks of a world do, for the judges.

with recorded() as trace:                  on a rank: every group made inside, the world's among them
    fit(run)

worlds = RecordedWorlds(worlds, fit)       in a test: `fit` is recorded where it runs on several ranks
worlds.run(2, fit, run)
worlds.traces                              of the ranks of the last run
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.nccl.group import RecordedGroup
from harness.nccl.lines import place
from harness.nccl.marks import Marks, marked
from harness.nccl.trace import Create, Event, Mark, Objects, Sync, Trace
from lightning_hybrid import Hybrid3DStrategy, host_copies
from lightning_hybrid.collectives.tensors import on_group_device

_DEVICE, _GLOO = "recorded", "recorded_gloo"
_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


class Recorder:
    """The trace of this rank while it grows.

    Attributes:
        early: Whether `is_completed` says yes at once, instead of as late as NCCL may.
        is_open: Whether the run goes on.
    """

    def __init__(self, *, early: bool = False) -> None:
        self.trace, self.early, self.is_open = Trace(dist.get_rank()), early, True
        self.marks = Marks(self)
        self.num_syncs = 0
        self._numbers = itertools.count()
        self.next_number: Callable[[], int] = self._numbers.__next__
        self._main = threading.get_ident()

    @property
    def thread(self) -> str:
        """The name of the current thread."""
        return "main" if threading.get_ident() == self._main else threading.current_thread().name

    def add(self, event: Event) -> None:
        ops = self.marks.ops() if self.thread == "main" else None
        if ops is not None:
            self.trace.events.append(ops)
        self.num_syncs += isinstance(event, Sync)
        self.trace.events.append(event)


@contextlib.contextmanager
def recorded(*, early: bool = False) -> Iterator[Trace]:
    """Replace the world's process group by one that records, and record host synchronisations and objects."""
    rank, size = dist.get_rank(), dist.get_world_size()
    recorder = Recorder(early=early)
    store = dist.PrefixStore("recorded", dist.distributed_c10d._get_default_store())
    dist.barrier()  # the others may be connecting still
    dist.destroy_process_group()
    for name, is_host in ((_DEVICE, False), (_GLOO, True)):
        dist.Backend.register_backend(name, _maker(recorder, is_host=is_host), devices=["cpu"])
    dist.init_process_group(_DEVICE, rank=rank, world_size=size, store=store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", _new_group(dist.new_group))
        patch.setattr(host_copies, "_HOST", "")  # the CPU is the device
        for module in [each for name, each in sys.modules.items() if name.startswith("lightning_hybrid.")]:
            if getattr(module, "on_group_device", None) is on_group_device:
                patch.setattr(module, "on_group_device", _to_group_device)
        for name in _OBJECTS:
            patch.setattr(dist, name, _exchange(recorder, name, getattr(dist, name)))
        for kind in ("training", "validation"):
            method = f"{kind}_step"
            patch.setattr(Hybrid3DStrategy, method, _step(recorder, kind, getattr(Hybrid3DStrategy, method)))
        with marked(recorder.marks):
            try:
                yield recorder.trace
            finally:
                recorder.add(Mark("end"))
                recorder.is_open = False


def _maker(recorder: Recorder, *, is_host: bool) -> Any:
    def make(store: Any, rank: int, size: int, timeout: Any) -> RecordedGroup:
        recorder.add(Create("", size, is_host))
        return RecordedGroup(recorder, store, rank, size, is_host=is_host)

    return make


def _new_group(original: Any) -> Any:
    """A group that is asked for as one of gloo is one of the host."""

    def new_group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return original(*args, backend=_GLOO if backend == "gloo" else backend, **kwargs)

    return new_group


def _to_group_device(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The copy to a group's device, which is the CPU here; modules that are imported meanwhile keep this function."""
    found = on_group_device(tensor, group)
    if not isinstance(group, RecordedGroup) or group.is_host or not group.recorder.marks.is_on_host(found):
        return found
    found = found.clone()
    group.recorder.marks.unmark(found)
    return found


def _step(recorder: Recorder, kind: str, original: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.add(Mark(kind))
        return original(self, *args, **kwargs)

    return step


def _exchange(recorder: Recorder, name: str, original: Any) -> Any:
    """The exchange of objects, which says what tensors of the device it pickles."""

    def exchange(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        group = group or dist.group.WORLD
        if not isinstance(group, RecordedGroup):  # a fake one, of a run that one process plans
            return original(*args, **kwargs)
        sent = args[1:2] if name in ("all_gather_object",) else args[:1]
        if name == "broadcast_object_list" and not _is_source(args, kwargs, group):
            sent = ()
        shapes = _on_device(recorder.marks, sent)
        recorder.add(Objects(name, tuple(shapes), place().line))
        with recorder.marks.exchanging(on_host=group.is_host):
            return original(*args, **kwargs)

    return exchange


def _is_source(args: Any, kwargs: Any, group: Any) -> bool:
    if "group_src" in kwargs:
        return group.rank() == kwargs["group_src"]
    return dist.get_rank() == kwargs.get("src", args[1] if len(args) > 1 else 0)


def _on_device(marks: Marks, value: Any) -> list[str]:
    found: list[str] = []
    of_generators = torch.default_generator.get_state().shape  # which no operation makes, and on the host

    class Finder(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if not isinstance(obj, Tensor):
                return None
            is_plain = type(obj) in (Tensor, torch.nn.Parameter) and obj.shape != of_generators
            if is_plain and not marks.is_on_host(obj):
                found.append(f"{obj.dtype} {tuple(obj.shape)}".removeprefix("torch."))
            return id(obj)

    with contextlib.suppress(Exception):  # the exchange itself raises it
        Finder(io.BytesIO()).dump(value)
    return found


class RecordedWorlds:
    """The worlds of the tests, in which a function is recorded where it runs on several ranks.

    Attributes:
        traces: Of the ranks of its last run.
    """

    def __init__(self, worlds: Any, function: Any, *, early: bool = False) -> None:
        self._worlds, self._function, self._early = worlds, function, early
        self.traces: list[Trace] = []

    def run(self, n: int, function: Any, /, *args: Any, **kwargs: Any) -> list[Any]:
        if n == 1 or function is not self._function:
            return self._worlds.run(n, function, *args, **kwargs)
        found = self._worlds.run(n, run_recorded, self._early, function, args, **kwargs)
        self.traces = [Trace.from_json(text) for _, text in found]
        return [result for result, _ in found]


def run_recorded(early: bool, function: Any, args: Any) -> tuple[Any, str]:
    """On a rank: the function's result, and the trace as JSON."""
    with recorded(early=early) as trace:
        result = function(*args)
    return result, trace.to_json()
