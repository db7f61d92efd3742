"""Agreement of the ranks of a replica after a step: one small message of numbers, and broadcasts of tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.mesh import as_sent
from lightning_hybrid.shared_memory.rows import begin_to_gather
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.objects.tensor_subclasses import as_plain

_HEADER = 4
_BROKEN = -1.0  # in place of the form of the step
_SLOTS = 124
# Places in the header, the more telling ones first.
_COMPARED = ((2, "batch"), (3, "step"), (0, "number of logged values"), (1, "set of logged keys"))


class RanksDisagree(RuntimeError):
    """The ranks of one replica do not see the same batch, or do not do the same."""


def other_batches(checksums: Sequence[float]) -> RanksDisagree:
    """The error where ranks of one replica have other batches; args: checksums: of the batches, by rank."""
    return RanksDisagree(
        f"the batch differs between the ranks of one replica (checksums {checksums} on pipeline ranks 0 to"
        f" {len(checksums) - 1}); every rank must draw the same samples: call seed_everything(...) before data are made"
        " at random, and seed samplers and augmentation without the rank"
    )


class StepBroken(Exception):
    """A pipeline has left a training step, of which nothing stays: the step does not do what it was recorded to do.

    Attributes:
        reason: What this rank has found; None if another rank has.
        arguments: Of the step.
    """

    def __init__(self, reason: Exception | None) -> None:
        """Args: reason: see the class."""
        super().__init__(reason)
        self.reason = reason
        self.arguments: Sequence[object] = ()


class NumberExchange:
    """Numbers that each rank knows in part, NaN where it does not; under way from the start."""

    def __init__(
        self,
        numbers: Sequence[float],
        group: dist.ProcessGroup,
        *,
        names: int,
        batch: int,
        form: int = 0,
        is_broken: bool = False,
        device: torch.device,
    ) -> None:
        """Begin to exchange.

        Args:
            numbers: As many and in the same order on every rank.
            group: The ranks of one replica.
            names: A digest of what the numbers mean.
            batch: A digest of the batch; all ranks of a replica must see the same.
            form: A digest of what the step does.
            is_broken: Whether this rank has none of the numbers, as the step broke.
            device: Where the group communicates.
        """
        self._numbers = list(numbers)
        self._group = group
        self._device = device
        self._gathered: Callable[[], list[Tensor]] | None = None
        if group.size() > 1:
            what = _BROKEN if is_broken else float(form)
            first = [float(len(numbers)), float(names), float(batch), what, *numbers[:_SLOTS]]
            self._gathered = self._start(first + [math.nan] * (_HEADER + _SLOTS - len(first)))

    def _start(self, row: list[float]) -> Callable[[], list[Tensor]]:
        return begin_to_gather(torch.tensor(row, dtype=torch.float64, device=self._device), self._group)

    def finish(self) -> list[float]:
        """For each number the first rank's that knows it, NaN if none does.

        Raises:
            StepBroken: The step broke on a rank.
            RanksDisagree: The batch or the meaning of the numbers differs between ranks.
        """
        if self._gathered is None:
            return self._numbers
        rows = [row.tolist() for row in self._gathered()]
        if any(row[3] == _BROKEN for row in rows):
            raise StepBroken(None)
        for place, what in _COMPARED:
            seen = [row[place] for row in rows]
            if len(set(seen)) > 1:
                if place == 2:
                    raise other_batches(seen)
                raise RanksDisagree(
                    f"what the step does differs between the ranks of one replica ({seen} on pipeline ranks 0 to"
                    f" {len(seen) - 1}): a condition on the rank, or on random numbers that are not seeded alike,"
                    " decides; let all ranks decide alike"
                    if place == 3
                    else f"the {what} differs between the ranks of one replica: {seen}; log the same keys on every rank"
                )
        rows = [row[_HEADER:] for row in rows]
        if len(self._numbers) > _SLOTS:
            more = self._start(self._numbers[_SLOTS:])()
            rows = [row + rest.tolist() for row, rest in zip(rows, more, strict=True)]
        count = len(self._numbers)
        return [next((row[i] for row in rows if not math.isnan(row[i])), math.nan) for i in range(count)]


def share_tensor(
    value: Value, content: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """One tensor, from the pipeline rank ``source`` that has it to all others.

    Args:
        value: What is known of it from the recording.
        content: The tensor on its rank, None elsewhere.
        source: Pipeline rank.
        group: The ranks of one pipeline.
        device: Where the group communicates.
    """
    if group.size() == 1:
        assert content is not None
        return content.detach()
    shape: Sequence[int] = value.shape
    if value.dynamic:
        header = torch.zeros(9, dtype=torch.int64, device=device)
        if content is not None:
            header[0] = content.dim()
            header[1 : 1 + content.dim()] = torch.tensor(content.shape)
        dist.broadcast(header, group=group, group_src=source)
        dims, *sizes = header.tolist()
        shape = sizes[:dims]
    if content is None:
        content = torch.empty(shape, dtype=getattr(torch, value.dtype), device=device)
    content = content.detach().to(device).resolve_conj().resolve_neg().contiguous()
    dist.broadcast(as_sent(content), group=group, group_src=source)
    return content.to(value.device) if value.device else content


def broadcast_buffer(buffer: Tensor, home: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give every rank of a group the content that a buffer has on one; collective over the group.

    Args:
        buffer: On every rank.
        home: Rank in the group.
        group: The ranks.
        device: Where the group communicates.
    """
    content = buffer.detach().to(device).contiguous()
    dist.broadcast(as_sent(content), group=group, group_src=home)
    if content.data_ptr() != buffer.data_ptr():
        buffer.detach().copy_(content)


def digest(leaves: Sequence[object]) -> int:
    """A number that two batches share only if they (almost surely) are equal; cheap on large tensors."""
    total = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout is torch.strided:
            flat = as_plain(leaf).detach().reshape(-1)
            part = flat[:: max(1, flat.numel() // _DIGESTED)].contiguous()
            if part.is_complex() or part.is_conj():
                part = torch.view_as_real(part.resolve_conj())
            content = part.view(torch.uint8).cpu().numpy().tobytes()
            total = hash((total, tuple(leaf.shape), zlib.crc32(content)))
        elif isinstance(leaf, int | float):
            total = hash((total, leaf))
        elif inside := [] if isinstance(leaf, Tensor) else tensors_inside(leaf):
            total = hash((total, digest(inside)))
    return total & 0xFFFFFFFFFFFF  # exact in float64


_DIGESTED = 4096  # elements looked at per tensor, about
