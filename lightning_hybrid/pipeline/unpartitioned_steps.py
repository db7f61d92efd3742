"""Evaluation steps that run on every rank: text generation, or a branch on a value of the model.

Every rank of a replica runs such a step whole, on the whole batch, as one process does. Parameters of other ranks are
gathered when they are read (``full_params``). That costs the time of one process and the messages, but no memory beyond
what is gathered, and whatever the step does is right.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.collectives.rank_agreement import NumberExchange, broadcast_buffer, digest
from lightning_hybrid.full_params.gather_on_read import LentParameters
from lightning_hybrid.full_params.value_locations import Contents
from lightning_hybrid.parts.local_shards import HeldParts
from lightning_hybrid.pipeline.results.log_capture import Entry, LogCapture
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.pipeline.stages.trace_cache import Call
from lightning_hybrid.pipeline.stages.unit_attribute_sync import share_attributes
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.instrument.instrument import drawing_as_stages, slow_attention
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.tracing.compiled_modules import Uncompiled


class UncutSteps:
    """Runs steps of one module whole.

    Attributes:
        names: Those that cannot be cut, so far.
        others_are_old: Whether a step has run in stages since the ranks had the same buffers, metrics and attributes.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: StagePlan,
        parts: Callable[[], HeldParts | None],
        replica: dist.ProcessGroup,
        randomness: KeyedRandomness,
        *,
        room: Callable[[], int],
        tell: Callable[[str, Exception], None],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Say who holds what.

        Args:
            root: The user's module.
            plan: Which ranks of the pipeline hold which parameters.
            parts: What this rank holds of each parameter, if it is not all.
            replica: All ranks that see the same batch.
            randomness: Keys what steps draw.
            room: Bytes that lent parameters may take in a step, as far as this rank knows.
            tell: Called with the name of a step that cannot be cut, and the reason, once.
            around: Entered around each, whatever else it runs in.
        """
        self.names: set[str] = set()
        self.others_are_old = True
        self._root, self._plan, self._parts, self._replica = root, plan, parts, replica
        self._randomness, self._room, self._tell, self._around = randomness, room, tell, around
        self._contents = Contents(replica, randomness.device)

    def adopt(self, name: str, reason: Exception) -> None:
        """From now on every rank runs a step whole."""
        self.names.add(name)
        self._tell(name, reason)

    def lent(self, meet: Callable[[str], None], room: int) -> LentParameters:
        """What a step must run in."""
        parameters = dict(self._root.named_parameters())
        device, holders = self._randomness.device, self._plan.ranks_of
        return LentParameters(parameters, holders, self._plan.group, self._parts(), device, meet=meet, room=room)

    def is_lent(self, name: str) -> bool:
        """Whether some rank of the replica has not the whole of a parameter."""
        return "tp" in self._cut_over(name) or len(self._plan.ranks_of(name)) < self._plan.group.size()

    def is_of_replicas(self, name: str) -> bool:
        """Whether replicas share out a parameter; they are not asked for their parts."""
        return not self._cut_over(name) <= {"tp", "cp"}

    def _cut_over(self, name: str) -> set[str]:
        """The axes over which a parameter is cut."""
        parts = self._parts()
        return set() if parts is None else {cut.axis for cut in parts.cuts if name in cut.placements}

    def lend(self, where: str) -> LentParameters:
        """What code outside of steps must run in, on all ranks of the replica; collective over them.

        Args:
            where: The code, for messages.

        Raises:
            RanksDisagree: Some ranks do not run it.
        """
        meet = partial(self._contents.meet, where)
        meet("reads the module")
        others_were_old = self.others_are_old
        self._refresh()
        self.others_are_old = others_were_old  # metrics of steps have not been shared
        return self.lent(meet, self._common_room())

    def _common_room(self) -> int:
        room = torch.tensor(self._room(), dtype=torch.int64, device=self._randomness.device)
        dist.all_reduce(room, dist.ReduceOp.MIN, group=self._replica)
        return int(room)

    def run(self, call: Call, batch: Any) -> tuple[Any, list[tuple[Entry, float]]]:
        """Run a step on a batch; collective over the replica.

        Args:
            call: The step.
            batch: All of it.

        Returns:
            What it returned, and what it logged with the first rank's values.

        Raises:
            RanksDisagree: The ranks do not do the same.
        """
        logs, meet = LogCapture(1), partial(self._contents.meet, call.name)
        room = self._common_room()
        self._refresh()
        uncompiled = Uncompiled()
        uncompiled.on()
        try:
            with (
                self._randomness.isolated(),
                drawing_as_stages(self._root, self._randomness, call.number, call.first),
                call.context(),
                self._around(),
                logs.microbatch(self._root, 0),
                slow_attention(),
                self.lent(meet, room),
            ):
                output = call.on(batch)
        finally:
            uncompiled.off()
        meet("ends the step")
        return output, self._shared(logs, batch)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Give every rank the buffers and attributes of layers that steps in stages have written elsewhere."""
        if not self.others_are_old:
            return
        if (parts := self._parts()) is not None:
            cut = {name for axis in parts.cuts for name in axis.buffers}
            for name, buffer in self._root.named_buffers():
                if name in cut:
                    buffer.copy_(parts.whole_of(name, buffer))
        if self._plan.num_ranks > 1:
            for buffer, home in self._plan.buffer_homes():
                broadcast_buffer(buffer, home, self._plan.group, self._randomness.device)
            share_attributes(self._plan, self._root)
        self.others_are_old = False

    def _shared(self, logs: LogCapture, batch: Any) -> list[tuple[Entry, float]]:
        """What was logged; the first rank's numbers, should kernels of another rank have rounded otherwise."""
        entries = logs.entries()
        keys = zlib.crc32("|".join(entry.name for entry in entries).encode())
        values = [entry.values[0] for entry in entries]
        exchange = NumberExchange(
            values, self._replica, names=keys, batch=digest(flatten(batch)[0]), device=self._randomness.device
        )
        return list(zip(entries, exchange.finish(), strict=True))
