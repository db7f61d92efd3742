"""The sharded sequence of one forward of a unit: shards, gathers and returns its positions.

A sequence is sharded over tensor ranks, over context ranks, or over context ranks and each shard over tensor ranks:

    local positions ─► all-gather over tensor ranks ─► column ─► all-to-all over context ranks ─► all positions of
                       (if sharded over these)                   (if sharded over these, in a     the local heads
                                                                 region that mixes positions)

and the reverse after the row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_hybrid.errors import CannotShard
from lightning_hybrid.sequence import positions as positions
from lightning_hybrid.sequence.positions import (
    AnySharding,
    SequenceShard,
    SequenceSharding,
    TwoLevelSharding,
    shard_sequence,
)
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, rebuild_call, unflatten
from lightning_hybrid.step.standins.tensors import ShardedTensorBase, materialize
from lightning_hybrid.tensor.collectives import Ranks, leave
from lightning_hybrid.tensor.plan import PositionsPlan


class FullSequence:
    """The sequence of a forward in which each rank has all positions."""

    is_sharded = attends_by_ring = False
    is_local = False
    lengths: tuple[tuple[int, ...], int] | None = None
    outer: SequenceSharding | None = None
    inner: SequenceSharding | None = None

    def join(self) -> None:
        """The running code works on the positions of all ranks from now on."""
        self.is_local = False

    def begin(self, leaves: list[Any]) -> list[Any]:
        """The leaves of the unit's arguments, lazy tensors gathered; the same list if there are none.

        In the unit, values that are no shards may differ by rank.
        """
        return [*map(materialize, leaves)] if any(map(_is_lazy, leaves)) else leaves

    def end(self, output: Any, *, keep_sharded: bool) -> Any:
        """The unit's result."""
        return output

    def module_inputs(
        self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a module in the unit."""
        return args, kwargs

    def linear_input(self, fqn: str, x: Tensor) -> tuple[Tensor, bool]:
        """The input ``(..., features)`` of a linear, which is not this rank's positions alone."""
        return x, False

    def exchanges(self, fqn: str) -> bool:
        """Whether context ranks exchange positions for the features of a linear."""
        return False

    def summed(self, addend: Tensor, ranks: Ranks) -> Tensor:
        """The sum of the ranks' addends, of their shape."""
        return leave(addend, ranks)


FULL_SEQUENCE = FullSequence()


class ShardedSequence(FullSequence):
    """The sharded sequence of one forward of a unit.

    Attributes:
        sharding: Which positions this rank has.
        outer: How the sequence is sharded over context ranks, if it is.
        inner: How it, or the shard of a context rank, is sharded over tensor ranks, if it is.
        inputs: While learning, the indices of sharded arguments that were observed, by FQN of the module.
        outputs: While learning, the indices of sharded results of the unit that were observed.
        is_local: Whether the running code works on this rank's positions alone.
        attends_by_ring: Whether local queries attend by ring attention.
        lengths: The numbers of positions that values in regions may have, and the number that this rank has.
    """

    is_sharded = True

    def __init__(self, plan: PositionsPlan, sharding: AnySharding, batch: tuple[int, ...], *, learning: bool) -> None:
        """Takes the plan of the unit and the sizes ``batch`` before the positions; ``learning`` in a trial."""
        self._plan, self.sharding, self._batch, self._learning = plan, sharding, batch, learning
        if isinstance(sharding, TwoLevelSharding):
            self.outer, self.inner = sharding.outer, sharding.inner
        elif plan.by == "tensor":
            self.inner = sharding
        else:
            self.outer = sharding
        full = (sharding.length, *([self.inner.length] if self.inner is not None else []))
        self.lengths = tuple(dict.fromkeys(full)), sharding.local_length
        # Code that contains no linear that exchanges works on the shard of a context rank.
        self._of_region = {fqn for fqn in plan.shown if not any(_is_inside(linear, fqn) for linear in plan.features)}
        self._shards: dict[tuple[int, bool], tuple[Tensor, SequenceShard, int]] = {}
        self._read: list[SequenceShard] = []  # by the linears of the present region
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.outputs: tuple[int, ...] = plan.outputs
        self.is_local, self.attends_by_ring = True, plan.ring_attention

    @classmethod
    def of_call(
        cls,
        plan: PositionsPlan,
        ranks: Ranks,
        context: Ranks,
        leaves: list[Any],
        *,
        learning: bool,
    ) -> FullSequence:
        """The sequence of a call of the unit: full in another kind of call, or with fewer positions than ranks."""
        full = leaves[plan.leaf_index] if plan.leaf_index < len(leaves) else None
        if not isinstance(full, Tensor) or full.dim() != plan.num_dims:
            return FULL_SEQUENCE
        length = full.shape[plan.dim]
        num_ranks = (1 if plan.by == "context" else ranks.size) * (1 if plan.by == "tensor" else context.size)
        if length < num_ranks or (plan.ring_attention and length < 2 * context.size):
            return FULL_SEQUENCE  # a ring has two chunks on each rank
        sharding: AnySharding
        if plan.by == "both":
            sharding = TwoLevelSharding.of(plan.dim, length, context, ranks)
        else:
            sharding = SequenceSharding(plan.dim, length, ranks if plan.by == "tensor" else context)
        return cls(plan, sharding, tuple(full.shape[: plan.dim]), learning=learning)

    def begin(self, leaves: list[Any]) -> list[Any]:
        """The leaves with this rank's positions of the sequence; other lazy tensors are gathered."""
        index = self._plan.leaf_index
        leaves = [
            shard_sequence(leaf, self.sharding) if k == index else materialize(leaf) for k, leaf in enumerate(leaves)
        ]
        if "" in self._plan.shown:
            leaves[index] = self.represent(leaves[index], of_region="" in self._of_region)
        return leaves

    def end(self, output: Any, *, keep_sharded: bool) -> Any:
        """The unit's result: gathered, or a `SequenceShard` whose local positions the next unit uses."""
        leaves, spec = flatten(output)
        if self._learning:
            self.outputs = tuple(index for index, leaf in enumerate(leaves) if self._fits(leaf))
        for index in self.outputs:
            if index >= len(leaves) or not self._fits(leaves[index]):
                raise CannotShard(
                    f"result {index} of the unit has no positions in dim {self.sharding.dim}", entry="unproved-code"
                )
            shard = SequenceShard.of(leaves[index], self.sharding)
            leaves[index] = shard if keep_sharded else shard.full_tensor()
        for _, value, _ in self._shards.values():
            value.release()
        return unflatten([leaf if keep_sharded else materialize(leaf) for leaf in leaves], spec)

    def _fits(self, value: Any) -> bool:
        """Whether a value could be this rank's positions."""
        dim = self.sharding.dim
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dim() > dim
            and tuple(value.shape[:dim]) == self._batch
            and value.shape[dim] == self.sharding.local_length
        )

    # --- inputs of modules in the unit --------------------------------------------------------------------------------

    def module_inputs(
        self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a module in the unit, the sharded ones as `SequenceShard`, which has the full shape."""
        leaves, plain = flatten_call(args, kwargs)
        if self._learning:  # its sizes are all different
            found = [index for index, leaf in enumerate(leaves) if isinstance(leaf, SequenceShard) or self._fits(leaf)]
            self.inputs[fqn] = tuple(sorted({*self.inputs.get(fqn, ()), *found}))
        for index in self.inputs[fqn] if self._learning else self._plan.inputs.get(fqn, ()):
            if index < len(leaves) and isinstance(leaves[index], Tensor):
                leaves[index] = self.represent(self._local(leaves[index]), of_region=fqn in self._of_region)
        return rebuild_call(leaves, args, kwargs, plain)

    def linear_input(self, fqn: str, x: Tensor) -> tuple[Tensor, bool]:
        """The input ``(..., features)`` of a linear, and whether it is this rank's positions."""
        if self.inner is not None or self.exchanges(fqn):  # other linears do the same with any input
            (x,), _ = self.module_inputs(fqn, (x,), {})
        return (self._local(x), True) if isinstance(x, SequenceShard) else (x, False)

    def exchanges(self, fqn: str) -> bool:
        """Whether context ranks exchange positions for the features of a linear."""
        return fqn in self._plan.features

    def _local(self, value: Tensor) -> Tensor:
        """This rank's positions of a sharded value."""
        if not isinstance(value, SequenceShard):
            return value
        return shard_sequence(value, value.sharding if value.sharding == self.inner else self.sharding)

    def represent(self, local: Tensor, *, of_region: bool = False) -> SequenceShard:
        """The lazy tensor for a shard, of the full shape or the tensor ranks' shape together; one for each value."""
        sharding = self.inner if of_region and self.inner is not None else self.sharding
        key = id(local), sharding is self.sharding
        cached = self._shards.get(key)
        if cached is None or cached[0] is not local or cached[0]._version != cached[2]:
            if not self._fits(local):
                raise CannotShard(
                    f"a value of shape {tuple(local.shape)} should have {self.sharding.local_length} positions of"
                    f" {self.sharding.length} in dim {self.sharding.dim}, as when the unit's plan was proved",
                    entry="unproved-code",
                )
            cached = self._shards[key] = local, SequenceShard.of(local, sharding), local._version
        return cached[1]

    # --- outputs of regions -------------------------------------------------------------------------------------------

    def read_in_region(self, local: Tensor) -> SequenceShard:
        """The lazy tensor, of the shape that tensor ranks have together, for a linear in a region."""
        value = self.represent(local, of_region=True)
        if not any(value is other for other in self._read):
            self._read.append(value)
        return value

    def reduce_scatter(self, addend: Tensor, sharding: AnySharding) -> Tensor:
        """This rank's positions of the sum of the ranks' addends, which have the full shape of the sharding."""
        _check_length(addend, sharding)
        self.is_local, read, self._read = True, self._read, []
        return positions.leave(addend, sharding, read)

    def summed(self, addend: Tensor, ranks: Ranks) -> Tensor:
        """This rank's positions of the sum of the ranks' addends, which have the full shape."""
        addend = self.reduce_scatter(addend, self.sharding)
        return leave(addend, ranks) if self.inner is None else addend

    def to_positions(self, inside: Tensor, fqn: str) -> Tensor:
        """All-to-all: ``(positions, local heads)`` to ``(local positions, features)`` of a context rank."""
        assert self.outer is not None
        _check_length(inside, self.outer)
        self.is_local = self.inner is None
        return positions.to_positions(inside, self.outer, self._plan.features[fqn])

    def to_heads(self, local: Tensor, fqn: str) -> Tensor:
        """All-to-all: ``(local positions, features)`` of a context rank to ``(positions, local heads)``."""
        assert self.outer is not None
        return positions.to_heads(local, self.outer, self._plan.features[fqn])


def _is_lazy(value: Any) -> bool:
    return isinstance(value, ShardedTensorBase)


def _is_inside(fqn: str, module: str) -> bool:
    return not module or fqn == module or fqn.startswith(f"{module}.")


def _check_length(value: Tensor, sharding: AnySharding) -> None:
    if value.dim() <= sharding.dim or value.shape[sharding.dim] != sharding.length:
        raise CannotShard(
            f"a value of shape {tuple(value.shape)} has no {sharding.length} positions in dim {sharding.dim}",
            entry="unproved-code",
        )
