"""One forward of a unit whose positions are dealt to the ranks: what is dealt, shown, gathered and handed on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hybrid.step.deferred import whole_of
from lightning_hybrid.step.randomness import draws
from lightning_hybrid.step.tree import flatten, flatten_call, rebuild_call, unflatten
from lightning_hybrid.tensor import positions
from lightning_hybrid.tensor.offsets import CannotShard
from lightning_hybrid.tensor.plan import PositionsPlan
from lightning_hybrid.tensor.positions import Dealt, OwnPositions, dealt_of
from lightning_hybrid.tensor.ranks import ExchangingRanks


class Dealing:
    """The positions of one forward.

    Attributes:
        dealt: Which positions this rank has.
        inputs: While learning, which arguments of which module were seen to come in dealt.
        outputs: While learning, which results of the unit were seen to come out dealt.
        is_own: Whether the code that runs now works on this rank's positions alone.
    """

    def __init__(self, plan: PositionsPlan, dealt: Dealt, batch: tuple[int, ...], *, learning: bool) -> None:
        """Args: plan: of the unit. dealt: the sequence. batch: sizes before the positions. learning: in a trial."""
        self._plan, self.dealt, self._batch, self._learning = plan, dealt, batch, learning
        self._shown: dict[int, tuple[Tensor, OwnPositions, int]] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.outputs: tuple[int, ...] = plan.outputs
        self.is_own = True

    @classmethod
    def of_call(
        cls,
        plan: PositionsPlan,
        ranks: ExchangingRanks,
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
        if sequence.shape[plan.dim] < ranks.size:
            return None
        dealt = Dealt(plan.dim, sequence.shape[plan.dim], ranks)
        return cls(plan, dealt, tuple(sequence.shape[: plan.dim]), learning=learning)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The unit's arguments with this rank's positions of the sequence, and what other units hand on made whole."""
        leaves, plain = flatten_call(args, kwargs)
        place = self._plan.place
        leaves = [dealt_of(leaf, self.dealt) if k == place else whole_of(leaf) for k, leaf in enumerate(leaves)]
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

    def shown(self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a module inside, those that are dealt as they are shown to code that asks for sizes."""
        leaves, plain = flatten_call(args, kwargs)
        if self._learning:  # its sizes are all different
            found = [place for place, leaf in enumerate(leaves) if self._is_dealt(leaf)]
            self.inputs[fqn] = tuple(sorted({*self.inputs.get(fqn, ()), *found}))
        for place in self.inputs[fqn] if self._learning else self._plan.inputs.get(fqn, ()):
            if place < len(leaves) and isinstance(leaves[place], Tensor):
                leaves[place] = self.value(leaves[place])
        return rebuild_call(leaves, args, kwargs, plain)

    def _is_dealt(self, leaf: Any) -> bool:
        return isinstance(leaf, OwnPositions) or self._fits(leaf)

    def value(self, local: Tensor) -> OwnPositions:
        """What stands for a value that is dealt; the same object for the same value."""
        if isinstance(local, OwnPositions):
            return local
        known = self._shown.get(id(local))
        if known is None or known[0] is not local or known[0]._version != known[2]:
            if not self._fits(local):
                raise CannotShard(
                    f"a value of shape {tuple(local.shape)} should have {self.dealt.local_length} positions of"
                    f" {self.dealt.length} in dim {self.dealt.dim}, as when the unit's plan was proved"
                )
            known = self._shown[id(local)] = local, OwnPositions.of(local, self.dealt), local._version
        return known[1]

    def leave(self, addend: Tensor) -> Tensor:
        """This rank's positions of a sum over ranks."""
        self._check_whole(addend)
        self.is_own = True
        return positions.leave(addend, self.dealt)

    def to_positions(self, inside: Tensor, fqn: str) -> Tensor:
        """This rank's positions of a region's value."""
        self._check_whole(inside)
        self.is_own = True
        return positions.to_positions(inside, self.dealt, self._plan.features[fqn])

    def to_heads(self, local: Tensor, fqn: str) -> Tensor:
        """A region's value."""
        return positions.to_heads(local, self.dealt, self._plan.features[fqn])

    def _check_whole(self, value: Tensor) -> None:
        dim = self.dealt.dim
        if value.dim() <= dim or value.shape[dim] != self.dealt.length:
            shape = tuple(value.shape)
            raise CannotShard(f"a value of shape {shape} has no {self.dealt.length} positions in dim {dim}")


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
