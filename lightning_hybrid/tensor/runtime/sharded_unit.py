"""A unit that runs sharded by its plan; the user's module is as before after each forward.

While `sharded` is entered, the unit's forward is replaced on the instance. A call of it

1. puts the rank's local tensors in the place of parameters, and the divided whole numbers in the place of attributes;
2. replaces the forwards of the linears that are cut by column-parallel, row-parallel or gathered ones;
3. watches operations, where the plan says that something has to be rewritten;
4. runs the unit's own forward, and puts everything back.

Inputs and outputs are equal on all tensor ranks, and on all context ranks.

Where positions are dealt to context ranks, linears are cut over tensor ranks and see a rank's own positions. In a
region that mixes positions, context ranks exchange them for features behind its columns and before its rows, so its
features lie on tensor ranks times context ranks; those of other regions lie on tensor ranks:

    own positions ─► column of a tensor rank ─► exchange ─► heads of one rank, all positions ─► exchange ─► row ─► sum
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parts.placement import Placement, Shard, cut
from lightning_hybrid.patching import replaced
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, unflatten
from lightning_hybrid.step.standins.absent_tensors import whole_shape
from lightning_hybrid.step.standins.deferred_tensors import with_wholes
from lightning_hybrid.step.tracing.call_trace import CodePath
from lightning_hybrid.step.tracing.recording import StepError
from lightning_hybrid.tensor.collectives.rank_collectives import (
    ExchangingRanks,
    Ranks,
    gather,
    local_part,
    paired,
    ranks_in,
    sum_gradients,
)
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan, local_positions
from lightning_hybrid.tensor.runtime.parallel_linears import Linears
from lightning_hybrid.tensor.runtime.proved_calls import ProvedCalls
from lightning_hybrid.tensor.runtime.region_inputs import Entrances
from lightning_hybrid.tensor.runtime.region_mode import RegionWatch
from lightning_hybrid.tensor.runtime.sequence_sharding import Dealing, OwnPositionsDraw
from lightning_hybrid.tensor.shard_state.rank_randomness import AroundDraw, OwnDraws
from lightning_hybrid.tensor.shard_state.shard_marks import cut_over
from lightning_hybrid.tensor.shard_state.swapped_members import find_homes, put_attributes, put_forwards, put_tensors
from lightning_hybrid.tensor.vocabulary.vocabulary_shard import Vocabulary
from lightning_hybrid.tensor.vocabulary.vocabulary_tensor import represent

Tensors = Mapping[str, Tensor]


@contextlib.contextmanager
def sharded(
    unit: nn.Module,
    plan: UnitPlan,
    ranks: dist.ProcessGroup | ExchangingRanks,
    *,
    context: dist.ProcessGroup | ExchangingRanks | None = None,
    tensors: Callable[[], Tensors] | None = None,
    around_draw: AroundDraw | None = None,
    around_own: AroundDraw | None = None,
) -> Iterator[ShardedUnit]:
    """Within this context the unit's forward runs sharded.

    Args:
        unit: The user's module.
        plan: Its plan, from `plan_unit`.
        ranks: The tensor ranks: a process group.
        context: The context ranks, if there are several.
        tensors: Called before each forward for the local tensors of this rank, by FQN inside the unit; those it leaves
            out, and by default all, are what the unit itself holds at that time.
        around_draw: A context entered around each draw of random numbers inside a sharded region; it makes the draws
            of the ranks differ. By default each rank has a generator state of its own for these.
        around_own: The same around draws for a rank's own positions.
    """
    runner = ShardedUnit(
        unit, plan, ranks, context=context, tensors=tensors, around_draw=around_draw, around_own=around_own
    )
    with replaced(unit, "forward", runner.run_sharded):
        yield runner


class ShardedUnit:
    """A unit and all that its sharded forward needs.

    Attributes:
        learning: A watch that makes rules instead of following them is used; set by trials.
        hands_on: Results are handed to the next unit in parts, where positions are dealt.
        last_watch: The watch of the last forward, if there was one.
        last_dealing: While learning, how the positions of the last forward were dealt.
        vocabularies: Of the parameters that are cut by their vocabulary, by FQN.
        num_gathers: How many wholes of such parameters, and of what came of them, were needed in forwards.
        compiled: Runs the unit's own forward where nothing has to be watched, with forwards for its linears; if given.
    """

    def __init__(
        self,
        unit: nn.Module,
        plan: UnitPlan,
        ranks: dist.ProcessGroup | ExchangingRanks,
        *,
        context: dist.ProcessGroup | ExchangingRanks | None = None,
        tensors: Callable[[], Tensors] | None = None,
        around_draw: AroundDraw | None = None,
        around_own: AroundDraw | None = None,
    ) -> None:
        """See `sharded` for the arguments."""
        self._ranks, self._context = ranks_in(ranks), ranks_in(context)
        sizes = (plan.size, self._ranks.size, "tensor"), (plan.context, self._context.size, "context")
        for planned, found, kind in sizes:
            if planned != found and (kind == "tensor" or plan.positions is not None):
                raise ValueError(
                    f"the plan is for {planned} {kind} ranks but the group has {found}; plan the unit again"
                )
        self._positions = local_positions(plan)
        by = None if self._positions is None else self._positions.by
        self._all = paired(self._ranks, self._context) if by in ("context", "both") else self._ranks
        self.learning = False
        self.hands_on = False
        self.last_watch: RegionWatch | None = None
        self.last_dealing: Dealing | None = None
        self.num_gathers = 0
        self.compiled: tuple[Callable[..., Any], dict[str, Callable[..., Any]]] | None = None
        self._unit, self._plan, self._tensors = unit, plan, tensors
        is_of_torch = all(type(module).__module__.startswith("torch.") for module in unit.modules())
        has_code = plan.calls and not is_of_torch
        agree = self._on_any_rank
        self._proved = ProvedCalls(unit, plan.calls, note=self._set_path, agree=agree) if has_code else None
        self._path: CodePath | None = None  # of a forward that is looked at
        self._without: ShardedUnit | None = None
        self._modules = dict(unit.named_modules())
        self._forward = unit.forward
        self._homes = find_homes(self._modules, plan.placements)
        self._own = {fqn: home[name] for fqn, ((home, name), *_) in self._homes.items()}
        device = next((p.device for p in unit.parameters()), torch.device("cpu"))
        self._around_draw = around_draw or OwnDraws(self._all.rank, device)
        if by == "context":  # tensor ranks have the same positions
            if around_own is None and self._ranks.size > 1:
                around_own = OwnDraws(self._all.size + self._context.rank, device)
            self._around_own = around_own or self._around_draw
        else:
            self._around_own = self._around_draw
        self._otherwise: Callable[..., Any] = self._whole
        if plan.otherwise is not None:
            without = ShardedUnit(unit, plan.otherwise, self._ranks, tensors=tensors, around_draw=self._around_draw)
            self._otherwise, self._without = without.run_sharded, without
        self.vocabularies = {
            fqn: Vocabulary(plan.placements[fqn].length, self._ranks)  # type: ignore[union-attr]
            for fqn in plan.vocabulary
        }
        self._entrances = Entrances(self._ranks, self._all, gathers=by != "context")
        three = self._ranks, self._context, self._all
        self._linears = Linears(self._modules, plan, self._positions, three, self._entrances, self._around_draw)

    # --- one forward --------------------------------------------------------------------------------------------------

    @property
    def proved(self) -> ProvedCalls | None:
        """What is known of its forwards; None where no code of the user's runs in them."""
        return self._proved

    def _on_any_rank(self, seen: bool) -> bool:
        device = next((p.device for p in self._unit.parameters()), torch.device("cpu"))
        votes = torch.full((1,), float(seen), device=device)
        for ranks in (self._ranks, self._context):
            if ranks.size > 1:
                ranks.all_reduce(votes)
        return bool(votes)

    def _set_path(self, path: CodePath | None) -> None:
        self._path = path
        if self._without is not None:
            self._without._path = path

    def run_sharded(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward, sharded; arguments and results are those of the unit."""
        linears = self._linears
        outer, linears.watch, linears.dealing = (linears.watch, linears.dealing), None, None
        try:
            with self._entrances.of_forward():
                return self._run_sharded(args, kwargs)
        finally:
            linears.watch, linears.dealing = outer

    def _run_sharded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        linears, dealing = self._linears, None
        if (positions := self._positions) is not None:
            dealing = Dealing.of_call(positions, self._ranks, self._context, args, kwargs, learning=self.learning)
            if dealing is None and positions.by != "tensor":
                return self._otherwise(*args, **kwargs)
            linears.dealing = dealing
            self.last_dealing = dealing if self.learning else None
        if dealing is not None:
            args, kwargs = dealing.begin(args, kwargs)
        else:  # inside, what is no part may be another one on each rank
            args, kwargs = with_wholes(args, kwargs)
        with contextlib.ExitStack() as undo:
            names, cut_ids = self._put_tensors(undo)
            is_watched = self.learning or self._plan.watched or self._has_new_gradients(args, kwargs)
            compiled = None if is_watched or dealing is not None or self._path is not None else self.compiled
            own, forwards = compiled or (linears.forwards.get("", self._forward), linears.forwards)
            for fqn in self._plan.roles:
                _check_forward(fqn, self._modules[fqn])
            put_attributes(self._modules, self._plan.attributes, undo)
            put_forwards(self._modules, forwards, undo)
            if is_watched:
                linears.watch = self.last_watch = RegionWatch(
                    learning=self.learning,
                    rules=self._plan.rules if isinstance(self._plan.rules, dict) else dict(self._plan.rules),
                    enter=linears.enter,
                    names=names,
                    cut_ids=cut_ids,
                    regions=(self._ranks, self._all),
                    batch=next((len(x) for x in flatten_call(args, kwargs)[0] if isinstance(x, Tensor) and x.dim()), 1),
                    around_draw=self._around_draw,
                    positions=None if dealing is None else dealing.lengths,
                )
                undo.enter_context(linears.watch)
            if dealing is not None and self._unit.training:
                undo.enter_context(OwnPositionsDraw(dealing, self._around_own))
            with self._path or contextlib.nullcontext():
                output = own(*args, **kwargs)
        self.num_gathers = sum(vocabulary.num_gathers for vocabulary in self.vocabularies.values())
        output = self._gathered_output(output) if self._plan.outputs else output
        return output if dealing is None else dealing.end(output, handed_on=self.hands_on)

    @property
    def is_dealing(self) -> bool:
        """Whether the forward under way has this rank's own positions."""
        return self._linears.dealing is not None

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's own forward: nothing is dealt, and nothing is cut."""
        args, kwargs = with_wholes(args, kwargs)
        with self._path or contextlib.nullcontext():
            return self._forward(*args, **kwargs)

    def _gathered_output(self, output: Any) -> Any:
        """Results that each rank has for its own heads (attention weights, say), for all of them."""
        leaves, spec = flatten(output)
        for place, dim in self._plan.outputs.items():
            if place < len(leaves) and (size := cut_over(leaves[place])):
                leaves[place] = gather(leaves[place], dim, self._all if size == self._all.size else self._ranks)
        return unflatten(leaves, spec)

    def _put_tensors(self, undo: contextlib.ExitStack) -> tuple[dict[int, str], dict[int, int]]:
        held = {} if self._tensors is None else self._tensors()
        plan = self._plan
        dealt = None if self._linears.dealing is None else self._positions
        local = {}
        for fqn, ((home, name), *_) in self._homes.items():
            tensor = held.get(fqn, home[name])
            if fqn not in held and tensor is not None and tensor is not self._own[fqn]:
                tensor = _given(fqn, tensor, self._own[fqn], plan.placements[fqn], self._ranks)
            if tensor is not None:
                local[fqn] = tensor
        if torch.is_grad_enabled():
            inside: list[tuple[str, Placement | None]] = [(fqn, None) for fqn in plan.summed]
            pieces = [(fqn, plan.placements[fqn]) for fqn in plan.shared_pieces]
            over_tensor = [] if dealt is None else [(fqn, None) for fqn in dealt.summed_over_tensor]
            over_context = [] if dealt is None else [(fqn, None) for fqn in dealt.summed_over_context]
            if dealt is None or self._all is self._ranks:
                self._sum_gradients(local, [*inside, *pieces, *over_tensor], self._ranks)
            else:  # context ranks have other features in a region, or other positions
                self._sum_gradients(local, inside, self._all)
                self._sum_gradients(local, [*pieces, *over_tensor], self._ranks)
            self._sum_gradients(local, over_context, self._context)
        parts = {} if dealt is None else dealt.parts
        for fqn, part in parts.items():
            local[fqn] = cut(local[fqn], part, self._context.rank, self._context.size)
            self._entrances.remember(local[fqn])
        for fqn, vocabulary in self.vocabularies.items():
            if fqn in local:
                local[fqn] = represent(local[fqn], plan.vocabulary[fqn], vocabulary)
        put_tensors(self._homes, local, undo)
        names = {id(tensor): fqn for fqn, tensor in local.items()}
        cuts = {
            id(local[fqn]): self._all.size if fqn in parts else plan.size
            for fqn in local
            if fqn in parts or (isinstance(plan.placements[fqn], Shard) and fqn not in plan.vocabulary)
        }
        return names, cuts

    def _sum_gradients(
        self, local: dict[str, Tensor], wanted: Sequence[tuple[str, Placement | None]], ranks: Ranks
    ) -> None:
        """Let the gradients of these parameters be summed over the ranks; where parts are repeated, in their places."""
        # Alike on all ranks, since requires_grad is: the sum is a collective.
        summed = [(fqn, placement) for fqn, placement in wanted if fqn in local and local[fqn].requires_grad]
        if not summed or ranks.size == 1:
            return
        placements = [placement if isinstance(placement, Shard) else None for _, placement in summed]
        totals = sum_gradients([local[fqn] for fqn, _ in summed], placements, ranks)
        for (fqn, _), tensor in zip(summed, totals, strict=True):
            self._entrances.remember(tensor)
            local[fqn] = tensor

    def _has_new_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an input needs a gradient that needed none when the plan was proved without a watch."""
        if not torch.is_grad_enabled():
            return False
        leaves, _ = flatten_call(args, kwargs)
        quiet = self._plan.quiet
        return any(isinstance(leaf, Tensor) and leaf.requires_grad and k not in quiet for k, leaf in enumerate(leaves))


def _check_forward(fqn: str, module: nn.Module) -> None:
    """Refuse a forward that the user has put on a module since its class's was taken for a product."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return
    while hasattr(forward, "__wrapped__"):  # what this package has put around it
        forward = forward.__wrapped__
    if getattr(forward, "__func__", forward) is not type(module).forward:
        raise StepError(
            f"{fqn} of a layer that tensor ranks share has got another forward since the layer was planned; put it"
            " there before fit, or set tensor_parallel_size=1"
        )


def _given(fqn: str, given: Tensor, own: Tensor | None, placement: Placement, ranks: Ranks) -> Tensor:
    """What lies in the place of a parameter for one call (``torch.func.functional_call``): this rank's shard of it."""
    if own is None or given.shape == own.shape:
        return given
    if isinstance(placement, Shard) and given.shape == whole_shape(own):
        return local_part(given, placement, ranks)
    raise StepError(
        f"{fqn} of a layer that tensor ranks share has another tensor in its place, of shape {tuple(given.shape)} and"
        f" not {tuple(own.shape)} or {whole_shape(own)}; give it one of the parameter's shape, or set"
        " tensor_parallel_size=1"
    )
