"""The data of a layout in one process: replicas, their loaders and batches, and the pieces that each batch has."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_hybrid.batch.split import (
    batch_size_of,
    choose_count,
    join_batches,
    sizes_of,
    split,
)
from lightning_hybrid.errors import BatchError
from lightning_hybrid.randomness.generators import GeneratorStates

_HOST = torch.device("cpu")
EVALUATIONS = frozenset({"validation_step", "test_step", "predict_step"})


@dataclass(frozen=True)
class DataSplit:
    """How a layout splits the data."""

    replicas: int  # number of replicas, so of batches per step
    num_microbatches: int | None  # microbatches of each batch; None where the strategy chooses
    num_stages: int  # number of stages, on which that choice depends
    splitter: Callable[[Any, int], Sequence[Any]] | None = None  # the user's ``batch_splitter``
    weight: Callable[[Any], float] | None = None  # the user's ``microbatch_weight``
    # steps that run on the full batch of a replica, whatever the number of microbatches
    unsplit_steps: frozenset[str] = frozenset()
    unsplit_from: int | None = None  # the first training batch that is not split, as all after it; None if all are
    shares: int = 1  # number of ranks that each run training steps on a share of a replica's batch, in microbatches
    shared: frozenset[int] = frozenset()  # the training batches that ran so; the others ran unsplit
    plain: bool = False  # whether each rank runs the user's step as it is, without stages
    start: int = 0  # training batches before this one are not split: their step did not run in stages yet
    # from this batch on the step does not run in stages any more, but on shares, or unsplit if there is one share. None
    # if it does
    end: int | None = None

    def shares_of(self, number: int) -> int:
        """The ranks that share a training batch, as they hold shards instead of stages."""
        return self.shares if self.plain and (self.end is None or number >= self.end) else 1

    def is_unsplit(self, number: int) -> bool:
        """Whether training batch ``number`` runs unsplit."""
        if number < self.start or (self.unsplit_from is not None and number >= self.unsplit_from):
            return True
        has_left_stages = self.plain and (self.end is None or number >= self.end)
        if not has_left_stages or (self.end is None and self.shares == 1):
            return False
        return number not in self.shared


@dataclass(frozen=True)
class Piece:
    """A part of a step's samples, which a layout runs at once."""

    replica: int  # index of the replica
    number: int  # number of the microbatch over all replicas, by which random numbers are keyed
    batch: Any  # the samples
    weight: float  # share of the step's samples
    share: int = 0  # the share of the replica's batch that the piece belongs to
    sizes: tuple[int, ...] = ()  # samples of the microbatches, if the piece joins several
    numbers: tuple[int, ...] = ()  # their numbers


