"""Datasets that run the model, as those of reinforcement learning do: a policy is asked while a batch is fetched.

All ranks of a replica fetch the same batches in the same order, so an operation of a loader that reads a parameter
which they share is lent the whole of it, as in steps that every rank runs whole (``pipeline.lent``). Replicas need not
fetch alike; what they share out is not to be had here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataFetcher
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info

from lightning_hybrid.parts.reads import IDENTITY
from lightning_hybrid.pipeline.lent import OWN_PROPERTIES, LentParameters
from lightning_hybrid.pipeline.uncut import UncutSteps
from lightning_hybrid.step.absent import SHAPE_METHODS, SHAPE_PROPERTIES, as_whole, is_absent, whole_shape
from lightning_hybrid.step.recording import StepError
from lightning_hybrid.step.tree import flatten
from lightning_hybrid.step.watch import user_line

_INSTEAD = "read it in on_train_batch_start or another hook, and let the dataset hand out the numbers that come of it"


class NotedReads(TorchFunctionMode):
    """Notes whether code reads any of these tensors.

    Attributes:
        is_read: Whether some has been read.
    """

    def __init__(self, tensors: Collection[Tensor]) -> None:
        """Args: tensors: the parameters of a module."""
        super().__init__()
        self.is_read = False
        self._ids = {id(tensor) for tensor in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one operation."""
        self.is_read = self.is_read or any(id(leaf) in self._ids for leaf in flatten((args, kwargs))[0])
        return func(*args, **(kwargs or {}))


class LoaderReads(TorchFunctionMode):
    """While a batch is fetched, parameters of the module are whole; what reads none of them runs as it is."""

    def __init__(self, module: nn.Module, uncut: UncutSteps) -> None:
        """Args: module: the user's, in parts. uncut: lends its parameters."""
        super().__init__()
        self._uncut = uncut
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._lent: LentParameters | None = None

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """A loader runs inside."""
        with self:
            try:
                yield
            except BaseException as error:
                self._give_back(failed=not isinstance(error, StopIteration))
                raise
            self._give_back(failed=False)

    def _give_back(self, *, failed: bool) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.end(failed=failed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, on what this rank is lent where it reads parameters."""
        found: list[Tensor] = []
        for leaf in args if kwargs is None else (*args, *kwargs.values()):  # of every operation, so no call for each
            if type(leaf) is list or type(leaf) is tuple:
                found += [inner for inner in leaf if id(inner) in self._names or is_absent(inner)]
            elif id(leaf) in self._names or isinstance(leaf, FakeTensor):
                found.append(leaf)
        name = getattr(func, "__name__", "")
        if not found or name in IDENTITY:
            return func(*args, **(kwargs or {}))
        member = func.__self__.__name__ if name == "__get__" else ""
        if member in SHAPE_PROPERTIES or name in SHAPE_METHODS:
            return func(as_whole(args[0]), *args[1:], **(kwargs or {}))
        if member in OWN_PROPERTIES:
            return func(*args)
        unknown = next((leaf for leaf in found if id(leaf) not in self._names), None)
        if unknown is not None:
            raise StepError(
                f"{user_line()}: {name} reads a tensor of shape {tuple(unknown.shape)}, which has no content on this"
                " rank, while a loader fetches a batch: a buffer, or what a step or hook kept on the module; keep"
                " numbers (.item(), .tolist()) in a hook, or set pipeline_parallel_size=1"
            )
        self._check(name, found)
        if not any(self._uncut.is_lent(self._names[id(leaf)]) for leaf in found):
            return func(*args, **(kwargs or {}))
        if self._lent is None:
            self._lent = self._uncut.lend("a loader")
        return self._lent.__torch_function__(func, types, args, kwargs)

    def _check(self, operation: str, found: list[Tensor]) -> None:
        """Refuse what cannot be lent here."""
        for leaf in found:
            name = self._names[id(leaf)]
            is_lent = self._uncut.is_lent(name)
            if is_lent and get_worker_info() is not None:
                raise StepError(
                    f"{user_line()}: {operation} reads {name!r} while a loader fetches a batch in a worker, which no"
                    f" other rank can send its part to; set num_workers=0, or {_INSTEAD}"
                )
            if self._uncut.is_of_replicas(name) and (is_lent or tuple(leaf.shape) != whole_shape(leaf)):
                raise StepError(
                    f"{user_line()}: {operation} reads {name!r} while a loader fetches a batch, but replicas share it"
                    f" out, and they need not fetch alike; {_INSTEAD}, or set zero_stage=0 and expert_parallel_size=1"
                )


def serve_loaders(
    trainer: pl.Trainer, module: nn.Module, uncut: UncutSteps, *, in_parts: Callable[[], bool]
) -> Callable[[], None]:
    """Let what loaders of this trainer run read whole parameters, and no batch have tensors without content.

    Args:
        trainer: Whose loaders.
        module: The user's.
        uncut: Lends its parameters.
        in_parts: Whether the module is not whole now.

    Returns:
        Undoes it.
    """
    undo = contextlib.ExitStack()
    reads = LoaderReads(module, uncut)

    def served(name: str) -> None:
        original = getattr(_DataFetcher, name)

        @functools.wraps(original)
        def method(fetcher: _DataFetcher) -> Any:
            if not _is_of(fetcher, trainer) or not in_parts():
                return original(fetcher)
            with reads.fetching():
                result = original(fetcher)
            if name == "__next__":
                _check_content(result)
            return result

        setattr(_DataFetcher, name, method)
        undo.callback(setattr, _DataFetcher, name, original)

    served("__iter__")  # asks iterable datasets for their iterators, and starts workers
    served("__next__")
    return undo.close


def _is_of(fetcher: _DataFetcher, trainer: pl.Trainer) -> bool:
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return any(fetcher._combined_loader is loop._combined_loader for loop in (trainer.fit_loop, *loops))


def _check_content(batch: Any) -> None:
    for leaf in flatten(batch)[0]:
        if is_absent(leaf):
            shape = f"of shape {tuple(leaf.shape)} " if isinstance(leaf, Tensor) else ""
            raise StepError(
                f"a loader handed out a tensor {shape}that has no content on this rank, such as one that a step or hook"
                " kept on the module; let the dataset compute it from the module while it is read, keep numbers"
                " (.item(), .tolist()) in a hook, or set pipeline_parallel_size=1"
            )
