"""Broadcasts of tensors that only some pipeline ranks have, from the first rank that has each."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.locations import ValueLocations
from lightning_hybrid.step.standins.absent_tensors import is_absent

_ALIGNMENT = 16  # bytes; in a message, tensors begin at multiples of it


class RemoteValues:
    """Sends the contents of tensors to the ranks that lack them."""

    def __init__(
        self, locations: ValueLocations, agreement: HookAgreement, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Take the recorded locations, the check before each message, the ranks, and where they communicate."""
        self._locations, self._agreement, self._group, self._device = locations, agreement, group, device
        self._rank = group.rank()

    def contents_for_file(
        self, hook: str, tensors: Sequence[Tensor], most_elements: int, *, keep: bool
    ) -> list[Tensor]:
        """The contents of tensors on the first rank, if ``keep``; elsewhere tensors of shape (0,); collective.

        Those of other ranks are received into CPU memory.

        Args:
            hook: Name of the hook, for messages.
            tensors: Of any shapes, which the contents have too; the same tensors on every rank.
            most_elements: Number of elements to send at a time.
            keep: Whether this rank uses the contents.
        """
        keep = keep and self._rank == 0
        contents: dict[int, Tensor] = {}
        sent: list[list[Tensor]] = [[]]
        for tensor in tensors:
            ranks = self._locations.ranks_of(tensor)
            if ranks is None or 0 in ranks:
                contents[id(tensor)] = tensor
            elif sum(other.numel() for other in sent[-1]) + tensor.numel() > most_elements:
                sent.append([tensor])
            else:
                sent[-1].append(tensor)
        for batch in sent:
            for tensor, content in zip(batch, self.fetch(hook, "a checkpoint", batch) if batch else [], strict=True):
                if keep:
                    contents[id(tensor)] = content.to("cpu", copy=True)
        return [contents[id(tensor)] if keep else torch.empty(0, dtype=tensor.dtype) for tensor in tensors]

    def fetch(self, hook: str, why: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Broadcast tensors that some ranks lack, each from the first rank that has it; collective.

        Args:
            hook: Name of the hook.
            why: The operation that needs them, for messages.
            tensors: At least one, of any shapes; the same on every rank.

        Returns:
            Copies of the same shapes.
        """
        sources = [(self._locations.ranks_of(tensor) or (0,))[0] for tensor in tensors]
        listed = [
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} of rank {source}, made of"
            f" {_brief(', '.join(sorted(self._locations.origins_of(tensor))))}"
            for tensor, source in zip(tensors, sources, strict=True)
        ]
        # Python tries a subclass first: a > b may arrive as b < a on a rank where b is a stand-in.
        order = sorted(range(len(tensors)), key=lambda index: (sources[index], listed[index]))
        self._agreement.agree_on(hook, f"reads {_brief('; '.join(listed[index] for index in order))}", why)
        contents: list[Tensor | None] = [None] * len(tensors)
        for source in sorted(set(sources)):
            members = [index for index in order if sources[index] == source]
            sizes = [tensors[i].numel() * tensors[i].element_size() for i in members]
            starts = [0]
            for size in sizes:
                starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
            message = torch.zeros(starts[-1], dtype=torch.uint8, device=self._device)
            if source == self._rank:
                for index, start, size in zip(members, starts, sizes, strict=False):
                    assert not is_absent(tensors[index])
                    message[start : start + size] = _bytes_of(tensors[index])
            dist.broadcast(message, group=self._group, group_src=source)
            # Also a copy on the source rank: a tensor that is on all ranks must not be a view of one that is not.
            for index, start, size in zip(members, starts, sizes, strict=False):
                content = message[start : start + size].view(tensors[index].dtype)
                contents[index] = content.view(tensors[index].shape)
        return [content for content in contents if content is not None]


def _brief(text: str) -> str:
    """The text, or if it is long its beginning and a digest."""
    return text if len(text) < 200 else f"{text[:160]}... ({zlib.crc32(text.encode()):x})"


def _bytes_of(tensor: Tensor) -> Tensor:
    content = tensor.detach()
    content = content.to_dense() if content.layout is not torch.strided else content
    return content.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
