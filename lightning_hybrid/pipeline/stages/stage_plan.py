"""The stage plan: which pipeline rank holds which parameters and units, and the recorded traces of a module.

The first recorded training step decides the cut. Afterwards parameters of other ranks are dropped, and further
recordings (other shapes, validation) are assigned to the same homes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.rank_agreement import broadcast_buffer
from lightning_hybrid.graph.partition import Assignment, PartitionError, assign, check_shared, find_homes, homes_behind
from lightning_hybrid.mesh import as_sent
from lightning_hybrid.patching import replaced
from lightning_hybrid.pipeline.stages.balance_by_size import homes_by_size
from lightning_hybrid.pipeline.stages.placement_check import refuse_misplaced
from lightning_hybrid.pipeline.stages.trace_variant import Variant
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.module_state.attribute_tensors import compute_weights
from lightning_hybrid.step.objects.module_walk import modules_in, parameters_of
from lightning_hybrid.step.recording.choose_units import UnitChoice, to_open
from lightning_hybrid.step.recording.escaped_values import BranchCheck
from lightning_hybrid.step.recording.guards import Looks
from lightning_hybrid.step.recording.record_step import record
from lightning_hybrid.step.replay.stage_replay import StageReplay
from lightning_hybrid.step.standins.absent_tensors import drop, fill, is_absent
from lightning_hybrid.step.tracing.recording import Recording, StepError

# A stage may cost so much more than the mean before the units of the costliest are opened to balance better.
_UNBALANCED = 1.08
_MOST_RECORDINGS = 4


class StagePlan:
    """The cut of one module, and what this rank holds of it."""

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
            randomness: Keys what the recorded steps draw.
            stages_per_rank: How many stages each rank holds.
            cuts: FQNs of the first unit of each stage but the first; balanced if None.
            agree: Returns the first rank's argument on every rank; replicas must cut alike.
        """
        self.num_ranks = group.size()
        self.rank = group.rank()
        self.stages_per_rank = stages_per_rank
        self.num_stages = self.num_ranks * stages_per_rank
        self.homes: dict[str, int] = {}
        self.first: Variant | None = None
        self._root = root
        self.group = group
        self._randomness = randomness
        self._cuts = cuts
        self._agree = agree
        self._choice = UnitChoice(root, self.num_stages)
        self._units: Mapping[str, nn.Module] = {}
        self._tracked: set[str] = set()
        # Of a step that may change: parameters that it has not read so far, and may read on any stage.
        self._everywhere: set[str] = set()

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(range(self.rank, self.num_stages, self.num_ranks))

    def ranks_of(self, fqn: str) -> tuple[int, ...]:
        """Pipeline ranks that hold a parameter or tracked buffer; the first one counts it."""
        return tuple(dict.fromkeys(stage % self.num_ranks for stage in self.stages_of(fqn)))

    def stages_of(self, fqn: str) -> tuple[int, ...]:
        """Stages that hold a parameter or tracked buffer."""
        if fqn in self._everywhere:
            return tuple(range(self.num_stages))
        home = (self.homes[fqn],)
        return home if self.first is None else self.first.assignment.holders.get(fqn, home)

    @property
    def is_cut(self) -> bool:
        """Whether each parameter has a home."""
        return bool(self.homes)

    def cut_by_size(self) -> None:
        """Give each rank parameters of as many bytes as the others have, where no step can be cut."""
        self._tracked, self._everywhere, self.homes = set(), set(), homes_by_size(self._root, self.num_stages)

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
        looks: Looks | None = None,
        draws_as: tuple[int, int] = (0, 0),
        guesses: Sequence[bool] = (),
    ) -> Variant:
        """Record a step.

        Args:
            name: Name of the step.
            step: Runs it on one microbatch.
            context: Entered around the step.
            train: Whether it must return a loss.
            looks: Told what the step looks at beside its batch.
            draws_as: Number of the step and microbatch that key what the glue draws.
            guesses: As for ``record``.

        Raises:
            StepError: The step cannot be recorded.
            PartitionError: It cannot be cut, or not the way the first step was.
        """

        def recorded() -> Recording:
            return self._record(name, step, context, train=train, looks=looks, draws_as=draws_as, guesses=guesses)

        recording, assignment = self._cut(recorded)
        self._units = recording.units
        replays = {s: StageReplay(recording, assignment, s, self._root, self._randomness) for s in self.stages}
        variant = Variant(assignment, replays)
        if self.first is None:
            self.first = variant
        return variant

    def units(self) -> Mapping[str, nn.Module]:
        """The modules that are one node each in the latest recording."""
        return self._units

    def modes(self) -> Hashable:
        """What a recording depends on beside the batch: train or eval, and requires_grad, everywhere."""
        modules = modules_in(self._root)
        trained = tuple([parameter.requires_grad for _, parameter in parameters_of(modules)])
        return tuple([module.training for _, module in modules]), trained

    def _cut(self, recorded: Callable[[], Recording]) -> tuple[Recording, Assignment]:
        """Record and assign; the first time the ranks agree on a cut, or on there being none."""
        if self.homes:
            recording = recorded()
            self._adopt(recording)
            return recording, self._assign(recording)
        try:
            recording, *decided = self._best_cut(recorded)
        except Exception as error:
            if self.num_stages > 1:
                self._agree(f"{type(error).__name__}: {error}")  # replicas whose batch can be recorded wait for it
            raise
        agreed = self._agree(decided)
        if isinstance(agreed, str):
            raise StepError(f"on the first rank: {agreed}")
        self._choice.opened, self._choice.closed, self._tracked, self.homes, changes = agreed
        if self._choice.choose().keys() != recording.units.keys():
            recording = recorded()
        if changes:
            read = {name for node in recording.graph.nodes for name in node.parameters}
            self._everywhere = {name for name, _ in self._root.named_parameters()} - read
            self.homes.update(dict.fromkeys(self._everywhere, 0))
        self._adopt(recording)
        assignment = self._assign(recording)
        check_shared(assignment)
        return recording, assignment

    def _best_cut(self, recorded: Callable[[], Recording]) -> tuple[Any, ...]:
        """The recording that balances best, with what it opens, tracks and homes, and whether the step may change."""
        recording = recorded()
        best: tuple[float, Recording, dict[str, int], set[str]] | None = None
        for _ in range(_MOST_RECORDINGS):
            try:
                homes = find_homes(recording.graph, self.num_stages, self._cuts)
                costs = assign(recording.graph, homes, self.num_stages).costs()
                if best is None or self._cuts is not None or max(costs) < 0.97 * best[0]:
                    best = max(costs), recording, homes, set(self._tracked)
                unbalanced = max(costs) > _UNBALANCED * sum(costs) / self.num_stages
                # A cut inside a unit opens it, whatever the balance.
                wanted = sum(costs) / self.num_stages / 4 if unbalanced or self._cuts is not None else None
            except PartitionError:
                if best is None and not to_open(recording, 0.0, self._cuts):
                    raise
                wanted = 0.0
            larger = to_open(recording, wanted, self._cuts) if wanted is not None else set()
            if not larger or self.num_stages == 1:
                break
            before = set(self._choice.opened), set(self._tracked)
            self._choice.opened |= larger
            try:
                recording = recorded()
            except Exception:  # such as a branch on values inside a unit, which as a whole can be followed
                if best is None:
                    raise
                self._choice.opened, self._tracked = before
                break
        if best is None:
            find_homes(recording.graph, self.num_stages, self._cuts)  # raises the reason
        assert best is not None
        _, recording, homes, tracked = best
        opened = {name for name in self._choice.opened if name not in recording.units}
        return recording, opened, self._choice.closed, tracked, homes, bool(recording.looks_at)

    def _record(
        self,
        name: str,
        step: Callable[[], Any],
        context: Callable[[], AbstractContextManager[Any]],
        **options: Any,
    ) -> Recording:
        branches = BranchCheck(self._root, step)

        def record_once() -> Recording:
            return self.record_once(name, branches.step, units, context, **options)

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
        looks: Looks | None = None,
        draws_as: tuple[int, int] = (0, 0),
        guesses: Sequence[bool] = (),
    ) -> Recording:
        """Record a step with these units, as ``variant`` does; nothing is kept of it.

        Raises:
            StepError: The step cannot be recorded.
        """
        grad = torch.set_grad_enabled(train or torch.is_grad_enabled())
        with grad, context(), replaced(self._root, "log", lambda *_, **__: None):
            return record(
                self._root,
                step,
                units,
                name=name,
                randomness=self._randomness,
                loss_required=train,
                tracked_buffers=self._tracked,
                looks=looks,
                draws_as=draws_as,
                guesses=guesses,
            )

    def _adopt(self, recording: Recording) -> None:
        """Give parameters that no recorded step has read yet the home of their neighbours, and buffers their unit's.

        Buffers of the glue that the first step did not use lie where the step has what it writes into them.
        """
        previous = 0
        parameters = {id(parameter): name for name, parameter in self._root.named_parameters()}
        buffers = {id(buffer): name for name, buffer in self._root.named_buffers()}
        inside = {id(buffer): stage for buffer, stage in self._unit_buffers()}
        new: list[str] = []
        for module in self._root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    previous = self.homes.setdefault(parameters[id(parameter)], previous)
            for buffer in module._buffers.values():
                if buffer is not None and (name := buffers[id(buffer)]) in recording.graph.parameter_bytes:
                    new += [name] if name not in self.homes and id(buffer) not in inside else []
                    self.homes.setdefault(name, inside.get(id(buffer), previous))
        if new and self.first is not None:  # the step's own, such as counts that only validation keeps
            self.homes |= homes_behind(recording.graph, self.homes, new, self.num_stages)

    def _assign(self, recording: Recording) -> Assignment:
        assignment = assign(recording.graph, self.homes, self.num_stages)
        if self.first is None:
            return assignment
        shared = [n for node in recording.graph.nodes for n in node.written if n in self._everywhere]
        if shared:
            raise StepError(
                f"{recording.graph.step} writes {shared[0]!r} in some batches only, and did not when it was first"
                " recorded, so that every rank has its own; write it in every batch, or in on_train_batch_end"
            )
        refuse_misplaced(assignment, self.homes, self.num_ranks, self.ranks_of)
        return assignment

    def drop_foreign(self) -> None:
        """Free the parameters that live on other ranks; their objects stay, absent."""
        for name, parameter in self._root.named_parameters():
            if self.rank not in self.ranks_of(name) and not is_absent(parameter):
                drop(parameter)

    def drop_as_root(self, copy: nn.Module) -> None:
        """Free in a copy of the module what is absent in the module itself."""
        for original, copied in zip(self._root.parameters(), copy.parameters(), strict=True):
            if is_absent(original) and not is_absent(copied):
                drop(copied)

    def make_whole(self, copy: nn.Module | None = None) -> None:
        """Give every rank all parameters and buffers again; collective over the pipeline.

        Args:
            copy: Of the module, of which each rank has the same part; the module itself if None.
        """
        if self.num_ranks == 1 or not self.is_cut:
            return
        device = self._randomness.device
        for name, parameter in (self._root if copy is None else copy).named_parameters():
            holders = self.ranks_of(name)
            if len(holders) == self.num_ranks:
                continue
            here = not is_absent(parameter)
            content = parameter.detach() if here else torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            content = content.to(device).contiguous()
            dist.broadcast(as_sent(content), group=self.group, group_src=holders[0])
            if is_absent(parameter):
                fill(parameter, nn.Parameter(content.to(parameter.device), requires_grad=parameter.requires_grad))
        for buffer, home in self.buffer_homes(copy):
            broadcast_buffer(buffer, home, self.group, device)
        compute_weights(self._root if copy is None else copy)

    def buffer_homes(self, copy: nn.Module | None = None) -> list[tuple[Tensor, int]]:
        """Buffers whose content is right on one rank only: those inside units, and the tracked ones."""
        if self.first is None:
            return []
        if copy is not None:
            homes_by_id = self.buffer_ranks()
            pairs = zip(self._root.buffers(), copy.buffers(), strict=True)
            return [(copied, homes_by_id[id(own)]) for own, copied in pairs if id(own) in homes_by_id]
        homes = {id(buffer): (buffer, stage % self.num_ranks) for buffer, stage in self._unit_buffers()}
        for name, buffer in self._root.named_buffers():
            if name in self._tracked:
                homes[id(buffer)] = buffer, self.ranks_of(name)[0]
        return list(homes.values())

    def _unit_buffers(self) -> list[tuple[Tensor, int]]:
        """The buffers inside units, and the stage on which the first step runs these."""
        if self.first is None:
            return []
        units, stages = self.first.recording.units, self.first.unit_stages.items()
        pairs = [(buffer, stage) for fqn, stage in stages for buffer in units[fqn].buffers()]
        return list({id(buffer): (buffer, stage) for buffer, stage in reversed(pairs)}.values())[::-1]

    def buffer_ranks(self, copy: nn.Module | None = None) -> dict[int, int]:
        """Pipeline rank on which a buffer (of a copy) is right, by id of the buffer; others are right everywhere."""
        return {id(buffer): home for buffer, home in self.buffer_homes(copy)}

    def repeated_buffers(self) -> list[tuple[dict[str, Any], str]]:
        """The buffers that every stage writes for itself, as nothing of the model goes there: their dicts and names."""
        if self.stages_per_rank == 1 or self.first is None:
            return []
        inside = {id(buffer) for unit in self.first.recording.units.values() for buffer in unit.buffers()}
        return [
            (module._buffers, member)
            for fqn, module in self._root.named_modules()
            for member, buffer in module._buffers.items()
            if id(buffer) not in inside and (f"{fqn}.{member}" if fqn else member) not in self._tracked
        ]

    def share_buffers(self, variants: Iterable[Variant]) -> None:
        """After a step, give other readers of a tracked buffer its content; collective over the pipeline."""
        if not self._tracked or self.num_ranks == 1:
            return
        buffers = dict(self._root.named_buffers())
        for name in sorted(self._tracked):
            if any(len(variant.assignment.holders.get(name, ())) > 1 for variant in dict.fromkeys(variants)):
                broadcast_buffer(buffers[name], self.ranks_of(name)[0], self.group, self._randomness.device)
