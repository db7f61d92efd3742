"""Tensor parallelism of stacked experts: each rank has a shard of the hidden features of every expert.

The hidden features of an expert are interchangeable. So its first weights are sharded by output features
(column-parallel), its last one by input features (row-parallel), and each rank's result is an addend:

    up    [E, 2H, D]   gate 0 1 2 3 | up 0 1 2 3      rank 0: gate 0 1 | up 0 1
    down  [E, D, H]    0 1 2 3                        rank 0: 0 1

    tokens ─► enter ─► experts of this rank's width ─► sum over ranks ─► ...

The roles of the weights, their layout (transposed, fused, interleaved), and the biases that are added after the sum are
found by trial; the right candidate is proved (``proof.py``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.params.placement import Piece, Shard
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.tensor_ranks import FullParameterReads
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.tensor.collectives import Ranks, enter, leave, sum_gradients

_MAX_CANDIDATES = 48


@dataclass(frozen=True)
class WidthSharding:
    """Sharding of the experts of one module over tensor ranks."""

    size: int  # number of ranks
    length: int  # width of one expert: its number of hidden features
    placements: Mapping[str, Shard]  # shardings of the parameters, by name in the module
    # replicated parameters that each rank uses on its features: their gradients are summed
    summed: tuple[str, ...] = ()
    once: tuple[str, ...] = ()  # those of them that are added after the sum: only the first rank uses them
    attributes: tuple[str, ...] = ()  # integer attributes of the module that are divided by ``size``

    @contextlib.contextmanager
    def local_features(
        self, module: nn.Module, rank: int, sum_gradients: Callable[[list[Tensor]], list[Tensor]]
    ) -> Iterator[None]:
        """Adapts a module with the parameter shards of a rank so that its own code runs inside the context.

        ``sum_gradients`` returns equal tensors, of any shape, whose gradients are summed over the ranks.
        """
        attributes, parameters = module.__dict__, module._parameters
        numbers = {name: attributes[name] for name in self.attributes}
        replicated = {name: parameter for name in self.summed if (parameter := parameters[name]) is not None}
        trained = [name for name, p in replicated.items() if p.requires_grad and torch.is_grad_enabled()]
        tensors: dict[str, Any] = dict(replicated)
        if trained:
            tensors |= zip(trained, sum_gradients([replicated[name] for name in trained]), strict=True)
        if rank:
            masks = {name: torch.ones((), dtype=torch.bool, device=replicated[name].device) for name in self.once}
            tensors |= {name: tensors[name].masked_fill(mask, 0.0) for name, mask in masks.items()}
        try:
            attributes.update({name: number // self.size for name, number in numbers.items()})
            parameters.update(tensors)
            yield
        finally:
            attributes.update(numbers)
            parameters.update(replicated)


UNSHARDED = WidthSharding(1, 0, {})


def possible_widths(module: nn.Module, size: int) -> tuple[list[WidthSharding], str]:
    """Returns candidate shardings of stacked experts over ranks, the most likely first; the reason if there is none."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    weights = [name for name, shape in shapes.items() if len(shape) == 3]
    others = [name for name in shapes if name not in weights]
    if len(weights) < 2 or any(len(shapes[name]) > 3 for name in others):
        return [], "no two of its weights have a width between them"
    candidates: list[WidthSharding] = []
    uneven: list[int] = []
    for row, dim in itertools.product(reversed(weights), (2, 1)):
        length = shapes[row][dim]
        columns = [name for name in weights if name != row]
        shardings = [_weight_shardings(shapes[name], length, size) for name in columns]
        if not all(shardings) or length == 1:
            continue
        if length % size:
            uneven.append(length)
            continue
        numbers = [name for name, value in vars(module).items() if type(value) is int and value == length]
        bias_shardings = [_bias_shardings(shapes[name], length, size) for name in others]
        for chosen in itertools.product(*shardings, *bias_shardings):
            named = dict(zip((*columns, *others), chosen, strict=True))
            placements = {name: how for name, how in named.items() if isinstance(how, Shard)}
            placements[row] = Shard.evenly(dim, length, size)
            summed = tuple(name for name, how in named.items() if not isinstance(how, Shard))
            once = tuple(name for name in summed if named[name] == "once")
            for attributes in dict.fromkeys([(), tuple(numbers)]):
                candidates.append(WidthSharding(size, length, placements, summed, once, attributes))
    reason = "" if candidates else "no weight reads as many features as others produce"
    if uneven:
        reason = f"the width {uneven[0]} of its experts is no multiple of {size} tensor ranks"
    return candidates[:_MAX_CANDIDATES], reason


