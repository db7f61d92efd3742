"""A unit that runs sharded by its plan; the user's module is restored after each forward.

While `ShardedUnit.running` is entered, the unit's forward is replaced on the instance. A call of it

1. replaces parameters by the rank's local shards, and integer attributes (number of heads) by the divided ones;
2. replaces the forwards of sharded linears by column-parallel, row-parallel or gathered ones;
3. enters the region mode, where the plan requires that operations are rewritten;
4. runs the user's forward, and restores everything.

Inputs and outputs are equal on all tensor ranks, and on all context ranks.

Where the sequence is sharded over context ranks, linears are sharded over tensor ranks and get local positions. In a
region that mixes positions, context ranks exchange them for features after its columns and before its rows, so its
features are sharded over tensor ranks times context ranks. Features of other regions are sharded over tensor ranks:

    local positions ─► column of a tensor rank ─► all-to-all ─► local heads, all positions ─► all-to-all ─► row ─► sum
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.arrivals import all_arrive, arrive
from lightning_hybrid.errors import CannotShard, StepError
from lightning_hybrid.logits.sharded import represent
from lightning_hybrid.logits.vocabulary import Vocabulary
from lightning_hybrid.params.placement import Placement, Shard, shard_tensor
from lightning_hybrid.patching import replaced
from lightning_hybrid.sequence.forward import FULL_SEQUENCE, FullSequence, ShardedSequence
from lightning_hybrid.sequence.mode import RingAttentionMode
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, rebuild_call, unflatten
from lightning_hybrid.step.standins.tensors import full_shape, materialize_call
from lightning_hybrid.step.tracing.lines import TorchCallSites
from lightning_hybrid.tensor.collectives import (
    ONE_RANK,
    GroupRanks,
    Ranks,
    as_ranks,
    gather,
    local_shard,
    paired,
    sum_gradients,
)
from lightning_hybrid.tensor.plan import FULL_POSITIONS, PositionsPlan, UnitPlan, local_positions
from lightning_hybrid.tensor.region import AroundDraw, LocalPositionDraws, RankDraws, sharded_over
from lightning_hybrid.tensor.runtime.linears import ParallelLinears, RegionInputs
from lightning_hybrid.tensor.runtime.mode import RegionMode
from lightning_hybrid.tensor.runtime.swaps import Swaps, find_attributes, find_slots, put_forwards, put_tensors

Tensors = Mapping[str, Tensor]
_NOTHING = contextlib.nullcontext()


def _check_sizes(plan: UnitPlan, ranks: Any, context: Any) -> None:
    for planned, found, kind in ((plan.size, ranks.size, "tensor"), (plan.context, context.size, "context")):
        if planned != found and (kind == "tensor" or plan.by):
            raise ValueError(f"the plan is for {planned} {kind} ranks but the group has {found}; plan the unit again")


# A rank whose forward has raised in a check waits for the others no longer than this: they come, or wait for it.
_SECONDS_FOR_OTHERS = 10.0


class ShardedUnit:
    """A unit, and the state of its sharded forwards on one rank.

    Attributes:
        fqn: FQN of the unit in the root, for errors; empty in trials.
        learning: Whether the region mode makes rules instead of following them; set by trials.
        keeps_sharded: Whether results of a sharded sequence go to the next unit as shards.
        last_region_mode: The region mode of the last forward, if there was one.
        last_sequence: While learning, the sharded sequence of the last forward.
        num_sharded_sequences: Number of forwards in which the sequence was sharded.
        vocabularies: The row ranges of parameters that are sharded along their vocabulary, by FQN.
        num_gathers: How often such parameters, and values computed from them, were gathered in forwards.
        compiled: If set, runs the user's forward compiled where no mode is needed, with forwards for its linears.
    """

    def __init__(
        self,
        unit: nn.Module,
        plan: UnitPlan,
        ranks: dist.ProcessGroup | Ranks,
        *,
        context: dist.ProcessGroup | Ranks = ONE_RANK,
        tensors: Callable[[], Tensors] | None = None,
        around_draw: AroundDraw | None = None,
        around_local_draw: AroundDraw | None = None,
        fqn: str = "",
        keeps_sharded: bool = False,
    ) -> None:
        """Binds a unit to its plan, and to the ranks.

        Before each forward ``tensors`` returns the local shards of this rank; those that are missing, and by default
        all, are what the unit holds at that time. Contexts are entered around draws in regions (by default each rank
        has a generator state for these), and around draws for a rank's local positions.
        """
        self._ranks, self._context = as_ranks(ranks), as_ranks(context)
        _check_sizes(plan, self._ranks, self._context)
        self._positions = local_positions(plan)
        by = plan.by
        self._all = paired(self._ranks, self._context) if by in ("context", "both") else self._ranks
        self.fqn, self.keeps_sharded = fqn, keeps_sharded
        self.learning = False
        self.last_region_mode: RegionMode | None = None
        self.last_sequence: ShardedSequence | None = None
        self.num_gathers = self.num_sharded_sequences = 0
        self._compiled: tuple[Callable[..., Any], dict[str, Callable[..., Any]]] | None = None
        self._unit, self._plan, self._tensors = unit, plan, tensors
        self._path: TorchCallSites | None = None  # of a forward that is checked
        self._fallback_unit: ShardedUnit | None = None
        self._modules = dict(unit.named_modules())
        self._sharded_modules = [(fqn, self._modules[fqn]) for fqn in plan.roles]
        self._forward = unit.forward
        self._slots = find_slots(self._modules, plan.placements)
        self._attributes = find_attributes(self._modules, plan.attributes)
        self._own = {fqn: (*slots[0], slots[0][0][slots[0][1]]) for fqn, slots in self._slots.items()}
        self._sums = {False: self._sums_of(FULL_POSITIONS), True: self._sums_of(self._positions)}
        self._bind_draws(around_draw, around_local_draw)
        self._fallback: Callable[..., Any] = self._run_full
        if (full := plan.full_sequence_plan) is not None:
            other = ShardedUnit(unit, full, self._ranks, tensors=tensors, around_draw=self._around_draw)
            self._fallback, self._fallback_unit = other.run_sharded, other
        self.vocabularies = {
            fqn: Vocabulary(plan.placements[fqn].length, self._ranks)  # type: ignore[union-attr]
            for fqn in plan.vocabulary
        }
        self._region_inputs = RegionInputs(self._ranks, self._all, gathers=by != "context")
        axes = self._ranks, self._context, self._all
        self._linears = ParallelLinears(
            self._modules, plan, self._positions, axes, self._region_inputs, self._around_draw
        )

    def _bind_draws(self, around_draw: AroundDraw | None, local: AroundDraw | None) -> None:
        device = next((p.device for p in self._unit.parameters()), torch.device("cpu"))
        self._around_draw = self._around_local_draw = around_draw or RankDraws(self._all.rank, device)
        if self._plan.by == "context":  # tensor ranks have the same positions
            if local is None and self._ranks.size > 1:
                local = RankDraws(self._all.size + self._context.rank, device)
            self._around_local_draw = local or self._around_draw

    # --- one forward --------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        """A context in which the unit's forward runs sharded."""
        return replaced(self._unit, "forward", self.run_sharded, reason="runs a sharded unit")

    def any_rank(self, vote: bool) -> bool:
        """Whether any rank that holds a shard of the unit votes so; collective over these ranks."""
        device = next((p.device for p in self._unit.parameters()), torch.device("cpu"))
        votes = torch.full((1,), float(vote), device=device)
        for ranks in (self._ranks, self._context):
            if ranks.size > 1:
                ranks.all_reduce(votes)
        return bool(votes)

    def meet(self, error: Exception | None) -> None:
        """Arrive where the ranks vote; raise the error of this rank if the others wait for it elsewhere."""
        groups = [ranks.group for ranks in (self._ranks, self._context) if isinstance(ranks, GroupRanks)]
        arrivals = [(group, arrive(group)) for group in groups if group.size() > 1]
        if error is not None and not all(all_arrive(*arrival, _SECONDS_FOR_OTHERS) for arrival in arrivals):
            raise error

    def set_path(self, path: TorchCallSites | None) -> None:
        """Sets the path on which the next forwards record their calls of torch; None ends that."""
        self._path = path
        if self._fallback_unit is not None:
            self._fallback_unit._path = path

    def compile_with(self, compiled: tuple[Callable[..., Any], dict[str, Callable[..., Any]]] | None) -> None:
        """Run these compiled forwards, of the unit and of its linears, from the next forward on; None ends that."""
        self._compiled = compiled

    def learn(self, learning: bool) -> None:
        """Let the region mode make rules instead of following them, in trials."""
        self.learning = learning

    def run_sharded(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward, sharded, with the unit's arguments and results.

        Raises:
            CannotShard: It does what its plan was not proved for.
        """
        try:
            with self._linears, self._region_inputs:
                return self._run_sharded(args, kwargs)
        except CannotShard as error:
            if not self.fqn:
                raise
            raise CannotShard(f"{self.fqn}: {error}; {self._remedy()}", entry="unproved-code") from error

    def _remedy(self) -> str:
        """What the user can do about code that the plan was not proved for."""
        by = self._plan.by
        changes = ["context_parallel_size=1"] if by in ("context", "both") else []
        if self._ranks.size > 1:
            changes.insert(0, f"tensor_parallel_plan={{{self.fqn!r}: 'replicated'}}")
        also = " and leave sequence_parallel out" if by in ("tensor", "both") else ""
        return f"set {' and '.join(changes)}{also}"

    def _run_sharded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        linears, sequence = self._linears, FULL_SEQUENCE
        leaves, plain = flatten_call(args, kwargs)
        if self._plan.by:
            sequence = ShardedSequence.of_call(
                self._positions, self._ranks, self._context, leaves, learning=self.learning
            )
            if not sequence.is_sharded and self._plan.by != "tensor":
                return self._fallback(*args, **kwargs)
            linears.work_on(sequence)
            self.num_sharded_sequences += sequence.is_sharded
            self.last_sequence = sequence if self.learning and isinstance(sequence, ShardedSequence) else None
        if (local := sequence.begin(leaves)) is not leaves:
            args, kwargs = rebuild_call(local, args, kwargs, plain)
        is_watched = self.learning or self._plan.watched or self._has_new_gradients(local)
        has_modes = is_watched or sequence.is_sharded
        compiled = None if has_modes or self._path is not None else self._compiled
        forwards = linears.forwards if has_modes else linears.direct
        forward, forwards = compiled or (forwards.get("", self._forward), forwards)
        for fqn, module in self._sharded_modules:
            if "forward" in module.__dict__:
                _check_forward(fqn, module)
        with Swaps() as swaps:
            self._put_tensors(swaps)
            for entry in self._attributes:
                swaps.put(*entry)
            put_forwards(self._modules, forwards, swaps)
            if has_modes or self._path is not None:
                # The path takes the frame that enters it for the one around the user's code.
                with self._modes(sequence, local, is_watched=is_watched), self._path or _NOTHING:
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
        if self.vocabularies:
            self.num_gathers = sum(vocabulary.num_gathers for vocabulary in self.vocabularies.values())
        output = self._gathered_output(output) if self._plan.outputs else output
        return sequence.end(output, keep_sharded=self.keeps_sharded)

    def _modes(self, sequence: FullSequence, leaves: list[Any], *, is_watched: bool) -> contextlib.ExitStack:
        """The function modes of the present forward, entered, whose arguments are the leaves."""
        rules = self._plan.rules if isinstance(self._plan.rules, dict) else dict(self._plan.rules)
        undo, mode = contextlib.ExitStack(), None
        if is_watched:
            names, cut_ids = self._names_and_cuts()
            mode = self.last_region_mode = RegionMode(
                learning=self.learning,
                rules=rules,
                enter=self._region_inputs.enter,
                names=names,
                cut_ids=cut_ids,
                regions=(self._ranks, self._all),
                batch=next((len(x) for x in leaves if isinstance(x, Tensor) and x.dim()), 1),
                around_draw=self._around_draw,
                positions=sequence.lengths,
            )
        self._linears.enter_modes(undo, mode, RingAttentionMode.of(sequence, rules, learning=self.learning))
        if sequence.is_sharded and self._unit.training:
            undo.enter_context(LocalPositionDraws(lambda: sequence.is_local, self._around_local_draw))
        return undo

    @property
    def has_local_positions(self) -> bool:
        """Whether the current forward works on a sequence shard."""
        return self._linears.sequence.is_sharded

    def _run_full(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = materialize_call(args, kwargs)
        with self._path or contextlib.nullcontext():
            return self._forward(*args, **kwargs)

    def _gathered_output(self, output: Any) -> Any:
        """All-gathers results that each rank has for its local heads (attention weights, say)."""
        leaves, spec = flatten(output)
        for index, dim in self._plan.outputs.items():
            if index < len(leaves) and (size := sharded_over(leaves[index])):
                leaves[index] = gather(leaves[index], dim, self._all if size == self._all.size else self._ranks)
        return unflatten(leaves, spec)

    def _put_tensors(self, swaps: Swaps) -> None:
        """Replaces parameters and buffers by local ones."""
        provided = {} if self._tensors is None else self._tensors()
        plan = self._plan
        positions = self._present_positions
        local: dict[str, Tensor] = {}  # those that the modules do not hold yet
        for fqn, (members, name, original) in self._own.items():
            if provided and fqn in provided:
                local[fqn] = provided[fqn]
            elif (tensor := members[name]) is not original and tensor is not None:
                local[fqn] = _local_substitute(fqn, tensor, original, plan.placements[fqn], self._ranks)
        if torch.is_grad_enabled():
            for wanted, ranks in self._sums[positions is self._positions]:
                self._sum_gradients(local, wanted, ranks)
        present = {fqn: self._present(fqn, local) for fqn in (*positions.parameter_shards, *self.vocabularies)}
        for fqn, placement in positions.parameter_shards.items():
            local[fqn] = shard_tensor(present[fqn], placement, self._context.rank, self._context.size)
            self._region_inputs.remember(local[fqn])
        for fqn, vocabulary in self.vocabularies.items():
            if present[fqn] is not None:
                local[fqn] = represent(present[fqn], plan.vocabulary[fqn], vocabulary)
        put_tensors(self._slots, local, swaps)

    def _sums_of(self, positions: PositionsPlan) -> list[tuple[list[tuple[str, Placement | None]], Ranks]]:
        """Parameters whose gradients ranks sum, with the placement of a shard that several have, and these ranks."""
        plan = self._plan
        inside: list[tuple[str, Placement | None]] = [(fqn, None) for fqn in plan.summed]
        pieces = [(fqn, plan.placements[fqn]) for fqn in plan.shared_pieces]
        tensor = [*pieces, *((fqn, None) for fqn in positions.summed_over_tensor)]
        sums = [([*inside, *tensor], self._ranks)]
        if positions.by and self._all is not self._ranks:  # context ranks have other features there, or other positions
            sums = [(inside, self._all), (tensor, self._ranks)]
        sums.append(([(fqn, None) for fqn in positions.summed_over_context], self._context))
        return [(wanted, ranks) for wanted, ranks in sums if wanted and ranks.size > 1]

    @property
    def _present_positions(self) -> PositionsPlan:
        return self._positions if self._linears.sequence.is_sharded else FULL_POSITIONS

    def _present(self, fqn: str, local: Mapping[str, Tensor]) -> Any:
        """The tensor of a parameter or buffer, of its shape: a local one, or what its module holds; may be None."""
        members, name, _ = self._own[fqn]
        return local.get(fqn, members[name])

    def _names_and_cuts(self) -> tuple[dict[int, str], dict[int, int]]:
        """FQNs of the tensors in the modules, by id, and numbers of ranks that the sharded ones are sharded over."""
        present = {fqn: members[name] for fqn, (members, name, _) in self._own.items()}
        plan, over_both = self._plan, self._present_positions.parameter_shards
        names = {id(tensor): fqn for fqn, tensor in present.items() if tensor is not None}
        cuts = {
            key: self._all.size if fqn in over_both else plan.size
            for key, fqn in names.items()
            if fqn in over_both or (isinstance(plan.placements[fqn], Shard) and fqn not in plan.vocabulary)
        }
        return names, cuts

    def _sum_gradients(
        self, local: dict[str, Tensor], wanted: Sequence[tuple[str, Placement | None]], ranks: Ranks
    ) -> None:
        """Sums the gradients of these parameters over the ranks; of a repeated shard, over the ranks that hold it."""
        # Equal on all ranks, since requires_grad is: the sum is a collective.
        present = {fqn: self._present(fqn, local) for fqn, _ in wanted if fqn in self._own}
        summed = [(fqn, placement) for fqn, placement in wanted if getattr(present.get(fqn), "requires_grad", False)]
        if not summed:
            return
        placements = [placement if isinstance(placement, Shard) else None for _, placement in summed]
        totals = sum_gradients([present[fqn] for fqn, _ in summed], placements, ranks)
        for (fqn, _), tensor in zip(summed, totals, strict=True):
            self._region_inputs.remember(tensor)
            local[fqn] = tensor

    def _has_new_gradients(self, leaves: list[Any]) -> bool:
        """Whether an input needs a gradient that needed none when the plan was proved without a region mode."""
        if not torch.is_grad_enabled():
            return False
        known = self._plan.grad_inputs
        indices = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return not known.issuperset(indices)


def unit_on_trial(unit: nn.Module, plan: UnitPlan, ranks: Ranks, context: Ranks, local: Tensors) -> ShardedUnit:
    """A unit with these local shards of its parameters and buffers, of any shape, in which nothing is drawn."""
    # Threads that access torch's generator can deadlock: its lock's owner waits for the interpreter's lock if garbage
    # is collected at that moment.
    none = contextlib.nullcontext
    return ShardedUnit(
        unit, plan, ranks, context=context, tensors=lambda: local, around_draw=none, around_local_draw=none
    )


def shards_of(unit: nn.Module, plan: UnitPlan, rank: int) -> dict[str, Tensor]:
    """A tensor rank's shards, of any shape, of the parameters and buffers of a unit, by FQN."""
    return {
        fqn: shard_tensor(tensor.detach(), plan.placements[fqn], rank, plan.size).requires_grad_(tensor.requires_grad)
        for fqn, tensor in (*unit.named_parameters(), *unit.named_buffers())
    }


def _check_forward(fqn: str, module: nn.Module) -> None:
    """Refuses a forward that the user has set on a module after its class's forward was recognised as a product."""
    forward = module.__dict__["forward"]
    while hasattr(forward, "__wrapped__"):  # wrappers of this package
        forward = forward.__wrapped__
    if getattr(forward, "__func__", forward) is not type(module).forward:
        raise StepError(
            f"{fqn} of a layer sharded over tensor ranks has another forward than when the layer was planned; set it"
            " before fit, or set tensor_parallel_size=1",
            entry="swapped-weight",
        )


def _local_substitute(
    fqn: str, substitute: Tensor, original: Tensor | None, placement: Placement, ranks: Ranks
) -> Tensor:
    """This rank's shard of a tensor that replaces a parameter for one call (``torch.func.functional_call``)."""
    if original is None or substitute.shape == original.shape:
        return substitute
    if isinstance(placement, Shard) and substitute.shape == full_shape(original):
        return local_shard(substitute, placement, ranks)
    raise StepError(
        f"{fqn} of a layer sharded over tensor ranks is replaced by a tensor of shape {tuple(substitute.shape)} and"
        f" not {tuple(original.shape)} or {full_shape(original)}; use a tensor of the parameter's shape, or set"
        " tensor_parallel_size=1",
        entry="swapped-weight",
    )
