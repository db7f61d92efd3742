"""Dataloaders that read the model, as in reinforcement learning: a policy runs while a batch is fetched.

All ranks of a replica fetch the same batches in the same order, so a parameter that is sharded over them is gathered
when an operation of a loader reads it, as in steps that every rank runs unpartitioned (``params.reads``). Replicas may
fetch differently: one gathers the shards that it reads, and the others take part when they have their batch. So they
synchronize after each fetch, if the objects of some loader refer to the module.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CellType, FunctionType, GeneratorType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy
from lightning.pytorch.loops.fetchers import _DataFetcher
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info

from lightning_hybrid.errors import StepError
from lightning_hybrid.params.reads.gather import IDENTITY, OWN_PROPERTIES
from lightning_hybrid.params.reads.steps import StepReads
from lightning_hybrid.patching import around
from lightning_hybrid.pipeline.unpartitioned import UnpartitionedSteps
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.tensors import (
    SHAPE_METHODS,
    SHAPE_PROPERTIES,
    full_shape,
    full_shape_meta,
    is_absent,
)
from lightning_hybrid.step.tracing.mode import user_line

_MOST_OBJECTS, _MOST_ITEMS = 10_000, 100
_LEAVES = (str, bytes, int, float, Tensor, type, ModuleType, numpy.ndarray, numpy.generic)
_INSTEAD = "read it in on_train_batch_start or another hook, and let the dataset yield the resulting numbers"


class ReadRecorder(TorchFunctionMode):
    """Records whether code reads any of these tensors.

    Attributes:
        is_read: Whether one has been read.
    """

    def __init__(self, tensors: Collection[Tensor]) -> None:
        super().__init__()
        self.is_read = False
        self._ids = {id(tensor) for tensor in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one operation."""
        self.is_read = self.is_read or any(id(leaf) in self._ids for leaf in flatten((args, kwargs))[0])
        return func(*args, **(kwargs or {}))


