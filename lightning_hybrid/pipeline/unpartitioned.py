"""Unpartitioned evaluation steps, which run on every rank: text generation, or a branch on a value of the model.

Every rank of a replica runs such a step unpartitioned, on the full batch, as a single process does. Parameters of other
ranks are gathered when they are read (``params.reads``). That costs the time of one process and the messages, but no
memory beyond what is gathered, and the step may do anything.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.agreement import NumberExchange, digest
from lightning_hybrid.collectives.tensors import broadcast_buffer
from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.params.reads.agreement import HookAgreement, Meet
from lightning_hybrid.params.reads.gather import Stages
from lightning_hybrid.params.reads.steps import StepReads
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.pipeline.logs import Entry, LogCapture
from lightning_hybrid.pipeline.stages.plan import StagePlan, buffer_owners
from lightning_hybrid.pipeline.stages.traces import Call
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.objects.pytree import flatten, map_tensors
from lightning_hybrid.step.objects.tensors import detached_copy
from lightning_hybrid.step.standins.kernels import slow_attention
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.compiled import EagerSwitch
from lightning_hybrid.step.tracing.functions import functions_with_repeated_draws, user_functions
from lightning_hybrid.step.tracing.instrument import draw_as_stages, patched_checkpointing
from lightning_hybrid.step.tracing.mode import CurrentRun
from lightning_hybrid.techniques.technique import Active

_PLAIN = (bool, int, float, str, type(None))


class UnpartitionedSteps:
    """Runs steps of one module unpartitioned, with parameters gathered on read.

    Attributes:
        names: Names of the steps that cannot be partitioned, so far.
        has_recorded: Called after each step that this rank has recorded.
        has_stale_copies: Whether a step has run in stages since the ranks had the same buffers, metrics and attributes.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: StagePlan,
        parts: Callable[[], LocalShards],
        replica: dist.ProcessGroup,
        randomness: KeyedRandomness,
        meet: Meet,
        *,
        room: Callable[[], int],
        warn: Callable[[str, Exception], None],
        has_recorded: Callable[[], None],
        fails_alone: Callable[[], bool],
    ) -> None:
        """Set up for one module, whose local shards ``parts`` returns; ranks of a ``replica`` receive the same batch.

        ``room`` returns how many bytes gathered parameters may take in a step on this rank; ``warn`` is called once
        with the name of a step that cannot be partitioned, and the reason; ``fails_alone`` returns whether another rank
        of the replica has recorded a step that this one could not.
        """
        self.names: set[str] = set()
        self.has_stale_copies = True
        self._root, self._plan, self._parts, self._replica = root, plan, parts, replica
        self._randomness, self._room, self._warn, self.active = randomness, room, warn, Active()
        self.has_recorded, self._fails_alone = has_recorded, fails_alone
        self._agreement = HookAgreement(replica, randomness.device, meet)

    def mark_stale(self) -> None:
        """A step has run in stages, whose ranks alone have what it has written."""
        self.has_stale_copies = True

    def add_step(self, name: str, reason: Exception, *, is_on_all_ranks: bool = False) -> None:
        """Let every rank run a step unpartitioned from now on; raise the reason where other ranks have recorded it.

        ``is_on_all_ranks`` tells that they are known to come here too.
        """
        if not is_on_all_ranks and self._fails_alone():
            raise reason
        self.names.add(name)
        self._warn(name, reason)

    def gathering_mode(self, agree_on: Callable[[str], None], room: int) -> StepReads:
        """The mode that gathers parameters when a step reads them."""
        stages = Stages(self._plan.ranks_of, self._plan.group, self._randomness.device)
        parameters, shards = dict(self._root.named_parameters()), self._parts()
        return StepReads(parameters, shards, stages, agree_on, room=room)

    def is_gathered_on_read(self, name: str) -> bool:
        """Whether some rank of the replica does not hold the full parameter."""
        return "tp" in self._sharded_axes(name) or len(self._plan.ranks_of(name)) < self._plan.group.size()

    def is_sharded_over_replicas(self, name: str) -> bool:
        """Whether a parameter is sharded over replicas; their shards are not gathered here."""
        return not self._sharded_axes(name) <= {"tp", "cp"}

    def _sharded_axes(self, name: str) -> set[str]:
        """The mesh axes over which a parameter is sharded."""
        return {cut.axis for cut in self._parts().shardings if name in cut.placements}

    def gather_when_read(self, where: str) -> StepReads:
        """The mode that gathers parameters which code outside of steps reads; collective over the replica."""
        agree_on = partial(self._agreement.agree_on, where)
        agree_on("reads the module")
        had_stale_copies = self.has_stale_copies
        self._refresh()
        self.has_stale_copies = had_stale_copies  # metrics of steps have not been shared
        return self.gathering_mode(agree_on, self._common_room())

    def _common_room(self) -> int:
        room = torch.tensor(self._room(), dtype=torch.int64, device=self._randomness.device)
        dist.all_reduce(room, dist.ReduceOp.MIN, group=self._replica)
        return int(room)

    def run(self, call: Call) -> tuple[Any, list[tuple[Entry, float]]]:
        """Run a step on its batch; collective over the replica.

        Returns the output, and the logged entries with the values of the first rank.
        """
        logs, agree_on = LogCapture(1), partial(self._agreement.agree_on, call.name)
        room = self._common_room()
        self._refresh()
        uncompiled = EagerSwitch()
        uncompiled.on()
        try:
            with (
                self._randomness.isolated(),
                draw_as_stages(self._root, self._randomness, call.number, call.first),
                call.context(),
                self.active.unpartitioned(),
                logs.microbatch(self._root, 0),
                slow_attention(),
                self.gathering_mode(agree_on, room),
            ):
                output = call.on(call.batch)()
        finally:
            uncompiled.off()
        agree_on("ends the step")
        return output, self._shared(logs, call.batch)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Broadcast the buffers and attributes of layers that partitioned steps have written on one rank."""
        if not self.has_stale_copies:
            return
        if self._plan.num_ranks > 1:
            for buffer, owner in buffer_owners(self._plan):
                broadcast_buffer(buffer, owner, self._plan.group, self._randomness.device)
            sync_unit_attributes(self._plan, self._root)
        self.has_stale_copies = False

    def _shared(self, logs: LogCapture, batch: Any) -> list[tuple[Entry, float]]:
        """The logged entries, with the first rank's numbers in case kernels of another rank have rounded otherwise."""
        entries = logs.entries()
        keys = zlib.crc32("|".join(entry.name for entry in entries).encode())
        values = [entry.values[0] for entry in entries]
        exchange = NumberExchange(
            values, self._replica, names=keys, batch=digest(flatten(batch)[0]), device=self._randomness.device
        )
        return list(zip(entries, exchange.finish(), strict=True))


