"""Agreement of the ranks of a replica: digests of their batches, and one small message with the numbers of a step."""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.objects import gather_on_all
from lightning_hybrid.errors import RanksDisagree, StepError
from lightning_hybrid.graph.step_graph import Node
from lightning_hybrid.host_copies import HostReads, bytes_of, is_on_host
from lightning_hybrid.shared_memory.transfers import start_all_gather
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.objects.tensors import as_plain_tensor
from lightning_hybrid.step.standins.numbers import ABSENT, is_known

RANKS = {"pp": "pipeline", "cp": "context", "tp": "tensor"}  # names of ranks by axis
_HEADER = 4
_BROKEN = -1.0  # sent in place of the digest of the step
_SLOTS = 124
_DIGESTED = 4096  # elements used per tensor, about
# Indices in the header, the more informative ones first.
_COMPARED = ((2, "batch"), (3, "step"), (0, "number of logged values"), (1, "set of logged keys"))


class StepBroken(Exception):
    """A pipeline has aborted a step and undone it: the step does not do what it was recorded to do.

    Attributes:
        reason: The error of this rank; None if another rank aborted.
        traces: Those that the step did not follow; empty where only other replicas have aborted it.
        arguments: Arguments of the step.
    """

    def __init__(self, reason: Exception | None, traces: Sequence[object] = ()) -> None:
        super().__init__(reason)
        self.reason, self.traces = reason, traces
        self.arguments: Sequence[object] = ()

    def of(self, arguments: Sequence[object]) -> StepBroken:
        """Keep the arguments of the step."""
        self.arguments = arguments
        return self

    def agreed(self, group: dist.ProcessGroup) -> Exception:
        """Return the error of the first rank of a group that has one; collective over it."""
        rows: list[str | None] = [None] * group.size()
        text = None if self.reason is None else f"{type(self.reason).__name__}: {self.reason}"
        dist.all_gather_object(rows, text, group=group)
        return StepError(next(filter(None, rows), "it has changed on another rank"), entry="on-rank")


class NumberExchange:
    """Exchange of numbers; a rank passes ``ABSENT`` for a number that it does not have. It starts at once."""

    def __init__(
        self,
        numbers: Sequence[float],
        group: dist.ProcessGroup,
        *,
        names: int,
        batch: int,
        trace: int = 0,
        is_broken: bool = False,
        device: torch.device,
    ) -> None:
        """Start the exchange of numbers, of one count and order on every rank, and digests; or of a broken step."""
        self._numbers = list(numbers)
        self._group = group
        self._device = device
        self._gathered: Callable[[], list[Tensor]] | None = None
        self._reads, self._number = HostReads(), -1  # of the rows, once they have arrived
        if group.size() > 1:
            state = _BROKEN if is_broken else float(trace)
            first = [float(len(numbers)), float(names), float(batch), state, *numbers[:_SLOTS]]
            self._gathered = self._start(first + [ABSENT] * (_HEADER + _SLOTS - len(first)))

    def _start(self, row: list[float]) -> Callable[[], list[Tensor]]:
        return start_all_gather(torch.tensor(row, dtype=torch.float64, device=self._device), self._group)

    def arrive(self, reads: HostReads) -> Tensor:
        """Let the device wait for the rows, and ``reads`` read them.

        Returns:
            Whether a rank aborted the step, as a number on the device, of shape (1,).
        """
        if self._gathered is None:
            return torch.zeros(1, device=self._device)
        rows = torch.stack(self._gathered())
        self._reads, self._number = reads, reads.add(rows)
        return (rows[:, 3] == _BROKEN).any().reshape(1).to(torch.float32)

    def finish(self) -> list[float]:
        """Wait; returns each number as the first rank that has it passed it, ``ABSENT`` if none did.

        Raises:
            StepBroken: A rank aborted the step.
            RanksDisagree: The batch or the names of the numbers differ between ranks.
        """
        if self._gathered is None:
            return self._numbers
        if self._number < 0:
            self.arrive(self._reads)
        rows = self._reads.take(self._number).tolist()
        if any(row[3] == _BROKEN for row in rows):
            raise StepBroken(None)
        for index, what in _COMPARED:
            sent = [row[index] for row in rows]
            if len(set(sent)) > 1:
                if index == 2:
                    raise batches_differ(sent, RANKS["pp"])
                if index == 3:
                    raise RanksDisagree(
                        f"the operations of the step differ between the ranks of one replica (checksums {sent} on"
                        f" pipeline ranks 0 to {len(sent) - 1}): they depend on a condition on the rank, or on random"
                        " numbers with different seeds; let all ranks take the same branches",
                        entry="operations-differ",
                    )
                raise RanksDisagree(
                    f"the {what} differs between the ranks of one replica: {sent}; log the same keys on every rank",
                    entry="log-keys",
                )
        rows = [row[_HEADER:] for row in rows]
        if len(self._numbers) > _SLOTS:
            more = self._start(self._numbers[_SLOTS:])()
            rows = [row + rest.tolist() for row, rest in zip(rows, more, strict=True)]
        count = len(self._numbers)
        return [_first_known([row[i] for row in rows]) for i in range(count)]