class LoaderReads(TorchFunctionMode):
    """Provides full parameters while a batch is fetched; operations that read none of them run unchanged."""

    def __init__(self, owner: Any, unpartitioned: UnpartitionedSteps) -> None:
        """Take the owner of the run, which has the techniques that gather shards over replicas."""
        super().__init__()
        self._unpartitioned, self._owner, self._synchronizes = unpartitioned, owner, False
        self._names = {id(parameter): name for name, parameter in owner.setting.module.named_parameters()}
        self._gathered: StepReads | None = None

    @contextlib.contextmanager
    def fetching(self, *, synchronizes: bool) -> Iterator[None]:
        """Run a loader inside; collective over replicas if it ``synchronizes`` them."""
        self._synchronizes = synchronizes
        try:
            with self:
                yield
        except BaseException as error:
            self._release(failed=not isinstance(error, StopIteration))
            raise
        self._release(failed=False)

    def _release(self, *, failed: bool) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.end(failed=failed)
        if self._synchronizes and not failed:
            self._owner.run.active.free_rank_local_reads()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, on gathered parameters where it reads some."""
        tensors: list[Tensor] = []
        for leaf in args if kwargs is None else (*args, *kwargs.values()):  # of every operation, so no call for each
            if type(leaf) is list or type(leaf) is tuple:
                tensors += [inner for inner in leaf if id(inner) in self._names or is_absent(inner)]
            elif id(leaf) in self._names or isinstance(leaf, FakeTensor):
                tensors.append(leaf)
        name = getattr(func, "__name__", "")
        if not tensors or name in IDENTITY:
            return func(*args, **(kwargs or {}))
        member = func.__self__.__name__ if name == "__get__" else ""
        if member in SHAPE_PROPERTIES or name in SHAPE_METHODS:
            return func(full_shape_meta(args[0]), *args[1:], **(kwargs or {}))
        if member in OWN_PROPERTIES or member == "grad":
            return func(*args)
        unknown = next((leaf for leaf in tensors if id(leaf) not in self._names), None)
        if unknown is not None:
            raise StepError(
                f"{user_line()}: {name} reads a tensor of shape {tuple(unknown.shape)}, which has no content on this"
                " rank, while a loader fetches a batch: a buffer, or a tensor that a step or hook kept on the module;"
                " keep numbers (.item(), .tolist()) in a hook",
                entry="loader-content",
            )
        self._gather(name, tensors)
        if not any(self._unpartitioned.is_gathered_on_read(self._names[id(leaf)]) for leaf in tensors):
            return func(*args, **(kwargs or {}))
        if self._gathered is None:
            self._gathered = self._unpartitioned.gather_when_read("a loader")
        return self._gathered.__torch_function__(func, types, args, kwargs)

    def _gather(self, operation: str, found: list[Tensor]) -> None:
        """Gather the shards over replicas; refuse parameters that cannot be gathered here."""
        for leaf in found:
            name = self._names[id(leaf)]
            is_shard = (
                self._unpartitioned.is_sharded_over_replicas(name)
                and not is_absent(leaf)
                and tuple(leaf.shape) != full_shape(leaf)
            )
            if (is_shard or self._unpartitioned.is_gathered_on_read(name)) and get_worker_info() is not None:
                raise StepError(
                    f"{user_line()}: {operation} reads {name!r} while a loader fetches a batch in a worker, to which"
                    f" other ranks cannot send their shards; set num_workers=0, or {_INSTEAD}",
                    entry="loader-worker",
                )
            if is_shard and self._synchronizes:
                self._owner.run.active.gather_for_this_rank(leaf)
            elif is_shard:
                raise StepError(
                    f"{user_line()}: {operation} reads {name!r} while a loader fetches a batch, but it is sharded over"
                    " replicas, which gather it only where an object of the loader refers to the module and no ranks"
                    f" share experts; pass the module to the dataset, {_INSTEAD}, or set zero_stage=0 and"
                    " expert_parallel_size=1",
                    entry="loader-module",
                )


def wrap_loaders(owner: Any, unpartitioned: UnpartitionedSteps) -> Callable[[], None]:
    """Let loaders of a run read full parameters, and refuse batches with absent tensors; return the undo.

    ``owner`` is that of the run, whose layout may change.
    """
    undo, trainer = contextlib.ExitStack(), owner.setting.trainer
    reads = LoaderReads(owner, unpartitioned)
    meeting = weakref.WeakSet[_DataFetcher]()

    def served(name: str) -> None:
        def method(original: Callable[[_DataFetcher], Any], fetcher: _DataFetcher) -> Any:
            if not _is_of(fetcher, trainer) or owner.state.is_full:
                return original(fetcher)
            if name == "__iter__":
                meeting.discard(fetcher)
                if owner.run.active.groups and _synchronizes(owner.run, fetcher):
                    meeting.add(fetcher)
            with reads.fetching(synchronizes=fetcher in meeting):
                result = original(fetcher)
            if name == "__next__":
                _check_content(result)
            return result

        undo.callback(around(_DataFetcher, name, method, reason="loaders read full parameters"))

    served("__iter__")  # asks iterable datasets for their iterators, and starts workers
    served("__next__")
    return undo.close


def _synchronizes(run: Any, fetcher: _DataFetcher) -> bool:
    """Return whether a loader's fetches synchronize with the fetches of other replicas; collective."""
    world = run.setting.world
    refers = refers_to(run.setting.module, fetcher._combined_loader)
    with world.as_launcher():
        if not run.active.guards_loaders or not world.decide(refers, all_ranks=False):
            return False
        run.active.allow_rank_local_reads(run.mesh)
    return True


def _is_of(fetcher: _DataFetcher, trainer: pl.Trainer) -> bool:
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return any(fetcher._combined_loader is loop._combined_loader for loop in (trainer.fit_loop, *loops))


def refers_to(module: nn.Module, *start: Any) -> bool:
    """Whether objects such as a loader hold a module, or a submodule of it, directly or indirectly."""
    wanted = {id(inner) for inner in module.modules()}
    visited, waiting = set[int](), list(start)
    while waiting and len(visited) < _MOST_OBJECTS:
        thing = waiting.pop()
        if id(thing) in wanted:
            return True
        if id(thing) in visited or isinstance(thing, _LEAVES):
            continue
        visited.add(id(thing))
        if isinstance(thing, Mapping):
            waiting += itertools.islice(thing.values(), _MOST_ITEMS)
        elif isinstance(thing, list | tuple | set | frozenset | collections.deque):
            waiting += itertools.islice(thing, _MOST_ITEMS)
        elif isinstance(thing, FunctionType):
            waiting += [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
        elif isinstance(thing, GeneratorType):
            waiting += [] if thing.gi_frame is None else thing.gi_frame.f_locals.values()
        else:
            members = ("__self__", "__func__", "func", "args", "keywords", "__dict__")
            waiting += [getattr(thing, member) for member in members if hasattr(thing, member)]
    return False


def _check_content(batch: Any) -> None:
    for leaf in flatten(batch)[0]:
        if is_absent(leaf):
            shape = f"of shape {tuple(leaf.shape)} " if isinstance(leaf, Tensor) else ""
            raise StepError(
                f"a loader yielded a tensor {shape}that has no content on this rank, such as one that a step or hook"
                " kept on the module; let the dataset compute it from the module while it is read, or keep numbers"
                " (.item(), .tolist()) in a hook",
                entry="loader-content",
            )