def sync_unit_attributes(plan: StagePlan, root: nn.Module) -> None:
    """All-gather the plain attributes of layers from the ranks that run them; collective over the pipeline."""
    local = io.BytesIO()
    owners = _owners(plan)
    modules = dict(root.named_modules(remove_duplicate=False))
    torch.save({fqn: _plain(modules[fqn]) for fqn, owner in owners.items() if owner == plan.rank}, local)
    rows: list[Any] = [None] * plan.num_ranks
    dist.all_gather_object(rows, local.getvalue(), group=plan.group)
    for rank, row in enumerate(rows):
        if rank == plan.rank:
            continue
        for fqn, attributes in torch.load(io.BytesIO(row), map_location="cpu", weights_only=True).items():
            for name, value in attributes.items():
                modules[fqn].__dict__[name] = _on_device_of(modules[fqn].__dict__.get(name), value)


def _owners(plan: StagePlan) -> dict[str, int]:
    """The rank that runs a module inside a unit, by FQN."""
    if plan.first is None:
        return {}
    units = plan.first.recording.units
    owners: dict[str, int] = {}
    for fqn, stage in plan.first.unit_stages.items():
        for inner, _ in units[fqn].named_modules(prefix=fqn):
            owners.setdefault(inner, plan.rank_of(stage))
    return owners


def _plain(module: nn.Module) -> Mapping[str, Any]:
    return {name: map_tensors(detached_copy, v) for name, v in vars(module).items() if name[:1] != "_" and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and not is_absent(value)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) in _PLAIN for key in value) and all(map(_is_plain, value.values()))
    return type(value) in _PLAIN


def _on_device_of(before: Any, value: Any) -> Any:
    """The received value, on the device of the attribute before."""
    if isinstance(before, Tensor) and isinstance(value, Tensor) and not is_absent(before):
        return value.to(before.device)
    return value


class PlainStepRandomness:
    """Keys the random numbers that the user's modules and functions draw."""

    def __init__(self, root: nn.Module, randomness: KeyedRandomness, guards: ReadGuards) -> None:
        """Set up for one module; ``guards`` tracks whether user code or a backward runs."""
        self._root, self._randomness, self._guards = root, randomness, guards
        self._drawing: dict[str, dict[str, nn.Module]] = {}  # modules that draw in a step, by the name of the step

    @contextlib.contextmanager
    def keyed(self, name: str, number: int, first: int, index: int = 0) -> Iterator[None]:
        """Draw the random numbers of pipeline stages inside.

        The first run of a step is observed everywhere, and shows which modules draw. Later runs are observed in these
        only; other code draws from the generators as the microbatch has seeded them.
        """
        root, randomness, microbatch = self._root, self._randomness, first + index
        if name not in self._drawing:
            again = self._guards.as_user_code
            with draw_as_stages(root, randomness, number, microbatch, again), randomness.recording_modules() as codes:
                yield
            named = {fqn: module for fqn, module in root.named_modules() if zlib.crc32(fqn.encode()) in codes}
            self._drawing[name] = {"": root, **named} if 0 in codes else named
            return
        drawing = self._drawing[name]
        functions = user_functions() if drawing else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(randomness.microbatch(number, microbatch))
            stack.enter_context(randomness.modules({fqn: module for fqn, module in drawing.items() if fqn}))
            stack.enter_context(patched_checkpointing(CurrentRun(), randomness, self._guards.as_user_code))
            stack.enter_context(functions_with_repeated_draws(functions, randomness))
            if "" in drawing:
                stack.enter_context(randomness.watching(True))
                stack.enter_context(randomness.each_draw())
            yield
