"""Check in user code that all ranks read and write the same, since a read of remote values is a collective."""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.errors import NotOnAllRanks, RanksDisagree
from lightning_hybrid.step.tracing.mode import user_line

_ADVICE = (
    "Each rank holds a shard of the model, so read them on every rank, and put only the use of the number under a"
    " condition on the rank"
)
_ADVICE_ON_WRITES = (
    "Each replica holds a shard of it, so let all write the same (all_reduce what is computed from a batch), or set"
    " zero_stage=0, where each keeps its own value as under DDP"
)
Meet: TypeAlias = Callable[[str, dist.ProcessGroup], None]
# The first calls of each hook, this many, are compared although they read nothing, by [Note: comparing at the end].
_COMPARED_CALLS = 2
_END = "the end of the hook"
_ORDER = 1_000_003  # makes what is written first and last differ


class HookAgreement:
    """Compares the next operations of the ranks of one group, which run the same hooks.

    Attributes:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, meet: Meet, axis: str = "pipeline") -> None:
        """Take the ranks, the device where they communicate, and for messages what they are ranks of (``axis``).

        ``meet`` waits until the ranks of a group are about to make a call, and raises where some do not.
        """
        self._axis, self.group, self._device, self._meet = axis, group, device, meet
        self._num_checks = 0  # so far, the same on every rank
        self._calls: Counter[str] = Counter()
        self._reading: set[str] = set()  # hooks that have read something
        # What code has written since ranks last agreed: to which parameters, and a digest of all of it.
        self._written: dict[str, None] = {}
        self._digest = torch.zeros((), dtype=torch.int64, device=device)

    def has_written(self, name: str, digest: Tensor) -> None:
        """Compare what code has written to a full parameter, or its gradient, when ranks agree next.

        ``digest`` is of shape ().
        """
        self._written[name] = None
        self._digest = self._digest * _ORDER + digest.to(self._device)

    def agree_on_writes(self, hook: str) -> None:
        """Check that all ranks have written the same, if this one has written anything; then collective.

        Raises:
            RanksDisagree: They have not; raised on every rank.
        """
        if self._written:
            self.agree_on(hook, f"writes {', '.join(self._written)}")

    def agree_on(self, hook: str, what: str, why: str = "") -> None:
        """Check that all ranks are about to do the same, in the same line of user code, and wrote the same; collective.

        ``what`` is the next operation, ``why`` the one that needs it.

        Raises:
            RanksDisagree: They are not; raised on every rank.
        """
        self._num_checks += 1
        line = "" if what == _END else f" ({user_line()})"
        digest = zlib.crc32(f"{hook} {what} {line.rsplit('/', 1)[-1]}".encode())
        try:
            self._meet(f"{hook}: {what}{why and f' for {why}'}{line}", self.group)
        except NotOnAllRanks as error:
            self._num_checks -= 1
            advice = _ADVICE_ON_WRITES if self._written else _ADVICE
            raise RanksDisagree(f"{error}. {advice}", entry="hook-ranks") from None
        mine = torch.cat([torch.tensor([digest, self._num_checks], device=self._device), self._digest.reshape(1)])
        written, self._written, self._digest = list(self._written), {}, torch.zeros_like(self._digest)
        rows = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(rows, mine, group=self.group)
        read = torch.stack(rows).tolist()
        if all(row == read[0] for row in read):
            return
        if written and all(row[:2] == read[0][:2] for row in read):
            raise RanksDisagree(
                f"{hook}: what was written to {', '.join(written[:3])}{', ...' if written[3:] else ''} differs between"
                f" replicas. {_ADVICE_ON_WRITES}",
                entry="replica-writes",
            )
        texts = self.gather_objects(f"{what}{why and f' for {why}'}{line}")
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RanksDisagree(
            f"only some {self._axis} ranks read gradients, parameters or what is computed from them in {hook}, or they"
            f" read different ones. {listed}. {_ADVICE}",
            entry="hook-ranks",
        )

    @contextlib.contextmanager
    def checked_hook(self, hook: str, *, is_on_all_ranks: bool = True) -> Iterator[None]:
        """Run a hook inside, at whose end the ranks may compare whether they read the same; then collective.

        [Note: comparing at the end] A rank that reads while others do not waits for them. In the first calls of a hook,
        and in hooks that have read, the others come to compare and say so at once. A hook that never reads must not
        make the ranks wait for each other; should one rank begin to, it gives up after a while. So is one that may not
        be on all ranks (``is_on_all_ranks``).

        Raises:
            RanksDisagree: Some ranks read what others do not.
        """
        before = self._num_checks
        self._calls[hook] += 1
        yield
        if self._num_checks > before:
            self._reading.add(hook)
        if self._written or hook in self._reading or (is_on_all_ranks and self._calls[hook] <= _COMPARED_CALLS):
            self.agree_on(hook, _END)

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather an object from each rank; collective."""
        rows: list[Any] = [None] * self.group.size()
        dist.all_gather_object(rows, mine, group=self.group)
        return rows