class Pieces:
    """Splits the batches of all replicas as a layout does."""

    def __init__(self, data_split: DataSplit) -> None:
        self._data_split = data_split
        self._usual_counts: dict[str, tuple[int, int]] = {}

    def of(self, name: str, batches: Sequence[Any], number: int) -> list[Piece]:
        """The microbatches of the replicas' batches in the step ``name`` after training batch ``number``."""
        data_split, pieces, is_training = self._data_split, list[Piece](), name == "training_step"
        sizes = () if is_training else known_sizes(batches)  # in training replicas weigh the same, as under DDP
        weights_of_replicas = [size / sum(sizes) for size in sizes] or [1 / len(batches)] * len(batches)
        for replica, (batch, of_replica) in enumerate(zip(batches, weights_of_replicas, strict=True)):
            count, ranks = self._count(name, batch, number)
            parts, weights = split(batch, count, data_split.splitter) if count else ([batch], [1.0])
            for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                share = index // (count // ranks) if is_training and count else 0
                pieces.append(Piece(replica, replica * max(count, 1) + index, part, weight * of_replica, share))
        if data_split.weight is not None and is_training:
            counts = [float(data_split.weight(piece.batch)) for piece in pieces]
            pieces = [replace(p, weight=c / sum(counts)) for p, c in zip(pieces, counts, strict=True)]
        return pieces

    def _count(self, name: str, batch: Any, number: int) -> tuple[int, int]:
        """The number of microbatches, 0 for a step that does not split this batch; and of ranks that share them."""
        data_split, size, is_training = self._data_split, batch_size_of(batch), name == "training_step"
        if name in data_split.unsplit_steps or (is_training and data_split.is_unsplit(number)):
            return 0, 1
        try:
            count = choose_count(batch, data_split.num_microbatches, data_split.num_stages, data_split.splitter)
        except BatchError:
            count = 1  # the layout refuses this batch; or runs it unsplit, if it chose the number itself
        ranks = data_split.shares_of(number)
        if size is not None and data_split.splitter is None:
            usual = self._usual_counts.setdefault(name, (size, count))
            if size >= usual[0]:
                self._usual_counts[name] = size, count
            else:
                count = -(-size // -(-usual[0] // usual[1]))  # a short batch: microbatches of the usual size
        if is_training:
            count = (count if size is None else min(count, size // ranks)) * ranks
        return count, ranks


def joined(pieces: Sequence[Piece], batches: Sequence[Any]) -> list[Piece]:
    """The full batch of each replica as one piece, with the sizes and numbers of its microbatches where known."""
    full = []
    for replica, batch in enumerate(batches):
        own = [piece for piece in pieces if piece.replica == replica]
        sizes = known_sizes([piece.batch for piece in own])
        numbers = tuple(piece.number for piece in own) if sizes else ()
        weight = sum(piece.weight for piece in own)
        full.append(Piece(replica, own[0].number, batch, weight, sizes=sizes, numbers=numbers))
    return full


def known_sizes(batches: Sequence[Any]) -> tuple[int, ...]:
    """Number of samples of each batch; empty where one is unknown."""
    sizes = sizes_of(batches)
    return tuple(size for size in sizes if size is not None) if None not in sizes else ()


class ReplicaStates:
    """The generator states of replicas, for their loaders; this process has the states of the first.

    They start equal. Each loader goes on where the last one has ended, unless other code has drawn since.
    """

    def __init__(self) -> None:
        self._states: dict[int, GeneratorStates] = {}
        self._ended: list[GeneratorStates] = []  # the first replica's, after the last batch; none before

    def begin(self, count: int) -> None:
        """Begin a loader of so many replicas."""
        if not (self._ended and self._ended[-1].are_unchanged()):
            self._states = dict.fromkeys(range(1, count), GeneratorStates(_HOST))

    def run(self, replica: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that draws for a replica other than the first."""
        first = GeneratorStates(_HOST)
        self._states[replica].restore()
        try:
            return function(*args)
        finally:
            self._states[replica] = GeneratorStates(_HOST)
            first.restore()

    def end(self) -> None:
        """End a batch, after which other code may draw."""
        self._ended = [GeneratorStates(_HOST)]


class ReplicaLoader:
    """Yields the batches of replica 0, or of all joined, and queues all in ``pending`` for the step.

    So the user's hooks receive an ordinary batch. Each replica draws from generator states of its own, as in separate
    processes.
    """

    def __init__(self, loaders: list[Iterable[Any]], states: ReplicaStates, *, join: bool) -> None:
        self.loaders, self._states, self._join = loaders, states, join
        self.pending: deque[list[Any]] = deque()

    @property
    def sampler(self) -> ReplicaLoader:
        """This object, which passes the epoch on to the samplers of all replicas."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of all samplers."""
        for loader in self.loaders:
            inner = getattr(loader, "batch_sampler", None)
            samplers: list[Any] = [getattr(loader, "sampler", None), getattr(inner, "sampler", None)]
            for sampler in samplers:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)

    @property
    def dataset(self) -> Any:
        """The user's dataset, whose length hooks may read; all replicas have the same."""
        return self.loaders[0].dataset  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Number of batches of replica 0, which has the most."""
        return len(self.loaders[0])  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Draw one batch from each loader; None for a replica that has no batch left."""
        self.pending.clear()
        states, others = self._states, list(enumerate(self.loaders))[1:]
        states.begin(len(self.loaders))
        first_iterator = iter(self.loaders[0])
        iterators = [(index, states.run(index, iter, loader)) for index, loader in others]
        for first in first_iterator:
            batches = [first, *(states.run(index, next, iterator, None) for index, iterator in iterators)]
            states.end()
            self.pending.append(batches)
            yield join_batches([batch for batch in batches if batch is not None]) if self._join else first
        states.end()


def split_loader(
    trainer: Any, loader: Any, replicas: int, states: ReplicaStates, *, shuffle: bool, mode: Any, join: bool
) -> ReplicaLoader:
    """Split a loader over replicas as ``replicas`` processes would, with Lightning's distributed samplers.

    In training Lightning's samplers pad with repeated samples, so that all replicas have as many; in evaluation each
    sample must count once, so here nothing is repeated. ``join`` yields the batches of all replicas, joined to one.
    """
    connector = importlib.import_module(type(trainer._data_connector).__module__)
    is_split = (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.sampler, DistributedSampler)
        and trainer._accelerator_connector.use_distributed_sampler
    )
    if not is_split:
        return ReplicaLoader([loader] * replicas, states, join=join)
    loaders: list[Any] = []
    for rank in range(replicas):
        sampler = connector._get_distributed_sampler(
            loader, shuffle, overfit_batches=trainer.overfit_batches, mode=mode, num_replicas=replicas, rank=rank
        )
        if mode != type(mode).TRAINING:
            sampler.total_size = len(sampler.dataset)
            sampler.num_samples = len(range(rank, sampler.total_size, replicas))
        loaders.append(connector._update_dataloader(loader, sampler, mode=mode))
    return ReplicaLoader(loaders, states, join=join)
