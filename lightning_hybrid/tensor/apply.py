"""Runs a unit sharded, by its plan; the user's module is as before after each forward.

While `sharded` is entered, the unit's forward is replaced on the instance. A call of it

1. puts the rank's local tensors in the place of parameters, and the divided whole numbers in the place of attributes;
2. replaces the forwards of the linears that are cut by column-parallel, row-parallel or gathered ones;
3. watches operations, where the plan says that something has to be rewritten;
4. runs the unit's own forward, and puts everything back.

Inputs and outputs are equal on all tensor ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parts.placement import Shard, cut
from lightning_hybrid.step.deferred import with_wholes
from lightning_hybrid.step.randomness import AROUND
from lightning_hybrid.step.tree import flatten, flatten_call, unflatten
from lightning_hybrid.step.user_checkpointing import SAVES_EACH
from lightning_hybrid.tensor.attention import sharded_attention
from lightning_hybrid.tensor.dealing import Dealing, OwnPositionsDraw
from lightning_hybrid.tensor.draws import AroundDraw, OwnDraws
from lightning_hybrid.tensor.plan import LinearLike, UnitPlan
from lightning_hybrid.tensor.positions import OwnPositions, dealt_of
from lightning_hybrid.tensor.products import convolution_of, product_of
from lightning_hybrid.tensor.ranks import GroupRanks, Ranks, enter, gather, leave, sum_gradients
from lightning_hybrid.tensor.slices import Vocabulary
from lightning_hybrid.tensor.vocabulary_slice import represent
from lightning_hybrid.tensor.watch import RegionWatch, mark, tensors_in

Tensors = Mapping[str, Tensor]
_Home = tuple[dict[str, Tensor | None], str]  # what holds a tensor, and its key there


@contextlib.contextmanager
def sharded(
    unit: nn.Module,
    plan: UnitPlan,
    ranks: dist.ProcessGroup | Ranks,
    *,
    tensors: Callable[[], Tensors] | None = None,
    around_draw: AroundDraw | None = None,
) -> Iterator[ShardedUnit]:
    """Within this context the unit's forward runs sharded.

    Args:
        unit: The user's module.
        plan: Its plan, from `plan_unit`.
        ranks: The tensor ranks: a process group.
        tensors: Called before each forward for the local tensors of this rank, by FQN inside the unit; those it leaves
            out, and by default all, are what the unit itself holds at that time.
        around_draw: A context entered around each draw of random numbers inside a sharded region; it makes the draws
            of the ranks differ. By default each rank has a generator state of its own for these.
    """
    runner = ShardedUnit(unit, plan, ranks, tensors=tensors, around_draw=around_draw)
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
        ranks: dist.ProcessGroup | Ranks,
        *,
        tensors: Callable[[], Tensors] | None = None,
        around_draw: AroundDraw | None = None,
    ) -> None:
        """See `sharded` for the arguments."""
        self._ranks: Ranks = GroupRanks(ranks) if isinstance(ranks, dist.ProcessGroup) else ranks
        if plan.size != self._ranks.size:
            raise ValueError(
                f"the plan is for {plan.size} tensor ranks but the group has {self._ranks.size}; plan the unit again"
            )
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
        self._homes = self._find_homes()
        self._entered: dict[int, tuple[Tensor, int, Tensor]] = {}
        device = next((p.device for p in unit.parameters()), torch.device("cpu"))
        self._around_draw = around_draw or OwnDraws(self._ranks.rank, device)
        self.vocabularies = {
            fqn: Vocabulary(plan.placements[fqn].length, self._ranks)  # type: ignore[union-attr]
            for fqn in plan.vocabulary
        }
        self._replaced = {fqn: self._sharded_forward(fqn) for fqn in plan.roles}
        if plan.positions is not None:
            shown = [fqn for fqn in plan.positions.shown if fqn not in plan.roles]
            self._replaced |= {fqn: partial(self._shown, fqn, self._modules[fqn].forward) for fqn in shown}

    def _find_homes(self) -> dict[str, list[_Home]]:
        """Where each parameter and buffer is held: in one module, or in several that share it."""
        holders: dict[int, list[_Home]] = {}
        for module in self._modules.values():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    holders.setdefault(id(tensor), []).append((held, name))
        homes = {}
        for fqn in self._plan.placements:
            owner, _, name = fqn.rpartition(".")
            module = self._modules[owner]
            held = module._parameters if name in module._parameters else module._buffers
            homes[fqn] = [(held, name)] if held[name] is None else holders[id(held[name])]
        return homes

    # --- one forward --------------------------------------------------------------------------------------------------

    def run_sharded(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward, sharded; arguments and results are those of the unit."""
        entered, self._entered = self._entered, {}
        outer, self._watch, self._dealing = (self._watch, self._dealing), None, None
        try:
            if (positions := self._plan.positions) is not None:
                dealing = Dealing.of_call(positions, self._ranks, args, kwargs, learning=self.learning)
                if dealing is None and positions.by == "context":
                    args, kwargs = with_wholes(args, kwargs)
                    return self._forward(*args, **kwargs)
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
                self._put_attributes(undo, forwards)
                if is_watched:
                    self._watch = self.last_watch = RegionWatch(
                        self._ranks.rank,
                        self._ranks.size,
                        learning=self.learning,
                        rules=self._plan.rules if isinstance(self._plan.rules, dict) else dict(self._plan.rules),
                        enter=self._enter,
                        names=names,
                        cut_ids=cut_ids,
                        batch=next(
                            (len(x) for x in flatten_call(args, kwargs)[0] if isinstance(x, Tensor) and x.dim()), 1
                        ),
                        around_draw=self._around_draw,
                        positions=None if self._dealing is None else self._dealing.dealt.two_lengths,
                    )
                    undo.enter_context(self._watch)
                if self._dealing is not None and self._unit.training:
                    undo.enter_context(OwnPositionsDraw(self._dealing, self._around_draw))
                output = own(*args, **kwargs)
            self.num_gathers = sum(vocabulary.num_gathers for vocabulary in self.vocabularies.values())
            output = self._gathered_output(output) if self._plan.outputs else output
            return output if self._dealing is None else self._dealing.end(output, handed_on=self.hands_on)
        finally:
            self._entered = entered
            self._watch, self._dealing = outer

    def _gathered_output(self, output: Any) -> Any:
        """Results that each rank has for its own heads (attention weights, say), for all of them."""
        leaves, spec = flatten(output)
        for place, dim in self._plan.outputs.items():
            if place < len(leaves) and getattr(leaves[place], "_is_cut", False):
                leaves[place] = gather(leaves[place], dim, self._ranks)
        return unflatten(leaves, spec)

    def _put_tensors(self, undo: contextlib.ExitStack) -> tuple[dict[int, str], frozenset[int]]:
        held = {} if self._tensors is None else self._tensors()
        plan = self._plan
        dealt = None if self._dealing is None else plan.positions
        local = {}
        for fqn, ((home, name), *_) in self._homes.items():
            tensor = held.get(fqn, home[name])
            if tensor is not None:
                local[fqn] = tensor
        if torch.is_grad_enabled():
            # Alike on all ranks, since requires_grad is: the sum is a collective.
            wanted = (*plan.summed, *plan.shared_pieces, *(() if dealt is None else dealt.summed))
            summed = [n for n in wanted if n in local and local[n].requires_grad]
            if summed:
                pieces = [plan.placements[fqn] for fqn in summed]
                placements = [piece if isinstance(piece, Shard) else None for piece in pieces]
                for fqn, tensor in zip(
                    summed, sum_gradients([local[n] for n in summed], placements, self._ranks), strict=True
                ):
                    self._remember(tensor, tensor)
                    local[fqn] = tensor
        parts = {} if dealt is None else dealt.parts
        for fqn, placement in parts.items():
            local[fqn] = cut(local[fqn], placement, self._ranks.rank, self._ranks.size)
            self._remember(local[fqn], local[fqn])
        for fqn, vocabulary in self.vocabularies.items():
            if fqn in local:
                local[fqn] = represent(local[fqn], plan.vocabulary[fqn], vocabulary)
        for fqn, tensor in local.items():
            for home, name in self._homes[fqn]:
                if home[name] is not tensor:
                    undo.callback(home.__setitem__, name, home[name])
                    home[name] = tensor
        names = {id(tensor): fqn for fqn, tensor in local.items()}
        cuts = [
            fqn
            for fqn in local
            if fqn in parts or (isinstance(plan.placements[fqn], Shard) and fqn not in plan.vocabulary)
        ]
        return names, frozenset(id(local[fqn]) for fqn in cuts)

    def _put_attributes(self, undo: contextlib.ExitStack, forwards: Mapping[str, Callable[..., Any]]) -> None:
        for fqn, values in self._plan.attributes.items():
            attributes = self._modules[fqn].__dict__
            for name, value in values.items():
                undo.callback(attributes.__setitem__, name, attributes[name])
                attributes[name] = value
        for fqn, forward in forwards.items():
            if fqn:
                attributes = self._modules[fqn].__dict__
                if "forward" in attributes:
                    undo.callback(attributes.__setitem__, "forward", attributes["forward"])
                else:
                    undo.callback(attributes.__delitem__, "forward")
                around = getattr(attributes.get("forward"), AROUND, None)  # keys what the module draws
                attributes["forward"] = forward if around is None else around(forward)
        for module in self._modules.values():
            # Torch's encoder layer reads the weights past the attention's forward in eval mode, unless this is 0.
            if isinstance(module, nn.TransformerEncoderLayer):
                undo.callback(module.__dict__.__setitem__, _FAST_PATH, module.__dict__[_FAST_PATH])
                module.__dict__[_FAST_PATH] = 0

    def _has_new_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an input needs a gradient that needed none when the plan was proved without a watch."""
        if not torch.is_grad_enabled():
            return False
        leaves, _ = flatten_call(args, kwargs)
        quiet = self._plan.quiet
        return any(isinstance(leaf, Tensor) and leaf.requires_grad and k not in quiet for k, leaf in enumerate(leaves))

    # --- entering a region --------------------------------------------------------------------------------------------

    def _enter(self, tensor: Tensor, *, fresh: bool = False) -> Tensor:
        """Enter once, however many linears read the value: one sum over ranks in the backward."""
        if isinstance(tensor, OwnPositions):
            return tensor.entered()
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        known = self._entered.get(id(tensor))
        if known is not None and known[0] is tensor and known[1] == tensor._version:
            return known[2]
        inside = enter(tensor, self._ranks, fresh=fresh and self._watch is None)
        self._remember(tensor, inside)
        self._remember(inside, inside)
        return inside

    def _remember(self, tensor: Tensor, inside: Tensor) -> None:
        self._entered[id(tensor)] = (tensor, tensor._version, inside)

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
        (x,), _ = self._dealing.shown(fqn, (x,), {})
        return x

    def _column(self, linear: LinearLike, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self._as_dealt(linear.fqn, x)
        if self._dealing is not None:
            self._dealing.is_own = False
            if self._in_context:
                return self._column_in_context(linear, run, x)
        with _saved_in_parts(x):
            out = run(self._enter(x, fresh=True), True, *args, **kwargs)
        placement = self._plan.placements[linear.parameter("weight")]
        assert isinstance(placement, Shard)
        return mark(out, (placement, linear.feature_dim) if linear.fqn in self._plan.offsets else None)

    @property
    def _in_context(self) -> bool:
        return self._plan.positions is not None and self._plan.positions.by == "context"

    def _column_in_context(self, linear: LinearLike, run: Callable[..., Tensor], x: Tensor) -> Tensor:
        """The linear is whole; positions are exchanged for features behind it."""
        assert self._dealing is not None and self._plan.positions is not None
        features = self._plan.positions.features[linear.fqn]
        if isinstance(x, OwnPositions):
            out = self._dealing.to_heads(run(dealt_of(x, self._dealing.dealt), True), linear.fqn)
        else:  # another sequence, whole on every rank
            out = cut(run(self._enter(x), True), features, self._ranks.rank, self._ranks.size)
        return mark(out, (features, linear.feature_dim) if linear.fqn in self._plan.offsets else None)

    def _leave(self, addend: Tensor) -> Tensor:
        return leave(addend, self._ranks) if self._dealing is None else self._dealing.leave(addend)

    def _row(self, linear: LinearLike, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._dealing is not None and self._in_context:
            return run(self._dealing.to_positions(x, linear.fqn), True, *args, **kwargs)
        out = self._leave(run(x, False, *args, **kwargs))
        bias = self._modules[linear.fqn]._parameters.get("bias") if linear.has_bias else None
        # Added once, to the sum.
        return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * (-1 - linear.feature_dim))

    def _gathered(self, linear: LinearLike, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        was_dealt = not isinstance(x, OwnPositions)
        x = self._as_dealt(linear.fqn, x)
        with _saved_in_parts(x):
            out = run(self._enter(x, fresh=True), True, *args, **kwargs)
        out = gather(out, out.dim() + linear.feature_dim, self._ranks)
        return dealt_of(out, x.dealt) if was_dealt and isinstance(x, OwnPositions) else out

    def _attention(
        self, fqn: str, module: nn.MultiheadAttention, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self._dealing is not None:
            args, kwargs = self._dealing.shown(fqn, args, kwargs)
        with contextlib.ExitStack() as saved:
            for tensor in tensors_in((*args, *kwargs.values())):
                saved.enter_context(_saved_in_parts(tensor))
            return sharded_attention(module, self._ranks, self._enter, self._leave, self._around_draw, *args, **kwargs)


def _saved_in_parts(x: Tensor) -> AbstractContextManager[Any]:
    """Of a value whose positions are dealt, each rank saves its own for the backward."""
    if not isinstance(x, OwnPositions) or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    hooks = _TOP_HOOKS(True)
    if hooks is not None and not hasattr(hooks[0], SAVES_EACH):
        return contextlib.nullcontext()  # others that decide what is saved (a layer that is recomputed) have the say
    return x.regathered()


_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


_FAST_PATH = "activation_relu_or_gelu"
