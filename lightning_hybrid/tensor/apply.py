"""Runs a unit sharded, by its plan; the user's module is as before after each forward.

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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parts.placement import Placement, Shard, cut
from lightning_hybrid.step.deferred import with_wholes
from lightning_hybrid.step.tree import flatten, flatten_call, unflatten
from lightning_hybrid.tensor.attention import sharded_attention
from lightning_hybrid.tensor.dealing import Dealing, OwnPositionsDraw
from lightning_hybrid.tensor.draws import AroundDraw, OwnDraws
from lightning_hybrid.tensor.homes import find_homes, put_attributes, put_forwards, put_tensors
from lightning_hybrid.tensor.marks import cut_over, mark, tensors_in
from lightning_hybrid.tensor.plan import LinearLike, UnitPlan, local_positions
from lightning_hybrid.tensor.positions import OwnPositions, dealt_of, saved_in_parts
from lightning_hybrid.tensor.products import convolution_of, product_of
from lightning_hybrid.tensor.ranks import ExchangingRanks, Ranks, enter, gather, leave, paired, ranks_in, sum_gradients
from lightning_hybrid.tensor.slices import Vocabulary
from lightning_hybrid.tensor.vocabulary_slice import represent
from lightning_hybrid.tensor.watch import RegionWatch

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
    attributes = unit.__dict__
    had, before = "forward" in attributes, attributes.get("forward")
    attributes["forward"] = runner.run_sharded
    try:
        yield runner
    finally:
        if had:
            attributes["forward"] = before
        else:
            del attributes["forward"]


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
        self._in_context = self._positions is not None and self._positions.by == "context"
        self._all = paired(self._ranks, self._context) if self._in_context else self._ranks
        self._dealt_to = self._context if self._in_context else self._ranks
        self.learning = False
        self.hands_on = False
        self.last_watch: RegionWatch | None = None
        self.last_dealing: Dealing | None = None
        self.num_gathers = 0
        self.compiled: tuple[Callable[..., Any], dict[str, Callable[..., Any]]] | None = None
        self._watch: RegionWatch | None = None  # of the forward under way
        self._dealing: Dealing | None = None
        self._unit, self._plan, self._tensors = unit, plan, tensors
        self._modules = dict(unit.named_modules())
        self._forward = unit.forward
        self._homes = find_homes(self._modules, plan.placements)
        self._entered: dict[tuple[int, int], tuple[Tensor, int, Tensor]] = {}  # by id and number of ranks
        device = next((p.device for p in unit.parameters()), torch.device("cpu"))
        self._around_draw = around_draw or OwnDraws(self._all.rank, device)
        if around_own is None and self._all.size > self._dealt_to.size:
            around_own = OwnDraws(self._all.size + self._dealt_to.rank, device)
        self._around_own = around_own or self._around_draw
        self._otherwise: Callable[..., Any] = self._whole
        if plan.otherwise is not None:
            without = ShardedUnit(unit, plan.otherwise, self._ranks, tensors=tensors, around_draw=self._around_draw)
            self._otherwise = without.run_sharded
        self.vocabularies = {
            fqn: Vocabulary(plan.placements[fqn].length, self._ranks)  # type: ignore[union-attr]
            for fqn in plan.vocabulary
        }
        self._replaced = {fqn: self._sharded_forward(fqn) for fqn in plan.roles}
        if plan.positions is not None:
            shown = [fqn for fqn in plan.positions.shown if fqn not in plan.roles]
            self._replaced |= {fqn: partial(self._shown, fqn, self._modules[fqn].forward) for fqn in shown}

    # --- one forward --------------------------------------------------------------------------------------------------

    def run_sharded(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward, sharded; arguments and results are those of the unit."""
        entered, self._entered = self._entered, {}
        outer, self._watch, self._dealing = (self._watch, self._dealing), None, None
        try:
            if (positions := self._positions) is not None:
                dealing = Dealing.of_call(positions, self._dealt_to, args, kwargs, learning=self.learning)
                if dealing is None and self._in_context:
                    return self._otherwise(*args, **kwargs)
                self._dealing = dealing
                self.last_dealing = dealing if self.learning else None
            if self._dealing is not None:
                args, kwargs = self._dealing.begin(args, kwargs)
            else:  # inside, what is no part may be another one on each rank
                args, kwargs = with_wholes(args, kwargs)
            with contextlib.ExitStack() as undo:
                names, cut_ids = self._put_tensors(undo)
                is_watched = self.learning or self._plan.watched or self._has_new_gradients(args, kwargs)
                compiled = None if is_watched or self._dealing is not None else self.compiled
                own, forwards = compiled or (self._replaced.get("", self._forward), self._replaced)
                put_attributes(self._modules, self._plan.attributes, undo)
                put_forwards(self._modules, forwards, undo)
                if is_watched:
                    self._watch = self.last_watch = RegionWatch(
                        learning=self.learning,
                        rules=self._plan.rules if isinstance(self._plan.rules, dict) else dict(self._plan.rules),
                        enter=self._enter,
                        names=names,
                        cut_ids=cut_ids,
                        regions=(self._ranks, self._all),
                        batch=next(
                            (len(x) for x in flatten_call(args, kwargs)[0] if isinstance(x, Tensor) and x.dim()), 1
                        ),
                        around_draw=self._around_draw,
                        positions=None if self._dealing is None else self._dealing.dealt.two_lengths,
                    )
                    undo.enter_context(self._watch)
                if self._dealing is not None and self._unit.training:
                    undo.enter_context(OwnPositionsDraw(self._dealing, self._around_own))
                output = own(*args, **kwargs)
            self.num_gathers = sum(vocabulary.num_gathers for vocabulary in self.vocabularies.values())
            output = self._gathered_output(output) if self._plan.outputs else output
            return output if self._dealing is None else self._dealing.end(output, handed_on=self.hands_on)
        finally:
            self._entered = entered
            self._watch, self._dealing = outer

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's own forward: nothing is dealt, and nothing is cut."""
        args, kwargs = with_wholes(args, kwargs)
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
        dealt = None if self._dealing is None else self._positions
        local = {}
        for fqn, ((home, name), *_) in self._homes.items():
            tensor = held.get(fqn, home[name])
            if tensor is not None:
                local[fqn] = tensor
        if torch.is_grad_enabled():
            inside: list[tuple[str, Placement | None]] = [(fqn, None) for fqn in plan.summed]
            pieces = [(fqn, plan.placements[fqn]) for fqn in plan.shared_pieces]
            over_positions = [] if dealt is None else [(fqn, None) for fqn in dealt.summed]
            if self._dealt_to is self._ranks:
                self._sum_gradients(local, [*inside, *pieces, *over_positions], self._ranks)
            else:  # in a region that exchanges, context ranks have other features too
                self._sum_gradients(local, inside, self._all)
                self._sum_gradients(local, pieces, self._ranks)
                self._sum_gradients(local, over_positions, self._context)
        parts = {} if dealt is None else dealt.parts
        for fqn, part in parts.items():
            local[fqn] = cut(local[fqn], part, self._context.rank, self._context.size)
            self._remember(local[fqn], local[fqn])
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
            self._remember(tensor, tensor)
            local[fqn] = tensor

    def _has_new_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an input needs a gradient that needed none when the plan was proved without a watch."""
        if not torch.is_grad_enabled():
            return False
        leaves, _ = flatten_call(args, kwargs)
        quiet = self._plan.quiet
        return any(isinstance(leaf, Tensor) and leaf.requires_grad and k not in quiet for k, leaf in enumerate(leaves))

    # --- entering a region --------------------------------------------------------------------------------------------

    def _enter(self, tensor: Tensor, ranks: Ranks, *, fresh: bool = False) -> Tensor:
        """Enter once, however many linears read the value: one sum over ranks in the backward."""
        if isinstance(tensor, OwnPositions):  # entered over the ranks that share positions
            return self._enter(tensor.entered(), self._ranks) if self._in_context else tensor.entered()
        if not tensor.requires_grad or not torch.is_grad_enabled() or ranks.size == 1:
            return tensor
        known = self._entered.get((id(tensor), ranks.size))
        if known is not None and known[0] is tensor and known[1] == tensor._version:
            return known[2]
        inside = enter(tensor, ranks, fresh=fresh and self._watch is None)
        self._entered[id(tensor), ranks.size] = (tensor, tensor._version, inside)
        self._remember(inside, inside)
        return inside

    def _remember(self, tensor: Tensor, inside: Tensor) -> None:
        for ranks in (self._ranks, self._all):
            self._entered[id(tensor), ranks.size] = (tensor, tensor._version, inside)

    # --- the forwards of linears --------------------------------------------------------------------------------------

    def _sharded_forward(self, fqn: str) -> Callable[..., Any]:
        module, role = self._modules[fqn], self._plan.roles[fqn]
        if role == "attention":
            assert isinstance(module, nn.MultiheadAttention)
            return partial(self._unwatched, partial(self._attention, fqn, module))
        linear = self._plan.linears[fqn]
        run = convolution_of(module) if linear.is_convolution else partial(product_of, module, linear)
        forward = {"column": self._column, "row": self._row, "gathered": self._gathered}[role]
        return partial(self._unwatched, partial(forward, linear, run))

    def _unwatched(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What is done here is right as it is."""
        watch = self._watch
        if watch is None:
            return forward(*args, **kwargs)
        watch.paused = True
        try:
            return forward(*args, **kwargs)
        finally:
            watch.paused = False

    def _shown(self, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module whose code asks for the length of the sequence."""
        if self._dealing is not None:
            args, kwargs = self._unwatched(self._dealing.shown, fqn, args, kwargs)
            self._dealing.is_own = False
        return forward(*args, **kwargs)

    def _as_dealt(self, fqn: str, x: Tensor) -> Tensor:
        """The input of a linear, as what stands for all positions if it is dealt."""
        if self._dealing is None:
            return x
        if self._in_context and not self._exchanges(fqn):
            return dealt_of(x, self._dealing.dealt) if isinstance(x, OwnPositions) else x
        (x,), _ = self._dealing.shown(fqn, (x,), {})
        return x

    def _column(self, linear: LinearLike, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self._as_dealt(linear.fqn, x)
        if self._dealing is not None and not (self._in_context and not self._exchanges(linear.fqn)):
            self._dealing.is_own = False
            if self._in_context:
                return self._column_in_context(linear, run, x)
        with saved_in_parts(x):
            out = run(self._enter(x, self._ranks, fresh=True), True, *args, **kwargs)
        placement = self._plan.placements[linear.parameter("weight")]
        assert isinstance(placement, Shard)
        column = (placement, linear.feature_dim) if linear.fqn in self._plan.offsets else None
        return mark(out, self._ranks.size, column)

    def _exchanges(self, fqn: str) -> bool:
        """Whether context ranks exchange positions for the features of a linear in the forward under way."""
        return self._dealing is not None and self._positions is not None and fqn in self._positions.features

    def _column_in_context(self, linear: LinearLike, run: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Positions are exchanged for features behind the linear, which has those of the tensor rank."""
        assert self._dealing is not None and self._positions is not None and self._plan.positions is not None
        if isinstance(x, OwnPositions):
            own = self._enter(dealt_of(x, self._dealing.dealt), self._ranks, fresh=True)
            out = self._dealing.to_heads(run(own, True), linear.fqn)
        else:  # another sequence, whole on every rank
            features = self._positions.features[linear.fqn]
            out = cut(run(self._enter(x, self._all), True), features, self._context.rank, self._context.size)
        over_all = self._plan.positions.features[linear.fqn]
        column = (over_all, linear.feature_dim) if linear.fqn in self._plan.offsets else None
        return mark(out, self._all.size, column)

    def _leave(self, addend: Tensor) -> Tensor:
        """The sum over the ranks, of a rank's own positions where positions are dealt to these."""
        if self._dealing is None:
            return leave(addend, self._ranks)
        addend = self._dealing.leave(addend)
        return leave(addend, self._ranks) if self._in_context else addend

    def _row(self, linear: LinearLike, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._dealing is not None and self._exchanges(linear.fqn):
            x = self._dealing.to_positions(x, linear.fqn)
        if self._ranks.size == 1:
            return run(x, True, *args, **kwargs)
        out = run(x, False, *args, **kwargs)
        out = leave(out, self._ranks) if self._in_context else self._leave(out)
        bias = self._modules[linear.fqn]._parameters.get("bias") if linear.has_bias else None
        # Added once, to the sum.
        return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * (-1 - linear.feature_dim))

    def _gathered(self, linear: LinearLike, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        was_dealt = not isinstance(x, OwnPositions)
        x = self._as_dealt(linear.fqn, x)
        with saved_in_parts(x):
            out = run(self._enter(x, self._ranks, fresh=True), True, *args, **kwargs)
        out = gather(out, out.dim() + linear.feature_dim, self._ranks)
        return dealt_of(out, x.dealt) if was_dealt and isinstance(x, OwnPositions) else out

    def _attention(
        self, fqn: str, module: nn.MultiheadAttention, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self._dealing is not None:
            args, kwargs = self._dealing.shown(fqn, args, kwargs)
            self._dealing.is_own = False
        ranks = self._all  # those of one axis where no positions are dealt to the other
        with contextlib.ExitStack() as saved:
            for tensor in tensors_in((*args, *kwargs.values())):
                saved.enter_context(saved_in_parts(tensor))
            enter = partial(self._enter, ranks=ranks)
            return sharded_attention(module, ranks, enter, self._leave, self._around_draw, *args, **kwargs)
