"""Sequence sharding of one forward of a unit: split, gather and hand on its positions.

Positions are dealt to tensor ranks, to context ranks, or to context ranks and what each has to its tensor ranks:

    own positions ─► gathered over tensor ranks ─► column ─► exchanged over context ranks ─► all positions of own heads
                     (if dealt to these)                     (if dealt to these, in a region that mixes positions)

and all the way back behind the row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.randomness.keyed_draws import draws
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, rebuild_call, unflatten
from lightning_hybrid.step.standins.deferred_tensors import whole_of
from lightning_hybrid.tensor.collectives import sequence_collectives as positions
from lightning_hybrid.tensor.collectives.rank_collectives import ExchangingRanks
from lightning_hybrid.tensor.collectives.sequence_collectives import AnyDealt, Dealt, DealtTwice, OwnPositions, dealt_of
from lightning_hybrid.tensor.plan.unit_plan import PositionsPlan
from lightning_hybrid.tensor.runtime.local_offsets import CannotShard


class Dealing:
    """The positions of one forward.

    Attributes:
        dealt: Which positions this rank has.
        outer: How the sequence is dealt to context ranks, if it is.
        inner: How it, or what a context rank has of it, is dealt to tensor ranks, if it is.
        inputs: While learning, which arguments of which module were seen to come in dealt.
        outputs: While learning, which results of the unit were seen to come out dealt.
        is_own: Whether the code that runs now works on this rank's positions alone.
    """

    def __init__(self, plan: PositionsPlan, dealt: AnyDealt, batch: tuple[int, ...], *, learning: bool) -> None:
        """Args: plan: of the unit. dealt: the sequence. batch: sizes before the positions. learning: in a trial."""
        self._plan, self.dealt, self._batch, self._learning = plan, dealt, batch, learning
        self.outer: Dealt | None = None
        self.inner: Dealt | None = None
        if isinstance(dealt, DealtTwice):
            self.outer, self.inner = dealt.outer, dealt.inner
        elif plan.by == "tensor":
            self.inner = dealt
        else:
            self.outer = dealt
        # Code around no linear that exchanges works on what a context rank has.
        self._of_region = {fqn for fqn in plan.shown if not any(_is_in(linear, fqn) for linear in plan.features)}
        self._shown: dict[tuple[int, bool], tuple[Tensor, OwnPositions, int]] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.outputs: tuple[int, ...] = plan.outputs
        self.is_own = True

    @classmethod
    def of_call(
        cls,
        plan: PositionsPlan,
        ranks: ExchangingRanks,
        context: ExchangingRanks,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        learning: bool,
    ) -> Dealing | None:
        """The dealing of one call of the unit; None for another kind of call, or fewer positions than ranks."""
        leaves, _ = flatten_call(args, kwargs)
        sequence = leaves[plan.place] if plan.place < len(leaves) else None
        if not isinstance(sequence, Tensor) or sequence.dim() != plan.num_dims:
            return None
        length = sequence.shape[plan.dim]
        num_ranks = (1 if plan.by == "context" else ranks.size) * (1 if plan.by == "tensor" else context.size)
        if length < num_ranks:
            return None
        dealt: AnyDealt
        if plan.by == "both":
            dealt = DealtTwice.of(plan.dim, length, context, ranks)
        else:
            dealt = Dealt(plan.dim, length, ranks if plan.by == "tensor" else context)
        return cls(plan, dealt, tuple(sequence.shape[: plan.dim]), learning=learning)

    @property
    def lengths(self) -> tuple[tuple[int, ...], int]:
        """How many positions values in regions may have, and how many this rank has."""
        wholes = (self.dealt.length, *([self.inner.length] if self.inner is not None else []))
        return tuple(dict.fromkeys(wholes)), self.dealt.local_length

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The unit's arguments with this rank's positions of the sequence, and what other units hand on made whole."""
        leaves, plain = flatten_call(args, kwargs)
        place = self._plan.place
        leaves = [dealt_of(leaf, self.dealt) if k == place else whole_of(leaf) for k, leaf in enumerate(leaves)]
        if "" in self._plan.shown:
            leaves[place] = self._value(leaves[place], of_region="" in self._of_region)
        return rebuild_call(leaves, args, kwargs, plain)

    def end(self, output: Any, *, handed_on: bool) -> Any:
        """The unit's result, whole, or such that the next unit can take this rank's positions of it."""
        leaves, spec = flatten(output)
        if self._learning:
            self.outputs = tuple(place for place, leaf in enumerate(leaves) if self._fits(leaf))
        for place in self.outputs:
            if place >= len(leaves) or not self._fits(leaves[place]):
                raise CannotShard(f"result {place} of the unit has no positions in dim {self.dealt.dim}")
            later = OwnPositions.of(leaves[place], self.dealt)
            leaves[place] = later if handed_on else later.whole()
        for _, value, _ in self._shown.values():
            value.release()
        return unflatten([leaf if handed_on else whole_of(leaf) for leaf in leaves], spec)

    def _fits(self, value: Any) -> bool:
        """Whether a value could be this rank's positions."""
        dim = self.dealt.dim
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dim() > dim
            and tuple(value.shape[:dim]) == self._batch
            and value.shape[dim] == self.dealt.local_length
        )

    # --- what modules inside are given --------------------------------------------------------------------------------

    def shown(self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a module inside, those that are dealt as they are shown to code that asks for sizes."""
        leaves, plain = flatten_call(args, kwargs)
        if self._learning:  # its sizes are all different
            found = [place for place, leaf in enumerate(leaves) if self._is_dealt(leaf)]
            self.inputs[fqn] = tuple(sorted({*self.inputs.get(fqn, ()), *found}))
        for place in self.inputs[fqn] if self._learning else self._plan.inputs.get(fqn, ()):
            if place < len(leaves) and isinstance(leaves[place], Tensor):
                leaves[place] = self._value(self._local(leaves[place]), of_region=fqn in self._of_region)
        return rebuild_call(leaves, args, kwargs, plain)

    def given(self, fqn: str, x: Tensor) -> tuple[Tensor, bool]:
        """The input of a linear, and whether it is this rank's positions."""
        if self.inner is not None or self.exchanges(fqn):  # others need not know: they do the same to whatever it is
            (x,), _ = self.shown(fqn, (x,), {})
        return (self._local(x), True) if isinstance(x, OwnPositions) else (x, False)

    def exchanges(self, fqn: str) -> bool:
        """Whether context ranks exchange positions for the features of a linear."""
        return fqn in self._plan.features

    def in_region(self, local: Tensor) -> OwnPositions:
        """What stands for the positions that tensor ranks have together."""
        return self._value(local, of_region=True)

    def _is_dealt(self, leaf: Any) -> bool:
        return isinstance(leaf, OwnPositions) or self._fits(leaf)

    def _local(self, value: Tensor) -> Tensor:
        """This rank's positions of a value that is dealt."""
        if not isinstance(value, OwnPositions):
            return value
        is_of_region = self.inner is not None and value.dealt.is_alike(self.inner)
        return dealt_of(value, self.inner if is_of_region and self.inner is not None else self.dealt)

    def _value(self, local: Tensor, *, of_region: bool = False) -> OwnPositions:
        """What stands for a value that is dealt; the same object for the same value."""
        dealt = self.inner if of_region and self.inner is not None else self.dealt
        key = id(local), dealt is self.dealt
        known = self._shown.get(key)
        if known is None or known[0] is not local or known[0]._version != known[2]:
            if not self._fits(local):
                raise CannotShard(
                    f"a value of shape {tuple(local.shape)} should have {self.dealt.local_length} positions of"
                    f" {self.dealt.length} in dim {self.dealt.dim}, as when the unit's plan was proved"
                )
            known = self._shown[key] = local, OwnPositions.of(local, dealt), local._version
        return known[1]

    # --- on the way out of a region -----------------------------------------------------------------------------------

    def leave(self, addend: Tensor) -> Tensor:
        """This rank's positions of a sum over all ranks that positions are dealt to."""
        return self._left(addend, self.dealt)

    def leave_region(self, addend: Tensor) -> Tensor:
        """This rank's positions of a sum over tensor ranks."""
        assert self.inner is not None
        return self._left(addend, self.inner)

    def _left(self, addend: Tensor, dealt: AnyDealt) -> Tensor:
        _check_length(addend, dealt)
        self.is_own = True
        return positions.leave(addend, dealt)

    def to_positions(self, inside: Tensor, fqn: str) -> Tensor:
        """A context rank's positions of a region's value."""
        assert self.outer is not None
        _check_length(inside, self.outer)
        self.is_own = self.inner is None
        return positions.to_positions(inside, self.outer, self._plan.features[fqn])

    def to_heads(self, local: Tensor, fqn: str) -> Tensor:
        """A region's value."""
        assert self.outer is not None
        return positions.to_heads(local, self.outer, self._plan.features[fqn])


def _is_in(fqn: str, module: str) -> bool:
    return not module or fqn == module or fqn.startswith(f"{module}.")


def _check_length(value: Tensor, dealt: AnyDealt) -> None:
    if value.dim() <= dealt.dim or value.shape[dealt.dim] != dealt.length:
        raise CannotShard(f"a value of shape {tuple(value.shape)} has no {dealt.length} positions in dim {dealt.dim}")


class OwnPositionsDraw(TorchFunctionMode):
    """Ranks draw different random numbers for their positions, and equal ones where they have the same."""

    def __init__(self, dealing: Dealing, around_draw: Callable[[], AbstractContextManager[Any]]) -> None:
        """Args: dealing: of the forward under way. around_draw: a context that makes draws differ by rank."""
        super().__init__()
        self._dealing, self._around_draw = dealing, around_draw

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a draw for own positions differ."""
        kwargs = kwargs or {}
        if self._dealing.is_own and draws(getattr(func, "__name__", ""), args, kwargs):
            with self._around_draw():
                return func(*args, **kwargs)
        return func(*args, **kwargs)
