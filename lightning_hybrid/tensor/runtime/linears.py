"""Column- and row-parallel forwards of a unit's linears and attentions.

    column      local output features: its input enters the region
    row         local input features: its output is summed over ranks, and then its bias is added
    gathered    local output features, which are all-gathered
    attention   an `nn.MultiheadAttention`: column and row in one

Where the sequence is sharded over tensor ranks, inputs are all-gathered and outputs reduce-scattered; in a region that
mixes positions, context ranks exchange positions for features (all-to-all) after its columns and before its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.errors import CannotShard
from lightning_hybrid.params.placement import Shard, shard_tensor
from lightning_hybrid.patching import Replacement
from lightning_hybrid.sequence.forward import FULL_SEQUENCE, FullSequence, ShardedSequence
from lightning_hybrid.sequence.mode import RingAttentionMode
from lightning_hybrid.sequence.positions import SequenceShard, save_local_shard, shard_sequence
from lightning_hybrid.tensor.collectives import Ranks, Readers, enter, gather, leave
from lightning_hybrid.tensor.plan import LinearLike, PositionsPlan, UnitPlan
from lightning_hybrid.tensor.region import AroundDraw, mark, tensors_in
from lightning_hybrid.tensor.runtime.attention import sharded_attention
from lightning_hybrid.tensor.runtime.mode import RegionMode
from lightning_hybrid.tensor.runtime.products import Product, add_bias


class RegionInputs:
    """The values that have entered in the current forward; the backward sums over ranks once for each."""

    def __init__(self, ranks: Ranks, every: Ranks, *, gathers: bool) -> None:
        """Takes the tensor ranks, and every rank that features are sharded over; in shares of context ranks too.

        With ``gathers`` a value whose positions are gathered has entered over the tensor ranks by that.
        """
        self._ranks, self._gathers, self._sizes = ranks, gathers, {ranks.size, every.size}
        self._entered: dict[tuple[int, int], tuple[Tensor, int, Tensor, Readers]] = {}  # by id and number of ranks
        self._outer: list[Any] = []  # those of the forwards around this one

    def __enter__(self) -> None:
        """Begins a forward, in which no value has entered yet."""
        self._outer.append(self._entered)
        self._entered = {}

    def __exit__(self, *_: object) -> None:
        """Ends the forward."""
        self._entered = self._outer.pop()

    def enter(self, tensor: Tensor, ranks: Ranks, *, fresh: bool = False) -> Tensor:
        """The value, of the same shape, in a region of ``ranks``, for one more reader (``fresh``: as in `Readers`)."""
        if isinstance(tensor, SequenceShard):  # it enters over the ranks that the sequence is sharded over
            inside = tensor.entered()
            return inside if self._gathers else self.enter(inside, self._ranks)
        if not tensor.requires_grad or not torch.is_grad_enabled() or ranks.size == 1:
            return tensor
        cached = self._entered.get((id(tensor), ranks.size))
        if cached is not None and cached[0] is tensor and cached[1] == tensor._version:
            cached[3].add(fresh=fresh)
            return cached[2]
        readers = Readers(fresh)
        inside = enter(tensor, ranks, readers)
        self._entered[id(tensor), ranks.size] = (tensor, tensor._version, inside, readers)
        self.remember(inside)
        return inside

    def multiply(self, product: Product, ranks: Ranks, x: Tensor) -> Tensor:
        """The product of a value with a weight, ``(..., out features)``; by the first one it enters the region."""
        key = id(x), ranks.size
        if key in self._entered or not product.can_enter(ranks, x):
            return product(self.enter(x, ranks, fresh=True), True)
        out, inside = product.enter(ranks, x)
        self._entered[key] = (x, x._version, inside, _ANY_READERS)
        self.remember(inside)
        return out

    def remember(self, inside: Tensor) -> None:
        """Registers a value, of any shape, that is in the region already."""
        for size in self._sizes:
            self._entered[id(inside), size] = (inside, inside._version, inside, _ANY_READERS)


_ANY_READERS = Readers()  # of values that nothing asks how they are read
_NOTHING = contextlib.nullcontext()
Run = Callable[..., Tensor]  # the product of a linear with the local shard of its weight, with or without the bias


class ParallelLinears:
    """The linears of one unit on one rank.

    Attributes:
        forwards: The replacements of forwards, by FQN inside the unit.
        direct: Those of a forward with a full sequence and without a mode.
        region_mode: The function mode of the current forward, if there is one.
        sequence: The sequence of the current forward.
        ring: The function mode of ring attention of the current forward, if it attends so.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        plan: UnitPlan,
        positions: PositionsPlan,
        ranks: tuple[Ranks, Ranks, Ranks],
        inputs: RegionInputs,
        around_draw: AroundDraw,
    ) -> None:
        """Makes the forwards; ``ranks`` are tensor ranks, context ranks, and those that features are sharded over.

        ``positions`` has the features of a tensor rank as context ranks shard them.
        """
        self._modules, self._plan, self._positions = modules, plan, positions
        self._ranks, self._context, self._all = ranks
        self._inputs, self._around_draw = inputs, around_draw
        self.region_mode: RegionMode | None = None
        self.sequence: FullSequence = FULL_SEQUENCE
        self._outer: list[tuple[RegionMode | None, FullSequence]] = []  # of the forwards around this one
        self.ring: RingAttentionMode | None = None
        self._products = {
            fqn: Product(modules[fqn], linear) for fqn, linear in plan.linears.items() if not linear.is_convolution
        }
        self.forwards = {fqn: self._forward_of(fqn) for fqn in plan.roles}
        if positions.ring_attention:
            attentions = (fqn for fqn, module in modules.items() if isinstance(module, nn.MultiheadAttention))
            self.forwards |= {fqn: self._attention_forward(fqn) for fqn in attentions}
        shown = [fqn for fqn in positions.shown if fqn and fqn not in plan.roles]
        self.forwards |= {fqn: partial(self._on_full_shape, fqn, modules[fqn].forward) for fqn in shown}
        self.direct = self._put_in_place(self.forwards | self._direct_forwards())
        self.forwards = self._put_in_place(self.forwards)

    def _put_in_place(self, forwards: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The forwards, as replacements on their modules."""
        return {
            fqn: Replacement(module := self._modules[fqn], "forward", run, module.forward, reason="parallel linears")
            for fqn, run in forwards.items()
        }

    def _direct_forwards(self) -> dict[str, Callable[..., Tensor]]:
        """Forwards of products without what modes, sequence shards and gathered outputs need."""
        if self._plan.outputs:  # which are known by marks
            return {}
        found = [(fqn, role, self._products[fqn]) for fqn, role in self._plan.roles.items() if fqn in self._products]
        multiply = self._inputs.multiply
        columns = [(fqn, partial(multiply, run, self._ranks)) for fqn, role, run in found if role == "column"]
        rows = [(fqn, partial(run.leave, self._ranks)) for fqn, role, run in found if role == "row"]
        return dict([*columns, *rows])

    def _forward_of(self, fqn: str) -> Callable[..., Any]:
        module, role = self._modules[fqn], self._plan.roles[fqn]
        if role == "attention":
            return self._attention_forward(fqn)
        linear = self._plan.linears[fqn]
        run = convolution_of(module) if linear.is_convolution else self._products[fqn]
        forward = {"column": self._column, "row": self._row, "gathered": self._gathered}[role]
        return partial(self._bypass_mode, partial(forward, linear, run))

    def __enter__(self) -> None:
        """Begins a forward of the unit: on the full sequence, without a mode, until it says otherwise."""
        self._outer.append((self.region_mode, self.sequence))
        self.region_mode, self.sequence = None, FULL_SEQUENCE

    def __exit__(self, *_: object) -> None:
        """Ends the forward."""
        self.region_mode, self.sequence = self._outer.pop()

    def work_on(self, sequence: FullSequence) -> None:
        """Let the present forward work on a sequence."""
        self.sequence = sequence

    def enter_modes(self, undo: contextlib.ExitStack, mode: RegionMode | None, ring: RingAttentionMode | None) -> None:
        """Enter the function modes of the present forward."""
        self.ring = ring
        if mode is not None:
            self.region_mode = undo.enter_context(mode)
        if ring is not None:
            undo.enter_context(ring)

    def _attention_forward(self, fqn: str) -> Callable[..., Any]:
        module = self._modules[fqn]
        assert isinstance(module, nn.MultiheadAttention)
        return partial(self._bypass_mode, partial(self._attention, fqn, module))

    def _bypass_mode(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Pauses the region mode: operations of sharded forwards need no rewriting."""
        if self.region_mode is None:
            return forward(*args, **kwargs)
        with self.region_mode.bypassed():
            return forward(*args, **kwargs)

    def _on_full_shape(self, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a module whose code reads the length of the sequence."""
        args, kwargs = self._bypass_mode(self.sequence.module_inputs, fqn, args, kwargs)
        self.sequence.join()
        return forward(*args, **kwargs)

    def _product(self, run: Run, x: Tensor, is_sharded: bool, *args: Any, **kwargs: Any) -> Tensor:
        """The product with the input in the region, at the positions that tensor ranks have together."""
        if is_sharded and isinstance(self.sequence, ShardedSequence) and self.sequence.inner is not None:
            x = self.sequence.read_in_region(x)
        with save_local_shard(x) if isinstance(x, SequenceShard) else _NOTHING:
            if isinstance(run, Product) and not args and not kwargs:
                return self._inputs.multiply(run, self._ranks, x)
            return run(self._inputs.enter(x, self._ranks, fresh=True), True, *args, **kwargs)

    def _column(self, linear: LinearLike, run: Run, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sequence, over, placement = self.sequence, self._ranks, self._plan.placements[linear.parameter("weight")]
        x, is_sharded = sequence.linear_input(linear.fqn, x)
        if not sequence.is_sharded:
            out = self._product(run, x, False, *args, **kwargs)
        elif isinstance(sequence, ShardedSequence) and sequence.exchanges(linear.fqn):
            # Positions are exchanged for features after the linear, which makes the features of the tensor rank.
            assert self._plan.positions is not None
            over, placement = self._all, self._plan.positions.features[linear.fqn]
            if is_sharded:
                out = sequence.to_heads(self._product(run, x, True), linear.fqn)
            else:  # another sequence, replicated on every rank
                features, context = self._positions.features[linear.fqn], self._context
                out = shard_tensor(run(self._inputs.enter(x, over), True), features, context.rank, context.size)
            sequence.join()
        else:
            out = self._product(run, x, is_sharded, *args, **kwargs)
            if sequence.inner is not None:
                sequence.join()
        if self.region_mode is None and not self._plan.outputs:  # nothing reads the mark
            return out
        assert isinstance(placement, Shard)
        column = (placement, linear.feature_dim) if linear.fqn in self._plan.offsets else None
        return mark(out, over.size, column, linear=linear.fqn)

    def _row(self, linear: LinearLike, run: Run, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sequence = self.sequence
        if isinstance(sequence, ShardedSequence) and sequence.exchanges(linear.fqn):
            x = sequence.to_positions(x, linear.fqn)
        if self._ranks.size == 1:
            return run(x, True, *args, **kwargs)
        if isinstance(run, Product) and sequence.inner is None:
            return run.leave(self._ranks, x)
        out = run(x, False, *args, **kwargs)
        if isinstance(sequence, ShardedSequence) and sequence.inner is not None:
            out = sequence.reduce_scatter(out, sequence.inner)
        else:
            out = leave(out, self._ranks)
        bias = self._modules[linear.fqn]._parameters.get("bias") if linear.has_bias else None
        shape = -1, *[1] * (-1 - linear.feature_dim)
        return out if bias is None else add_bias(out, bias.view(shape))

    def _gathered(self, linear: LinearLike, run: Run, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        has_full_shape = isinstance(x, SequenceShard)
        x, is_sharded = self.sequence.linear_input(linear.fqn, x)
        out = self._product(run, x, is_sharded, *args, **kwargs)
        out = gather(out, out.dim() + linear.feature_dim, self._ranks)
        inner = self.sequence.inner
        return shard_sequence(out, inner) if inner is not None and is_sharded and not has_full_shape else out

    def _attention(
        self, fqn: str, module: nn.MultiheadAttention, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if (ring := self.ring) is None:
            args, kwargs = self.sequence.module_inputs(fqn, args, kwargs)
            self.sequence.join()
        elif self.sequence.inner is not None:
            raise CannotShard(
                "ring attention has no nn.MultiheadAttention of positions that are sharded over tensor ranks too",
                entry="ring-attention",
            )
        # The ranks of one axis where the sequence is not sharded over the other.
        ranks = self._all if ring is None else self._ranks
        summed = partial(leave if ring is not None else self.sequence.summed, ranks=self._ranks)
        attend = None if ring is None else partial(ring.attend_in_module, fqn)
        with contextlib.ExitStack() as saved:
            for tensor in tensors_in((*args, *kwargs.values())):
                saved.enter_context(save_local_shard(tensor))
            enter = partial(self._inputs.enter, ranks=ranks)
            return sharded_attention(module, ranks, enter, summed, self._around_draw, *args, ring=attend, **kwargs)


def convolution_of(module: nn.Module) -> Callable[..., Tensor]:
    """Makes a function that calls a convolution, with or without its bias; shapes are as in its forward."""
    forward = module.forward

    def run(x: Tensor, with_bias: bool, *args: Any, **kwargs: Any) -> Tensor:
        if with_bias:
            return forward(x, *args, **kwargs)
        bias, module._parameters["bias"] = module._parameters["bias"], None
        try:
            return forward(x, *args, **kwargs)
        finally:
            module._parameters["bias"] = bias

    return run
