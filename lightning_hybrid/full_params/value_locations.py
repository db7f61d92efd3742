"""Record of the pipeline ranks that have the content of a tensor, and collectives that send it to the others."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.collectives.rank_agreement import RanksDisagree
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.intercept_step_operations import user_line

Ranks = tuple[int, ...] | None  # None: all

_RECORD = "_hybrid_ranks"  # attribute of a tensor and of its storage: (token of the run, ranks, origins)
# A rank waits in a hook for the others to do the same no longer than this.
_PATIENCE = timedelta(seconds=120)
# The first calls of each hook, this many, are compared although they read nothing, by [Note: comparing at the end].
_COMPARED_CALLS = 2
_ALIGNMENT = 16  # bytes; in a message, tensors begin at multiples of it


def covers(ranks: Ranks, wanted: Ranks) -> bool:
    """Whether content that is on ``ranks`` is on all of the ranks in ``wanted``."""
    return ranks is None or (wanted is not None and set(wanted) <= set(ranks))


class ValueLocations:
    """Records the ranks of the tensors of one run; the record is the same on every rank of the pipeline.

    Attributes:
        num_checks: Number of times the ranks have compared their next operations.

    Records are attributes of tensors, and of storages made in a hook: ``copy.deepcopy`` and ``nn.Parameter(x)`` make
    tensors that no operation returns.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, axis: str = "pipeline") -> None:
        self._axis = axis
        self._group = group
        self._device = device
        self._rank = group.rank()
        self._token = object()
        self._placed: dict[int, tuple[Tensor, Ranks, frozenset[str]]] = {}
        self.num_checks = 0
        self._calls: Counter[str] = Counter()
        self._reading: set[str] = set()  # hooks that have read something

    def set_parameter_ranks(self, parameter: Tensor, ranks: Sequence[int], fqn: str) -> None:
        """Record that ``parameter`` is on these ranks for the whole run, whatever is assigned to its data."""
        self._placed[id(parameter)] = parameter, self._limited(ranks), frozenset({fqn})

    def record(
        self,
        tensor: Tensor,
        ranks: Sequence[int],
        inputs: Sequence[Tensor],
        *,
        only_tensor: bool = False,
    ) -> None:
        """Record that the content of ``tensor`` is on these ranks.

        Args:
            tensor: A gradient, or the result of an operation.
            ranks: Pipeline ranks.
            inputs: Of the operation; a view of one of them shares its storage, the rest of which may be on other ranks.
            only_tensor: Whether other tensors may share the storage.
        """
        # The origins are parameters, not operations: ranks may compute a result in other ways, in lists or one by one.
        origins = frozenset().union(*(self._origins_of(other) for other in inputs))
        record = self._token, self._limited(ranks), origins
        setattr(tensor, _RECORD, record)
        storage = _storage(tensor)
        if storage is not None and not only_tensor and not any(_storage(other) is storage for other in inputs):
            setattr(storage, _RECORD, record)

    def is_recorded(self, tensor: Tensor) -> bool:
        """Whether ranks of ``tensor`` are recorded."""
        return id(tensor) in self._placed or self._record_of(tensor) is not None

    def ranks_of(self, tensor: Tensor) -> Ranks:
        """The ranks with the content of ``tensor``; all (None) if nothing is recorded."""
        if id(tensor) in self._placed:
            return self._placed[id(tensor)][1]
        record = self._record_of(tensor)
        return None if record is None else record[1]

    def _origins_of(self, tensor: Tensor) -> frozenset[str]:
        """FQNs of the parameters from which ``tensor``, or the parameter of this gradient, was computed."""
        if id(tensor) in self._placed:
            return self._placed[id(tensor)][2]
        record = self._record_of(tensor)
        return frozenset() if record is None else record[2]

    def _record_of(self, tensor: Tensor) -> Any:
        for owner in (tensor, _storage(tensor)):
            record = getattr(owner, _RECORD, None)
            if record is not None and record[0] is self._token:
                return record
        return None

    def _limited(self, ranks: Sequence[int]) -> Ranks:
        return None if len(set(ranks)) == self._group.size() else tuple(sorted(set(ranks)))

    def agree_on(self, hook: str, what: str, why: str = "") -> None:
        """Check that all ranks are about to do the same, in the same line of user code; collective.

        Args:
            hook: Name of the hook.
            what: The next operation, for comparison and messages.
            why: The operation that needs it, for messages.

        Raises:
            RanksDisagree: They are not; raised on every rank.
        """
        self.num_checks += 1
        line = user_line()
        digest = zlib.crc32(f"{hook} {what} {line.rsplit('/', 1)[-1]}".encode())
        mine = torch.tensor([digest, self.num_checks], device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        work = dist.all_gather(rows, mine, group=self._group, async_op=True)
        begin = time.monotonic()
        try:
            assert work is not None
            work.wait(_PATIENCE)
        except (RuntimeError, dist.DistError) as error:
            if time.monotonic() - begin < 0.9 * _PATIENCE.total_seconds():
                raise  # the other ranks are gone
            raise RanksDisagree(
                f"{hook}: {self._axis} rank {self._rank} {what}{why and f' for {why}'} ({line}), and the other ranks"
                f" did not within {_PATIENCE.total_seconds():.0f} s. Each rank holds a shard of the model, so read"
                " gradients and parameters on every rank, and put only what is done with the number under a condition"
                " on the rank"
            ) from error
        if all(row.tolist() == rows[0].tolist() for row in rows):
            return
        texts = self.gather_objects(f"{what}{why and f' for {why}'} ({line})")
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RanksDisagree(
            f"only some {self._axis} ranks read gradients, parameters or what is computed from them in {hook}, or they"
            f" read different ones. {listed}. Each rank holds a shard of the model, so read them on every rank, and put"
            " only what is done with the number under a condition on the rank"
        )

    @contextlib.contextmanager
    def checked_hook(self, hook: str) -> Iterator[None]:
        """Run a hook inside, at whose end the ranks may compare whether they read the same; then collective.

        [Note: comparing at the end] A rank that reads while others do not waits for them. In the first calls of a hook,
        and in hooks that have read, the others come to compare and say so at once. A hook that never reads must not
        make the ranks wait for each other; should one rank begin to, it gives up after a while.

        Raises:
            RanksDisagree: Some ranks read what others do not.
        """
        before = self.num_checks
        self._calls[hook] += 1
        yield
        if self.num_checks > before:
            self._reading.add(hook)
        if hook in self._reading or self._calls[hook] <= _COMPARED_CALLS:
            self.agree_on(hook, "leaves the hook")

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather an object from each rank; collective."""
        rows: list[Any] = [None] * self._group.size()
        dist.all_gather_object(rows, mine, group=self._group)
        return rows

    def contents_for_file(
        self, hook: str, tensors: Sequence[Tensor], most_elements: int, *, keep: bool
    ) -> list[Tensor]:
        """The contents of tensors in CPU memory, on the first rank if ``keep``; elsewhere empty tensors; collective.

        Args:
            hook: For messages.
            tensors: The same on every rank.
            most_elements: Number of elements to send at a time.
            keep: Whether this rank uses them.
        """
        keep = keep and self._rank == 0
        contents: dict[int, Tensor] = {}
        sent: list[list[Tensor]] = [[]]
        for tensor in tensors:
            ranks = self.ranks_of(tensor)
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
            tensors: At least one; the same on every rank.
        """
        sources = [(self.ranks_of(tensor) or (0,))[0] for tensor in tensors]
        listed = [
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} of rank {source}, made of"
            f" {_brief(', '.join(sorted(self._origins_of(tensor))))}"
            for tensor, source in zip(tensors, sources, strict=True)
        ]
        # Python tries a subclass first: a > b may arrive as b < a on a rank where b is a stand-in.
        order = sorted(range(len(tensors)), key=lambda index: (sources[index], listed[index]))
        self.agree_on(hook, f"reads {_brief('; '.join(listed[index] for index in order))}", why)
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


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None
