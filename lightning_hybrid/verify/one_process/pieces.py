"""How a layout splits the data: replicas, their batches, and the pieces (microbatches, shares) that each batch has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_hybrid.errors import BatchError
from lightning_hybrid.step.batch.split import batch_size_of, choose_count, sizes_of, split

EVALUATIONS = frozenset({"validation_step", "test_step", "predict_step"})


@dataclass(frozen=True)
class DataSplit:
    """How a layout splits the data.

    Attributes:
        replicas: Number of replicas, so of batches per step.
        num_microbatches: Microbatches of each batch; None where the strategy chooses.
        num_stages: Number of stages, on which that choice depends.
        splitter: The user's ``batch_splitter``.
        weight: The user's ``microbatch_weight``.
        unsplit_steps: Steps that run on the full batch of a replica, whatever the number of microbatches.
        shares: Number of ranks that each run training steps on a share of a replica's batch, in microbatches.
        plain: Whether each rank runs the user's step as it is, without stages.
        start: Training batches before this one are not split: their step did not run in stages yet.
        end: From this batch on the step does not run in stages any more, but on shares, or unsplit if there is one
            share. None if it does.
    """

    replicas: int
    num_microbatches: int | None
    num_stages: int
    splitter: Callable[[Any, int], Sequence[Any]] | None = None
    weight: Callable[[Any], float] | None = None
    unsplit_steps: frozenset[str] = frozenset()
    shares: int = 1
    plain: bool = False
    start: int = 0
    end: int | None = None

    def has_left_stages(self, number: int) -> bool:
        """Whether a training batch runs on ranks that hold shards."""
        return self.plain and (self.end is None or number >= self.end)

    def is_unsplit(self, number: int, size: int | None) -> bool:
        """Whether training batch ``number``, of ``size`` samples, runs unsplit."""
        if number < self.start:
            return True
        if not self.has_left_stages(number) or (self.end is None and self.shares == 1):
            return False
        few = self.splitter is None and (size or 0) < self.shares
        return self.shares == 1 or number == (self.end or 0) or few


@dataclass(frozen=True)
class Piece:
    """A part of a step's samples, which a layout runs at once.

    Attributes:
        replica: Index of the replica.
        number: Number of the microbatch over all replicas, by which random numbers are keyed.
        batch: The samples.
        weight: Share of the step's samples.
        share: The share of the replica's batch that the piece belongs to.
        sizes: Samples of the microbatches, if the piece joins several.
        numbers: Their numbers.
    """

    replica: int
    number: int
    batch: Any
    weight: float
    share: int = 0
    sizes: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()


class Pieces:
    """Splits the batches of all replicas as a layout does."""

    def __init__(self, data_split: DataSplit) -> None:
        self._data_split = data_split
        self._usual_counts: dict[str, tuple[int, int]] = {}

    def of(self, name: str, batches: Sequence[Any], number: int) -> list[Piece]:
        """The microbatches of the replicas' batches.

        Args:
            name: Name of the step.
            batches: One for each replica.
            number: Number of the latest training batch.
        """
        data_split, pieces = self._data_split, []
        for replica, (batch, share) in enumerate(zip(batches, _shares(name, batches), strict=True)):
            count, ranks = self._count(name, batch, number)
            parts, weights = split(batch, count, data_split.splitter) if count else ([batch], [1.0])
            for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                of_share = index // (count // ranks) if name == "training_step" and count else 0
                pieces.append(Piece(replica, replica * max(count, 1) + index, part, weight * share, of_share))
        if data_split.weight is not None and name == "training_step":
            counts = [float(data_split.weight(piece.batch)) for piece in pieces]
            pieces = [replace(p, weight=c / sum(counts)) for p, c in zip(pieces, counts, strict=True)]
        return pieces

    def _count(self, name: str, batch: Any, number: int) -> tuple[int, int]:
        """The number of microbatches, 0 for a step that does not split this batch; and of ranks that share them."""
        data_split, size = self._data_split, batch_size_of(batch)
        if name in data_split.unsplit_steps or (name == "training_step" and data_split.is_unsplit(number, size)):
            return 0, 1
        try:
            count = choose_count(batch, data_split.num_microbatches, data_split.num_stages, data_split.splitter)
        except BatchError:
            count = 1  # the layout refuses this batch; or runs it unsplit, if it chose the number itself
        ranks = data_split.shares if data_split.has_left_stages(number) else 1
        if size is not None and data_split.splitter is None:
            usual = self._usual_counts.setdefault(name, (size, count))
            if size >= usual[0]:
                self._usual_counts[name] = size, count
            else:
                count = -(-size // -(-usual[0] // usual[1]))  # a short batch: microbatches of the usual size
        if name == "training_step":
            count = (count if size is None else min(count, size // ranks)) * ranks
        return count, ranks


def joined(pieces: Sequence[Piece], batches: Sequence[Any]) -> list[Piece]:
    """The full batch of each replica as one piece."""
    return [full_piece([p for p in pieces if p.replica == index], batch) for index, batch in enumerate(batches)]


def full_piece(own: Sequence[Piece], batch: Any) -> Piece:
    """The full batch of a replica, with the sizes and numbers of its microbatches where these are known."""
    sizes = known_sizes([piece.batch for piece in own])
    numbers = tuple(piece.number for piece in own) if sizes else ()
    weight = sum(piece.weight for piece in own)
    return Piece(own[0].replica, own[0].number, batch, weight, sizes=sizes, numbers=numbers)


def known_sizes(batches: Sequence[Any]) -> tuple[int, ...]:
    """Number of samples of each batch; empty where one is unknown."""
    sizes = sizes_of(batches)
    return tuple(size for size in sizes if size is not None) if None not in sizes else ()


def _shares(name: str, batches: Sequence[Any]) -> list[float]:
    """The weights of replicas: in training all have the same, as under DDP; in evaluation their samples count."""
    sizes = known_sizes(batches)
    if name == "training_step" or not sizes:
        return [1 / len(batches)] * len(batches)
    return [size / sum(sizes) for size in sizes]
