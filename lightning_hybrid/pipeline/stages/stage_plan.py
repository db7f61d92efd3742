"""The stage plan: the pipeline ranks that own each parameter and unit, and the recording of traces.

The first recorded training step decides the partition. Afterwards parameters of other ranks are dropped, and further
recordings (other shapes, validation) are assigned to the same owner stages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.broadcast_from_owner import broadcast_buffer
from lightning_hybrid.collectives.sendable_tensors import as_sendable
from lightning_hybrid.graph import partition
from lightning_hybrid.graph.partition import Assignment, PartitionError
from lightning_hybrid.patching import replaced
from lightning_hybrid.pipeline.stages.balance_by_size import stages_by_size
from lightning_hybrid.pipeline.stages.check_parameter_owners import check_placement
from lightning_hybrid.pipeline.stages.trace_variant import TraceVariant
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.guards.check_number_branches import BranchCheck
from lightning_hybrid.step.guards.unguarded_reads import UnguardedReads
from lightning_hybrid.step.module_state.computed_weights import compute_weights
from lightning_hybrid.step.objects.module_walk import modules_in, parameters_of
from lightning_hybrid.step.recording.choose_units import UnitChoice, units_to_open
from lightning_hybrid.step.recording.record_step import record
from lightning_hybrid.step.replay.rerun_step_for_stage import StageReplay
from lightning_hybrid.step.standins.absent_tensors import drop, fill, is_absent
from lightning_hybrid.step.tracing.recording import Recording, StepError

# If a stage costs more than this multiple of the mean, the units of the costliest are opened to balance better.
_UNBALANCED = 1.08
_MAX_RECORDINGS = 4


class StagePlan:
    """The partition of one module into stages."""

    def __init__(
        self,
        root: nn.Module,
        group: dist.ProcessGroup,
        randomness: KeyedRandomness,
        *,
        stages_per_rank: int = 1,
        cuts: Sequence[str] | None = None,
        agree: Callable[[Any], Any] = lambda decision: decision,
    ) -> None:
        """Plan the stages of a module.

        Args:
            root: The user's module.
            group: The ranks of this pipeline.
            randomness: Keys the random numbers of recorded steps.
            stages_per_rank: Number of stages of each rank.
            cuts: FQNs of the first unit of each stage but the first; balanced if None.
            agree: Returns the first rank's argument on every rank; replicas must have the same partition.
        """
        self.num_ranks, self.rank, self.stages_per_rank = group.size(), group.rank(), stages_per_rank
        self.num_stages = self.num_ranks * stages_per_rank
        self.owner_stages: dict[str, int] = {}
        self.first: TraceVariant | None = None
        self._root, self.group, self._randomness = root, group, randomness
        self._cuts = cuts
        self._agree = agree
        self._choice = UnitChoice(root, self.num_stages)
        self._units: Mapping[str, nn.Module] = {}
        self._tracked: set[str] = set()
        # Parameters that a step with guards has not read so far, and may read on any stage.
        self._on_all_stages: set[str] = set()

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(range(self.rank, self.num_stages, self.num_ranks))

    def ranks_of(self, fqn: str) -> tuple[int, ...]:
        """Pipeline ranks that own a parameter or tracked buffer; the first one counts it."""
        return tuple(dict.fromkeys(stage % self.num_ranks for stage in self.stages_of(fqn)))

    def stages_of(self, fqn: str) -> tuple[int, ...]:
        """Stages that own a parameter or tracked buffer."""
        if fqn in self._on_all_stages:
            return tuple(range(self.num_stages))
        owner = (self.owner_stages[fqn],)
        return owner if self.first is None else self.first.assignment.holders.get(fqn, owner)

    @property
    def is_partitioned(self) -> bool:
        """Whether each parameter has an owner stage."""
        return bool(self.owner_stages)

    def partition_by_size(self) -> None:
        """Give each rank parameters of equally many bytes, where no step can be partitioned."""
        self.owner_stages = stages_by_size(self._root, self.num_stages)
        self._tracked, self._on_all_stages = set(), set()

    def names(self) -> dict[int, str]:
        """FQN by id of every parameter and tracked buffer."""
        names = {id(parameter): name for name, parameter in parameters_of(modules_in(self._root))}
        if self._tracked:
            names.update((id(buffer), name) for name, buffer in self._root.named_buffers() if name in self._tracked)
        return names

    def variant(
        self,
        name: str,
        step: Callable[[], Any],
        context: Callable[[], AbstractContextManager[Any]],
        *,
        train: bool,
        unguarded_reads: UnguardedReads | None = None,
        draws_as: tuple[int, int] = (0, 0),
        guesses: Sequence[bool] = (),
    ) -> TraceVariant:
        """Record a step.

        Args:
            name: Name of the step.
            step: Runs it on one microbatch.
            context: Entered around the step.
            train: Whether it must return a loss.
            unguarded_reads: Collects guards: the values beside the batch that the step reads.
            draws_as: Numbers of the step and microbatch that key the random numbers of the glue.
            guesses: As for ``record``.

        Raises:
            StepError: The step cannot be recorded.
            PartitionError: It cannot be partitioned, or not as the first step was.
        """

        def recorded() -> Recording:
            return self._record(
                name, step, context, train=train, unguarded_reads=unguarded_reads, draws_as=draws_as, guesses=guesses
            )

        recording, assignment = self._cut(recorded)
        self._units = recording.units
        replays = {s: StageReplay(recording, assignment, self._root, self._randomness, s) for s in self.stages}
        variant = TraceVariant(assignment, replays)
        if self.first is None:
            self.first = variant
        return variant

    def units(self) -> Mapping[str, nn.Module]:
        """The modules that are one node each in the latest recording."""
        return self._units

    def modes(self) -> Hashable:
        """The state that a recording depends on beside the batch: train or eval, and requires_grad, of all modules."""
        modules = modules_in(self._root)
        trained = tuple([parameter.requires_grad for _, parameter in parameters_of(modules)])
        return tuple([module.training for _, module in modules]), trained

    def _cut(self, recorded: Callable[[], Recording]) -> tuple[Recording, Assignment]:
        """Record and assign to stages; the first time the ranks agree on the partition, or on the error."""
        if self.owner_stages:
            recording = recorded()
            self._adopt(recording)
            return recording, self._assign(recording)
        try:
            recording, *decided = self._best_partition(recorded)
        except Exception as error:
            if self.num_stages > 1:
                # Replicas whose batch can be recorded wait for this message.
                self._agree(f"{type(error).__name__}: {error}")
            raise
        agreed = self._agree(decided)
        if isinstance(agreed, str):
            raise StepError(f"on the first rank: {agreed}")
        self._choice.opened, self._choice.closed, self._tracked, self.owner_stages, changes = agreed
        if self._choice.choose().keys() != recording.units.keys():
            recording = recorded()
        if changes:
            read = {name for node in recording.graph.nodes for name in node.parameters}
            self._on_all_stages = {name for name, _ in self._root.named_parameters()} - read
            self.owner_stages.update(dict.fromkeys(self._on_all_stages, 0))
        self._adopt(recording)
        assignment = self._assign(recording)
        partition.check_shared(assignment)
        return recording, assignment

    def _best_partition(self, recorded: Callable[[], Recording]) -> tuple[Any, ...]:
        """The recording that balances best, its opened units, tracked buffers, owner stages, and if it has guards."""
        recording = recorded()
        best: tuple[float, Recording, dict[str, int], set[str]] | None = None
        for _ in range(_MAX_RECORDINGS):
            try:
                owner_stages = partition.owner_stages(recording.graph, self.num_stages, self._cuts)
                costs = partition.assign(recording.graph, owner_stages, self.num_stages).costs()
                if best is None or self._cuts is not None or max(costs) < 0.97 * best[0]:
                    best = max(costs), recording, owner_stages, set(self._tracked)
                unbalanced = max(costs) > _UNBALANCED * sum(costs) / self.num_stages
                # A pipeline cut inside a unit opens it, whatever the balance.
                wanted = sum(costs) / self.num_stages / 4 if unbalanced or self._cuts is not None else None
            except PartitionError:
                if best is None and not units_to_open(recording, 0.0, self._cuts):
                    raise
                wanted = 0.0
            larger = units_to_open(recording, wanted, self._cuts) if wanted is not None else set()
            if not larger or self.num_stages == 1:
                break
            before = set(self._choice.opened), set(self._tracked)
            self._choice.opened |= larger
            try:
                recording = recorded()
            except Exception:  # such as a branch on values inside a unit, which can be recorded as one node
                if best is None:
                    raise
                self._choice.opened, self._tracked = before
                break
        if best is None:
            partition.owner_stages(recording.graph, self.num_stages, self._cuts)  # raises the reason
        assert best is not None
        _, recording, owner_stages, tracked = best
        opened = {name for name in self._choice.opened if name not in recording.units}
        return recording, opened, self._choice.closed, tracked, owner_stages, bool(recording.unguarded_state)

    def _record(
        self,
        name: str,
        step: Callable[[], Any],
        context: Callable[[], AbstractContextManager[Any]],
        **options: Any,
    ) -> Recording:
        branches = BranchCheck(self._root, step)

        def record_once(absent_number: float | None = None) -> Recording:
            return self.record_once(name, branches.step, units, context, absent_number=absent_number, **options)

        while True:
            units = self._choice.choose()
            try:
                recording = record_once()
            except Exception as error:
                if not self._choice.corrects(error):
                    raise
                continue
            missed = self._choice.missed(recording, units)
            found = set(recording.found_buffers) - self._tracked
            if not missed and not found:
                if not options["guesses"]:
                    branches.check(recording, record_once, context)
                return recording
            self._choice.opened |= missed
            self._tracked |= found

    def record_once(
        self,
        name: str,
        step: Callable[[], Any],
        units: Mapping[str, nn.Module],
        context: Callable[[], AbstractContextManager[Any]],
        *,
        train: bool,
        **options: Any,
    ) -> Recording:
        """Record a step with these units, as ``variant`` does, without changing the plan; options as for ``record``.

        Raises:
            StepError: The step cannot be recorded.
        """
        grad = torch.set_grad_enabled(train or torch.is_grad_enabled())
        with grad, context(), replaced(self._root, "log", lambda *_, **__: None, reason="runs without logs"):
            return record(
                self._root,
                step,
                units,
                name=name,
                randomness=self._randomness,
                loss_required=train,
                tracked_buffers=self._tracked,
                **options,
            )

    def _adopt(self, recording: Recording) -> None:
        """Assign parameters that no recorded step has read to the stage of neighbours, and buffers to their unit's.

        Buffers of the glue that the first step did not use are on the stage that computes the values written into them.
        """
        previous = 0
        parameters = {id(parameter): name for name, parameter in self._root.named_parameters()}
        buffers = {id(buffer): name for name, buffer in self._root.named_buffers()}
        inside = {id(buffer): stage for buffer, stage in self._unit_buffers()}
        new: list[str] = []
        for module in self._root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    previous = self.owner_stages.setdefault(parameters[id(parameter)], previous)
            for buffer in module._buffers.values():
                if buffer is not None and (name := buffers[id(buffer)]) in recording.graph.parameter_bytes:
                    new += [name] if name not in self.owner_stages and id(buffer) not in inside else []
                    self.owner_stages.setdefault(name, inside.get(id(buffer), previous))
        if new and self.first is not None:  # buffers of this step only, such as counts of validation
            self.owner_stages |= partition.buffer_stages(recording.graph, self.owner_stages, new, self.num_stages)

    def _assign(self, recording: Recording) -> Assignment:
        assignment = partition.assign(recording.graph, self.owner_stages, self.num_stages)
        if self.first is None:
            return assignment
        shared = [n for node in recording.graph.nodes for n in node.written if n in self._on_all_stages]
        if shared:
            raise StepError(
                f"{recording.graph.step} writes {shared[0]!r} in some batches only, and did not when it was first"
                " recorded, so that every rank has its own; write it in every batch, or in on_train_batch_end"
            )
        check_placement(assignment, self.owner_stages, self.num_ranks, self.ranks_of)
        return assignment

    def drop_remote_parameters(self) -> None:
        """Free the parameters that other ranks own; the objects stay, as absent tensors."""
        for name, parameter in self._root.named_parameters():
            if self.rank not in self.ranks_of(name) and not is_absent(parameter):
                drop(parameter)

    def drop_absent_in_copy(self, copy: nn.Module) -> None:
        """Free the parameters of a copy of the module that are absent in the module itself."""
        for original, copied in zip(self._root.parameters(), copy.parameters(), strict=True):
            if is_absent(original) and not is_absent(copied):
                drop(copied)

    def unshard_parameters(self, copy: nn.Module | None = None) -> None:
        """Broadcast all parameters and buffers from their owners to every rank; collective over the pipeline.

        Args:
            copy: A copy of the module with the same absent parameters; the module itself if None.
        """
        if self.num_ranks == 1 or not self.is_partitioned:
            return
        device = self._randomness.device
        for name, parameter in (self._root if copy is None else copy).named_parameters():
            owners = self.ranks_of(name)
            if len(owners) == self.num_ranks:
                continue
            here = not is_absent(parameter)
            content = parameter.detach() if here else torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            content = content.to(device).contiguous()
            dist.broadcast(as_sendable(content), group=self.group, group_src=owners[0])
            if is_absent(parameter):
                fill(parameter, nn.Parameter(content.to(parameter.device), requires_grad=parameter.requires_grad))
        for buffer, owner in self.buffer_owners(copy):
            broadcast_buffer(buffer, owner, self.group, device)
        compute_weights(self._root if copy is None else copy)

    def buffer_owners(self, copy: nn.Module | None = None) -> list[tuple[Tensor, int]]:
        """Buffers that are valid on one rank only (inside units, and tracked ones), each with this rank."""
        if self.first is None:
            return []
        if copy is not None:
            owners_by_id = self.buffer_ranks()
            pairs = zip(self._root.buffers(), copy.buffers(), strict=True)
            return [(copied, owners_by_id[id(own)]) for own, copied in pairs if id(own) in owners_by_id]
        owners = {id(buffer): (buffer, stage % self.num_ranks) for buffer, stage in self._unit_buffers()}
        for name, buffer in self._root.named_buffers():
            if name in self._tracked:
                owners[id(buffer)] = buffer, self.ranks_of(name)[0]
        return list(owners.values())

    def _unit_buffers(self) -> list[tuple[Tensor, int]]:
        """The buffers inside units, and the stage on which the first step runs these."""
        if self.first is None:
            return []
        units, stages = self.first.recording.units, self.first.unit_stages.items()
        pairs = [(buffer, stage) for fqn, stage in stages for buffer in units[fqn].buffers()]
        return list({id(buffer): (buffer, stage) for buffer, stage in reversed(pairs)}.values())[::-1]

    def buffer_ranks(self, copy: nn.Module | None = None) -> dict[int, int]:
        """Pipeline rank on which a buffer (of a copy) is valid, by id of the buffer; others are valid everywhere."""
        return {id(buffer): owner for buffer, owner in self.buffer_owners(copy)}

    def repeated_buffers(self) -> list[tuple[dict[str, Any], str]]:
        """The buffers that every stage writes, since no value of the model enters them: their dicts and keys."""
        if self.stages_per_rank == 1 or self.first is None:
            return []
        inside = {id(buffer) for unit in self.first.recording.units.values() for buffer in unit.buffers()}
        return [
            (module._buffers, member)
            for fqn, module in self._root.named_modules()
            for member, buffer in module._buffers.items()
            if id(buffer) not in inside and (f"{fqn}.{member}" if fqn else member) not in self._tracked
        ]

    def broadcast_buffers(self, variants: Iterable[TraceVariant]) -> None:
        """Broadcast tracked buffers after a step to the other stages that read them; collective over the pipeline."""
        if not self._tracked or self.num_ranks == 1:
            return
        buffers = dict(self._root.named_buffers())
        for name in sorted(self._tracked):
            if any(len(variant.assignment.holders.get(name, ())) > 1 for variant in dict.fromkeys(variants)):
                broadcast_buffer(buffers[name], self.ranks_of(name)[0], self.group, self._randomness.device)
