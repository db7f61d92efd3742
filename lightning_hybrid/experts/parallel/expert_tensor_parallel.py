"""Cut each of a module's stacked experts over tensor ranks: every rank has a part of all of them.

Between its products an expert has a width of its own, in which features are treated alike. So its first weights are
cut by what they make, its last one by what it reads, and each rank's result is an addend:

    up    [E, 2H, D]   gate 0 1 2 3 | up 0 1 2 3      rank 0: gate 0 1 | up 0 1
    down  [E, D, H]    0 1 2 3                        rank 0: 0 1

    tokens ─► enter ─► experts of this rank's width ─► sum over ranks ─► ...

Which weight is which, how they lie (transposed, fused, interleaved), and which biases are added behind the sum, is
found by trying; what is right is proved (``proof.py``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_hybrid.parts.placement import Piece, Shard
from lightning_hybrid.randomness.keyed_draws import replaced_forwards
from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.absent_tensors import is_absent

_MOST = 48  # ways that are tried


@dataclass(frozen=True)
class Width:
    """How the experts of one module are cut over tensor ranks.

    Attributes:
        size: Number of ranks.
        length: The width of one expert.
        placements: Of the parameters that are cut, by name in the module.
        summed: Whole on every rank, which uses them on its own part: their gradients are summed.
        once: Those of them that are added to the sum: the first rank alone uses them.
        attributes: Whole numbers of the module that are divided.
    """

    size: int
    length: int
    placements: Mapping[str, Shard]
    summed: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @contextlib.contextmanager
    def held(
        self, module: nn.Module, rank: int, sum_gradients: Callable[[list[Tensor]], list[Tensor]]
    ) -> Iterator[None]:
        """The module, whose parameters are cut, can run inside.

        Args:
            module: With the parameters of this rank.
            rank: This one.
            sum_gradients: Of tensors like those given the gradients are summed over the ranks.
        """
        attributes, parameters = module.__dict__, module._parameters
        numbers = {name: attributes[name] for name in self.attributes}
        whole = {name: parameter for name in self.summed if (parameter := parameters[name]) is not None}
        trained = [name for name, p in whole.items() if p.requires_grad and torch.is_grad_enabled()]
        given: dict[str, Any] = dict(whole)
        if trained:
            given |= zip(trained, sum_gradients([whole[name] for name in trained]), strict=True)
        if rank:
            here = {name: torch.ones((), dtype=torch.bool, device=whole[name].device) for name in self.once}
            given |= {name: given[name].masked_fill(mask, 0.0) for name, mask in here.items()}
        try:
            attributes.update({name: number // self.size for name, number in numbers.items()})
            parameters.update(given)
            yield
        finally:
            attributes.update(numbers)
            parameters.update(whole)


def possible_widths(module: nn.Module, size: int) -> tuple[list[Width], str]:
    """How stacked experts may be cut, the likeliest way first; and why there is none.

    Args:
        module: Of the user, whole; its own parameters are stacked along their first dim.
        size: Number of tensor ranks.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    weights = [name for name, shape in shapes.items() if len(shape) == 3]
    others = [name for name in shapes if name not in weights]
    if len(weights) < 2 or any(len(shapes[name]) > 3 for name in others):
        return [], "no two of its weights have a width between them"
    found: list[Width] = []
    uneven: list[int] = []
    for row, dim in itertools.product(reversed(weights), (2, 1)):
        length = shapes[row][dim]
        columns = [name for name in weights if name != row]
        cuts = [_ways(shapes[name], length, size) for name in columns]
        if not all(cuts) or length == 1:
            continue
        if length % size:
            uneven.append(length)
            continue
        numbers = [name for name, value in vars(module).items() if type(value) is int and value == length]
        beside = [_ways_beside(shapes[name], length, size) for name in others]
        for chosen in itertools.product(*cuts, *beside):
            named = dict(zip((*columns, *others), chosen, strict=True))
            placements = {name: how for name, how in named.items() if isinstance(how, Shard)}
            placements[row] = Shard.evenly(dim, length, size)
            summed = tuple(name for name, how in named.items() if not isinstance(how, Shard))
            once = tuple(name for name in summed if named[name] == "once")
            for attributes in dict.fromkeys([(), tuple(numbers)]):
                found.append(Width(size, length, placements, summed, once, attributes))
    if uneven:
        return found[:_MOST], f"the width {uneven[0]} of its experts is no multiple of {size} tensor ranks"
    return found[:_MOST], "" if found else "no weight reads as many features as others make"