def _first_known(numbers: Sequence[float]) -> float:
    """The first number that a rank has; a NaN only if no rank has another one: it may be computed from absent ones."""
    known = [number for number in numbers if is_known(number)]
    return next((number for number in known if not math.isnan(number)), known[0] if known else ABSENT)


def agree_on_operations(step: str, nodes: Sequence[Node], group: dist.ProcessGroup, axis: str) -> None:
    """Check that ranks along an axis have recorded the same operations; collective over their group.

    Raises:
        RanksDisagree: They have not; on every rank, with the lines of the first ones that differ.
    """
    mine = [(node.name, node.line) for node in nodes]
    checksums = gather_on_all(zlib.crc32(repr([name for name, _ in mine]).encode()), group)
    if len(set(checksums)) == 1:
        return
    rows = gather_on_all(mine, group)
    other = next(rank for rank, checksum in enumerate(checksums) if checksum != checksums[0])
    pairs = itertools.zip_longest(rows[0], rows[other], fillvalue=("", ""))
    first, second = next(pair for pair in pairs if pair[0][0] != pair[1][0])
    raise RanksDisagree(
        f"ranks of one replica take different paths through {step}: {RANKS[axis]} rank 0 {_runs(*first)}, and rank"
        f" {other} {_runs(*second)}. The code decides by the rank (LOCAL_RANK, RANK, mesh.rank), or by random numbers"
        " of other seeds; let both take the same path: self.global_rank is the same on all ranks of a replica",
        entry="operations-differ",
    )


def _runs(name: str, line: str) -> str:
    what = f"calls {name[1:]}" if name.startswith("@") else f"runs {name}" if name else "ends"
    return f"{what} ({line})" if line else what


def batches_differ(checksums: Sequence[float], ranks: str, shapes: Sequence[object] = ()) -> RanksDisagree:
    """The error for ``ranks`` of one replica whose batches have these different checksums, and shapes, by rank."""
    differ = len(set(map(repr, shapes))) > 1
    found, advice = f"checksums {checksums}", "seed samplers and augmentation without the rank"
    if differ:
        found, advice = f"shapes {', '.join(map(str, shapes))}", "give their loaders one batch size"
    return RanksDisagree(
        f"the batch differs between the ranks of one replica ({found} on {ranks} ranks 0 to {len(checksums) - 1});"
        " every rank must draw the same samples: call seed_everything(...) before random data are generated, and"
        f" {advice}",
        entry="batch-differs",
    )


def losses_differ(losses: Sequence[float | None], ranks: str) -> RanksDisagree:
    """The error for ``ranks`` of one replica whose steps returned these losses, by rank."""
    shown = ", ".join("None" if loss is None else f"{loss:.7g}" for loss in losses)
    return RanksDisagree(
        f"the loss of training_step differs between the ranks of one replica ({shown} on {ranks} ranks 0 to"
        f" {len(losses) - 1}): it depends on a condition on the rank, or on random numbers with different seeds; every"
        " rank must compute the same loss, or return None",
        entry="losses-differ",
    )


def digest(leaves: Sequence[object]) -> int:
    """A number that is equal for equal batches, and almost surely for no others; cheap on large tensors."""
    return Digest(leaves, HostReads()).number()


class Digest:
    """A digest of leaves as they are now, which the host reads later where they are on a device."""

    def __init__(self, leaves: Sequence[object], reads: HostReads) -> None:
        """Digest the leaves in host memory; copy what is digested of the others, on their devices."""
        self._reads = reads
        self._parts = [(shape, *self._begin(part)) for shape, part in _digested(leaves)]

    def _begin(self, part: Tensor | float) -> tuple[float, bool]:
        """The checksum of a part, or the number of a read that has begun, and which of the two it is."""
        if not isinstance(part, Tensor):
            return part, False
        return (_checksum(part), False) if is_on_host(part) else (self._reads.add(part), True)

    def number(self) -> int:
        """The digest."""
        found = hashlib.blake2b(digest_size=6)  # exact in float64
        for shape, number, is_waiting in self._parts:
            content = _checksum(self._reads.take(int(number))) if is_waiting else number
            found.update(repr((shape, content)).encode())
        return int.from_bytes(found.digest(), "little")


def _checksum(part: Tensor) -> int:
    return zlib.crc32(bytes_of(part).numpy().tobytes())


def _digested(leaves: Sequence[object]) -> Iterator[tuple[tuple[int, ...], Tensor | float]]:
    """Each tensor's shape and some of its elements, and each number."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout is torch.strided:
            flat = as_plain_tensor(leaf).detach().reshape(-1)
            yield tuple(leaf.shape), flat[:: max(1, flat.numel() // _DIGESTED)].clone()
        elif isinstance(leaf, int | float):
            yield (), leaf
        elif not isinstance(leaf, Tensor):
            yield from _digested(tensors_inside(leaf))