def _bias_shardings(shape: Sequence[int], length: int, size: int) -> list[Shard | str]:
    """Candidate shardings of a parameter that is no weight; it may also be replicated, before or after the sum."""
    if len(shape) == 1:
        return ["summed", "once"]
    return [*_weight_shardings(shape, length, size), "once", "summed"]


def _weight_shardings(shape: Sequence[int], length: int, size: int) -> list[Shard]:
    """Candidate shardings of a parameter, along a dim of the width or of two times the width."""
    if length % size:
        return [Shard.evenly(dim, number, 1) for dim, number in enumerate(shape) if dim and number % length == 0]
    candidates = []
    for dim, number in list(enumerate(shape))[1:]:
        if number == 2 * length:
            candidates += [Shard(dim, (Piece(length, size), Piece(length, size))), Shard.evenly(dim, number, size)]
        elif number == length:
            candidates.append(Shard.evenly(dim, number, size))
    return candidates


def width_placements(root: nn.Module, widths: Mapping[str, WidthSharding]) -> dict[str, Shard]:
    """Returns how the parameters of experts are sharded over tensor ranks, by FQN in the root."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    return {
        names[id(root.get_submodule(fqn).get_parameter(name))]: placement
        for fqn, width in widths.items()
        for name, placement in width.placements.items()
    }


class TensorShardedExperts:
    """Runs the modules of one rank whose experts are sharded over tensor ranks."""

    def __init__(self, root: nn.Module, widths: Mapping[str, WidthSharding], ranks: Ranks) -> None:
        self._root, self._widths, self._ranks = root, widths, ranks
        named = {fqn: root.get_submodule(fqn).named_parameters() for fqn in widths}
        self._sharded = {fqn: {id(p) for name, p in named[fqn] if name in widths[fqn].placements} for fqn in widths}
        self._replaced: set[str] = set()  # modules that run in full now
        self._reads: list[FullParameterReads] = []

    def gather_on_read(
        self, sharding: AxisSharding, guards: ReadGuards, agreement: HookAgreement, further: Collection[str]
    ) -> None:
        """Gathers parameters, sharded so over tensor ranks, when code outside of the experts reads them.

        ``further`` are FQNs of parameters that other ranks share too.
        """
        self._reads = [FullParameterReads(self._root, sharding, (), guards, agreement, further)]

    def _modules(self) -> dict[str, nn.Module]:
        modules = {fqn: self._root.get_submodule(fqn) for fqn in self._widths}
        return {fqn: module for fqn, module in modules.items() if not any(map(is_absent, module.parameters()))}

    def local_widths(self) -> AbstractContextManager[None]:
        """Runs the modules' own code on this rank's hidden features; innermost, inside expert parallelism."""
        return replaced_forwards(self._modules(), partial(partial, self._run_local), reason="local shards of experts")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sums results over the ranks; outside of expert parallelism, which exchanges rows that are not yet summed."""
        modules = self._modules()

        def around(fqn: str, run: Callable[..., Any]) -> Callable[..., Any]:
            for reads in self._reads:
                run = reads.of_layer(modules[fqn], run)
            return partial(self._run, fqn, run)  # outermost: a check of the unit around takes no call below for its own

        with contextlib.ExitStack() as stack:
            for reads in self._reads:
                stack.enter_context(reads.on())
            stack.enter_context(replaced_forwards(modules, around, reason="sharded experts"))
            yield

    def _run_local(self, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self._root.get_submodule(fqn)
        if fqn in self._replaced:
            return forward(*args, **kwargs)
        with self._widths[fqn].local_features(module, self._ranks.rank, self._summed):
            return forward(*args, **kwargs)

    def _summed(self, tensors: list[Tensor]) -> list[Tensor]:
        return sum_gradients(tensors, [None] * len(tensors), self._ranks)

    def _is_replaced(self, fqn: str) -> bool:
        """Whether full tensors replace parameters for one call (``torch.func.functional_call``)."""
        return not self._sharded[fqn] <= {id(p) for p in self._root.get_submodule(fqn).parameters()}

    def _run(self, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_replaced(fqn):
            self._replaced.add(fqn)
            try:
                return forward(*args, **kwargs)
            finally:
                self._replaced.discard(fqn)
        leaves, spec = flatten((args, kwargs))
        trained = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad] if torch.is_grad_enabled() else []
        if trained:
            # Router weights may be float32 with rows in float64: addends of their gradients must not be rounded.
            dtype = max(trained, key=Tensor.numel).dtype
            entered = {id(x): enter(x.to(torch.promote_types(x.dtype, dtype)), self._ranks) for x in trained}
            args, kwargs = unflatten([entered.get(id(x), x) for x in leaves], spec)
        return leave(forward(*args, **kwargs).clone(), self._ranks)