def _ways_beside(shape: Sequence[int], length: int, size: int) -> list[Shard | str]:
    """The same of what is no weight, which may also be added behind the sum, or stand before it."""
    if len(shape) == 1:
        return ["summed", "once"]
    return [*_ways(shape, length, size), "once", "summed"]


def _ways(shape: Sequence[int], length: int, size: int) -> list[Shard]:
    """How a parameter may be cut whose features are as many as the width, or two times that."""
    if length % size:
        return [Shard.evenly(dim, number, 1) for dim, number in enumerate(shape) if dim and number % length == 0]
    found = []
    for dim, number in list(enumerate(shape))[1:]:
        if number == 2 * length:
            found += [Shard(dim, (Piece(length, size), Piece(length, size))), Shard.evenly(dim, number, size)]
        elif number == length:
            found.append(Shard.evenly(dim, number, size))
    return found


def width_placements(root: nn.Module, widths: Mapping[str, Width]) -> dict[str, Shard]:
    """Where the parts of experts lie, by FQN of the parameter in the root.

    Args:
        root: The user's module, whole.
        widths: By FQN of the module.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    return {
        names[id(root.get_submodule(fqn).get_parameter(name))]: placement
        for fqn, width in widths.items()
        for name, placement in width.placements.items()
    }


class TensorRanks(Protocol):
    """The ranks over which widths are cut, as one of them sees them.

    Attributes:
        rank: This one.
    """

    rank: int

    def enter(self, tensor: Tensor) -> Tensor:
        """A value that all ranks have, of whose gradient each has an addend."""

    def leave(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' addends, in place."""

    def sum_gradients(self, tensors: list[Tensor]) -> list[Tensor]:
        """Values that all ranks have, of whose gradients each has an addend, in one message."""


class CutWidths:
    """The modules of one rank whose experts are cut."""

    def __init__(self, root: nn.Module, widths: Mapping[str, Width], ranks: TensorRanks) -> None:
        """Args: root: the user's module. widths: by FQN of the module. ranks: that share the experts."""
        self._root, self._widths, self._ranks = root, widths, ranks

    def _modules(self) -> dict[str, nn.Module]:
        found = {fqn: self._root.get_submodule(fqn) for fqn in self._widths}
        return {fqn: module for fqn, module in found.items() if not any(map(is_absent, module.parameters()))}

    def holding(self) -> AbstractContextManager[None]:
        """The modules' own code runs on this rank's part of the width; below what shares experts."""
        return replaced_forwards(self._modules(), lambda fqn, forward: partial(self._held, fqn, forward))

    def running(self) -> AbstractContextManager[None]:
        """Results are sums over the ranks; above what shares experts, so that rows that travel are not yet summed."""
        return replaced_forwards(self._modules(), lambda fqn, forward: partial(self._run, forward))

    def _held(self, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self._root.get_submodule(fqn)
        with self._widths[fqn].held(module, self._ranks.rank, self._ranks.sum_gradients):
            return forward(*args, **kwargs)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        trained = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad] if torch.is_grad_enabled() else []
        if trained:
            # Weights of tokens in float32 beside rows in float64: addends of their gradients are not rounded either.
            dtype = max(trained, key=Tensor.numel).dtype
            inside = {id(x): self._ranks.enter(x.to(torch.promote_types(x.dtype, dtype))) for x in trained}
            args, kwargs = unflatten([inside.get(id(x), x) for x in leaves], spec)
        return self._ranks.leave(forward(*args, **kwargs).clone())
