"""How modules with experts are called, so that the rows of their tokens can be computed elsewhere.

An adapter knows one way: how to get rows sorted by expert out of a call, how the experts of one rank compute rows, and
how the results become what the call returns. Three are here, and users register further ones:

    BatchedPairs    experts(hidden [T, D], which [T, k], weights [T, k])     weights stacked [E, ...], as transformers'
    BatchedRows     experts(rows [P, D] by expert, counts [E])               weights stacked; the package's own layer
    ExpertList      block(...) that calls self.experts[i](rows) in a loop    modules of a ModuleList
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.moe.token_dispatch import all_pairs, combine, take_rows
from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.step.objects.pytree import flatten, unflatten

# Of rows [P, D] sorted by expert and how many there are of each expert [E]: what the experts make of them, [P, D'].
Exchange = Callable[[Tensor, Tensor], Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]
_TOKENS = 13  # of each rank in a proof


class ExpertsAdapter(ABC):
    """One module with experts, and how it is called.

    Attributes:
        num_experts: Of the module.
        what: The way it is called, in words.
        may_skip: Whether an expert that gets no row has no gradient.
        again: Makes of the module's forward one that draws what the forward draws next; set for a run.
    """

    what: ClassVar[str]
    may_skip: ClassVar[bool] = False

    def __init__(self, num_experts: int) -> None:
        """Args: num_experts: of the module."""
        self.num_experts = num_experts
        self.again: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is

    @classmethod
    @abstractmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """Adapters that may be right, the likeliest first; what is right is proved.

        Args:
            module: Of the user, whole.
            call: Positional and keyword arguments of a call of it; tensors have no content.
        """

    @abstractmethod
    def placements(self, module: nn.Module, size: int) -> dict[str, Shard]:
        """Where the parts of its parameters lie, by name in the module.

        Args:
            module: Whole.
            size: Number of ranks; divides the number of experts.
        """

    @abstractmethod
    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """A small call with real values, for the proof; not all ranks' should meet all experts.

        Args:
            call: As it was recorded; its tensors may have no content.
            rank: Whose it is; 0 is the first.
            size: Number of ranks.
            generator: For random numbers.
        """

    @abstractmethod
    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Any:
        """What a call of the module returns, where its experts are elsewhere.

        Args:
            module: With the parameters of this rank.
            forward: Its own.
            args: Of the call.
            kwargs: Of the call.
            exchange: Lets rows be computed where their experts are; called once.
        """

    @abstractmethod
    def compute(
        self, module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """What experts of this rank make of rows.

        Args:
            module: With the parameters of this rank.
            forward: Its own.
            rows: [R, D], sorted by expert.
            counts: How many of each expert.
            first: The first of these experts, among those of this rank.
        """


class _Batched(ExpertsAdapter):
    """Weights are stacked along their first dim."""

    def __init__(self, num_experts: int, attributes: Sequence[str], names: Mapping[str, str]) -> None:
        """Args: attributes: that hold the number of experts. names: of the arguments, by what they are."""
        super().__init__(num_experts)
        self.attributes, self.names = tuple(attributes), dict(names)

    def placements(self, module: nn.Module, size: int) -> dict[str, Shard]:
        """As ``ExpertsAdapter``."""
        return {name: Shard.evenly(0, self.num_experts, size) for name, _ in module.named_parameters()}

    def _called(self, module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Tensor:
        """By place where that is possible: what is behind a decorated forward may have other names for them."""
        given = {self.names[what]: value for what, value in arguments.items()}
        by_place = []
        for parameter in list(_signature(type(module).forward).parameters.values())[1:]:
            if parameter.name not in given or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                break
            by_place.append(given.pop(parameter.name))
        out: Tensor = forward(*by_place, **given)
        return out

    @contextlib.contextmanager
    def _as_many(self, module: nn.Module) -> Iterator[None]:
        """The module has as many experts as weights inside."""
        here = next(module.parameters()).shape[0]
        saved = {name: module.__dict__[name] for name in self.attributes}
        module.__dict__.update(dict.fromkeys(self.attributes, here))
        try:
            yield
        finally:
            module.__dict__.update(saved)


class BatchedPairs(_Batched):
    """``experts(hidden [T, D], which [T, k], weights [T, k]) -> [T, D]``.

    A pair that names no expert (a number beyond theirs) counts for nothing.
    """

    what = "stacked weights, called with tokens, experts and weights"

    @classmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """As ``ExpertsAdapter``."""
        size = stacked_experts(module)
        names = _pair_names(bound(module, call))
        if size is None or names is None:
            return []
        return [cls(size, attributes, names) for attributes in _attributes_of(module, size)]

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """As ``ExpertsAdapter``; the last rank's tokens all go to the experts of the first one."""
        leaves, spec = flatten(call)
        tokens, (_, k) = _TOKENS, next(x.shape for x in leaves if not _is_float(x))
        experts = max(k, _num_met(self.num_experts, rank, size))
        which = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
        given = [
            torch.randn(tokens, *leaf.shape[1:], generator=generator) if _is_float(leaf) else which.to(leaf.dtype)
            for leaf in leaves
        ]
        example: Call = unflatten(given, spec)
        return example

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Tensor:
        """As ``ExpertsAdapter``."""
        given = bound(module, (args, kwargs))
        hidden, which, weights = (given[self.names[what]] for what in ("hidden", "which", "weights"))
        shape, k = hidden.shape, which.shape[-1]
        hidden = hidden.reshape(-1, shape[-1])
        numbers = which.reshape(-1).clamp(0, self.num_experts)
        counts = torch.bincount(numbers, minlength=self.num_experts + 1)[: self.num_experts]
        pairs = all_pairs(numbers.view(-1, k), weights.reshape(-1, k), counts)
        out = exchange(take_rows(hidden, pairs), counts)
        if missing := numbers.shape[0] - out.shape[0]:  # pairs that name no expert lie behind all others
            out = torch.cat([out, out.new_zeros(missing, out.shape[-1])])
        return combine(out, pairs, hidden.shape[0]).view(*shape[:-1], out.shape[-1])

    def compute(
        self, module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """As ``ExpertsAdapter``."""
        numbers = torch.arange(first, first + len(counts), device=rows.device)
        repeats = torch.tensor(counts, device=rows.device)
        which = numbers.repeat_interleave(repeats, output_size=rows.shape[0])[:, None]
        arguments = {"hidden": rows, "which": which, "weights": rows.new_ones(rows.shape[0], 1)}
        with self._as_many(module):
            return self._called(module, forward, arguments)


class BatchedRows(_Batched):
    """``experts(rows [P, D], counts [E]) -> [P, D']``, rows sorted by expert; counts a tensor or a list."""

    what = "stacked weights, called with rows by expert and their numbers"

    @classmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """As ``ExpertsAdapter``."""
        size = stacked_experts(module)
        found = rows_and_counts(bound(module, call), size)
        if size is None or found is None:
            return []
        names = dict(zip(("rows", "counts"), found, strict=True))
        return [cls(size, attributes, names) for attributes in _attributes_of(module, size)]

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """As ``ExpertsAdapter``; some experts get no row, and on the last rank most."""
        return small_rows(call, self.num_experts, rank, size, generator)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Tensor:
        """As ``ExpertsAdapter``."""
        given = bound(module, (args, kwargs))
        rows, counts = given[self.names["rows"]], given[self.names["counts"]]
        self._as_list = not isinstance(counts, Tensor)
        return exchange(rows, torch.as_tensor(counts, device=rows.device))

    def compute(
        self, module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """As ``ExpertsAdapter``."""
        here = next(module.parameters()).shape[0]
        numbers = [0] * first + list(counts) + [0] * (here - first - len(counts))
        given = numbers if self._as_list else torch.tensor(numbers, device=rows.device)
        with self._as_many(module):
            return self._called(module, forward, {"rows": rows, "counts": given})


def small_call(call: Call, num_experts: int, generator: torch.Generator) -> Call:
    """A call with few tokens and real values.

    Args:
        call: As it was recorded.
        num_experts: Whole numbers without content are drawn below it.
        generator: For random numbers.
    """
    leaves, spec = flatten(call)
    first = next((leaf for leaf in leaves if _is_float(leaf)), None)
    leading = () if first is None else first.shape[:-1]
    sizes = dict(zip(leading, (3, 5, 7, 11), strict=False)) if len(leading) > 1 else dict.fromkeys(leading, _TOKENS)

    def small(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [sizes.get(size, size) for size in leaf.shape[: len(leading)]] + list(leaf.shape[len(leading) :])
        if leaf.is_floating_point():
            return torch.randn(shape, generator=generator)
        if leaf.dtype is torch.bool:
            return torch.ones(shape, dtype=leaf.dtype)
        return torch.randint(num_experts, shape, generator=generator).to(leaf.dtype)

    example: Call = unflatten([small(leaf) for leaf in leaves], spec)
    return example


def small_rows(call: Call, num_experts: int, rank: int, size: int, generator: torch.Generator) -> Call:
    """A call with few rows, sorted by expert, of which some have none.

    Args:
        call: As it was recorded: rows, and a tensor or a list of their numbers.
        num_experts: Of the module.
        rank: Whose it is; most experts get nothing on the last one.
        size: Number of ranks.
        generator: For random numbers.
    """
    which = torch.randint(_num_met(num_experts, rank, size), (_TOKENS,), generator=generator)
    numbers = torch.bincount(which, minlength=num_experts)

    def small(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return numbers.tolist()
        if _is_float(leaf):
            return torch.randn(_TOKENS, *leaf.shape[1:], generator=generator)
        return numbers.to(leaf.dtype) if isinstance(leaf, Tensor) else leaf

    args, kwargs = call
    return tuple(map(small, args)), {name: small(value) for name, value in kwargs.items()}


def _num_met(num_experts: int, rank: int, size: int) -> int:
    """How many of the first experts the tokens of a rank may meet in a proof: on the last rank those of the first."""
    return num_experts if rank < size - 1 or rank == 0 else num_experts // size


def rows_and_counts(given: Mapping[str, Any], size: int | None) -> tuple[str, str] | None:
    """Which arguments are rows sorted by expert and their numbers; None if that is not how it is called.

    Args:
        given: Arguments by name.
        size: Number of experts.
    """
    rows = [name for name, value in given.items() if _is_float(value) and value.dim() == 2]
    counts = [name for name, value in given.items() if _is_counts(value, size)]
    return (rows[0], counts[0]) if size is not None and len(rows) == len(counts) == 1 else None


# -- recognising -------------------------------------------------------------------------------------------------------


def stacked_experts(module: nn.Module) -> int | None:
    """The number of experts whose weights a module holds stacked, if all of its parameters are such.

    Args:
        module: Of the user, whole.
    """
    own = list(module.parameters(recurse=False))
    if not own or len(own) != len(list(module.parameters())) or not any(p.dim() >= 3 for p in own):
        return None
    sizes = {p.shape[0] if p.dim() else 0 for p in own}
    return sizes.pop() if len(sizes) == 1 and min(sizes) >= 2 else None


def _attributes_of(module: nn.Module, size: int) -> list[tuple[str, ...]]:
    """Attributes that may hold the number of experts, the likeliest choice first."""
    equal = [name for name, value in vars(module).items() if type(value) is int and value == size]
    named = [name for name in equal if "expert" in name.lower()]
    alone = [(name,) for name in equal]
    return list(dict.fromkeys([tuple(named), tuple(equal), *alone, ()]))


def _as_it_is(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


# Asked in every call of a layer; what a class is called with does not change.
_signature = functools.cache(inspect.signature)


def bound(module: nn.Module, call: Call) -> dict[str, Any]:
    """The arguments of a call by name; nothing if they have none.

    Args:
        module: That is called.
        call: Positional and keyword arguments.
    """
    args, kwargs = call
    try:
        matched = _signature(type(module).forward).bind(module, *args, **kwargs)
    except (TypeError, ValueError):
        return {}
    kinds = {name: parameter.kind for name, parameter in matched.signature.parameters.items()}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = {name: value for name, value in list(matched.arguments.items())[1:] if kinds[name] not in variadic}
    others = [value for name, value in matched.arguments.items() if kinds[name] in variadic and value]
    return {} if others else given


def _pair_names(given: Mapping[str, Any]) -> dict[str, str] | None:
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    which = [name for name, value in tensors.items() if not _is_float(value) and value.dim() == 2]
    if len(which) != 1 or len(tensors) != len(given) or len(tensors) != 3:
        return None
    shape = tensors[which[0]].shape
    floats = [name for name, value in tensors.items() if _is_float(value) and value.shape[-1:] != ()]
    weights = [name for name in floats if tensors[name].shape == shape]
    hidden = [name for name in floats if name not in weights[-1:]]
    if not weights or len(hidden) != 1 or tensors[hidden[0]].shape[:-1].numel() != shape[0]:
        return None
    return {"hidden": hidden[0], "which": which[0], "weights": weights[-1]}


def _is_counts(value: Any, size: int | None) -> bool:
    if isinstance(value, Tensor):
        return not _is_float(value) and value.dim() == 1 and value.numel() == size
    return isinstance(value, list) and len(value) == size and all(isinstance(number, int) for number in value)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
