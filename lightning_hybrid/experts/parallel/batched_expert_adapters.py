"""Adapters for the calling conventions of modules with experts, so that rows can be computed on other ranks.

An adapter implements one convention: it extracts rows sorted by expert from a call, applies the experts of one rank to
rows, and turns the results into the call's return value. Three are here, and users register further ones:

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

from lightning_hybrid.experts.moe.assign_expert_rows import dispatch_all_pairs
from lightning_hybrid.experts.moe.gather_and_combine_expert_rows import combine, gather_rows
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.step.objects.pytree import flatten, unflatten

# (rows [P, D] sorted by expert, row count of each expert [E]) -> results [P, D'], computed on the experts' ranks.
Exchange = Callable[[Tensor, Tensor], Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]
_TOKENS = 13  # tokens of each rank in a proof


class ExpertsAdapter(ABC):
    """Base class of adapters: one module with experts and its calling convention.

    Attributes:
        num_experts: Number of experts of the module.
        what: Description of the calling convention.
        may_skip: Whether an expert that gets no row has no gradient.
        again: Wraps the module's forward so that it draws the random numbers of the next forward; set for a run.
    """

    what: ClassVar[str]
    may_skip: ClassVar[bool] = False

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.again: Callable[[Callable[..., Any]], Callable[..., Any]] = _identity

    @classmethod
    @abstractmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """Returns candidate adapters, the most likely first; the right one is found by a proof.

        Args:
            module: The user's module, with full parameters.
            call: Positional and keyword arguments of a call of it; tensors have no data.
        """

    @abstractmethod
    def placements(self, module: nn.Module, size: int) -> dict[str, Shard]:
        """Returns how its parameters are sharded, by name in the module.

        Args:
            module: The module, with full parameters.
            size: Number of ranks; divides the number of experts.
        """

    @abstractmethod
    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """Returns a small call with real data for the proof; on some rank, some experts should get no tokens.

        Args:
            call: The recorded call; its tensors may have no data.
            rank: The rank of the example, from 0.
            size: Number of ranks.
            generator: Source of random numbers.
        """

    @abstractmethod
    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Any:
        """Runs a call of the module whose experts are sharded; returns its result, of the shape of the full module's.

        Args:
            module: The module, with the parameter shards of this rank.
            forward: The module's forward.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            exchange: Computes rows on the ranks of their experts; called once.
        """

    @abstractmethod
    def compute(
        self, module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """Applies experts of this rank to rows: shape [R, D] -> [R, D'].

        Args:
            module: The module, with the parameter shards of this rank.
            forward: The module's forward.
            rows: Of shape [R, D], sorted by expert.
            counts: Number of rows of each expert.
            first: Index of the first of these experts among those of this rank.
        """


class _Batched(ExpertsAdapter):
    """Base class for experts whose weights are stacked along their first dim."""

    def __init__(self, num_experts: int, attributes: Sequence[str], names: Mapping[str, str]) -> None:
        super().__init__(num_experts)
        self.attributes, self.names = tuple(attributes), dict(names)

    def placements(self, module: nn.Module, size: int) -> dict[str, Shard]:
        """Shards the first dim of every parameter evenly, by name in the module."""
        return {name: Shard.evenly(0, self.num_experts, size) for name, _ in module.named_parameters()}

    def _call_forward(self, module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Tensor:
        """Passes arguments by position where possible: the function in a decorated forward may name them otherwise."""
        named = {self.names[role]: value for role, value in arguments.items()}
        positional = []
        for parameter in list(_signature(type(module).forward).parameters.values())[1:]:
            if parameter.name not in named or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                break
            positional.append(named.pop(parameter.name))
        out: Tensor = forward(*positional, **named)
        return out

    @contextlib.contextmanager
    def _local_expert_count(self, module: nn.Module) -> Iterator[None]:
        """Sets the module's number of experts to that of its local shard inside the context."""
        num_local = next(module.parameters()).shape[0]
        saved = {name: module.__dict__[name] for name in self.attributes}
        module.__dict__.update(dict.fromkeys(self.attributes, num_local))
        try:
            yield
        finally:
            module.__dict__.update(saved)


class BatchedPairs(_Batched):
    """Adapter for ``experts(hidden [T, D], which [T, k], weights [T, k]) -> [T, D]``.

    A pair whose expert index is out of range is ignored.
    """

    what = "stacked weights, called with tokens, experts and weights"

    @classmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """Returns adapters for stacked weights and a call with tokens, expert indices and weights; else none."""
        size = stacked_experts(module)
        names = _pair_names(bound_arguments(module, call))
        if size is None or names is None:
            return []
        return [cls(size, attributes, names) for attributes in _attributes_of(module, size)]

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """Returns a small call with real data; the last rank's tokens all go to the experts of the first one."""
        leaves, spec = flatten(call)
        tokens, (_, k) = _TOKENS, next(x.shape for x in leaves if not is_float(x))
        experts = max(k, _num_reachable(self.num_experts, rank, size))
        which = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
        inputs = [
            torch.randn(tokens, *leaf.shape[1:], generator=generator) if is_float(leaf) else which.to(leaf.dtype)
            for leaf in leaves
        ]
        example: Call = unflatten(inputs, spec)
        return example

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Tensor:
        """Computes the pairs on their experts' ranks, and sums by token: hidden of shape [..., D] -> [..., D']."""
        arguments = bound_arguments(module, (args, kwargs))
        hidden, which, weights = (arguments[self.names[role]] for role in ("hidden", "which", "weights"))
        shape, k = hidden.shape, which.shape[-1]
        hidden = hidden.reshape(-1, shape[-1])
        numbers = which.reshape(-1).clamp(0, self.num_experts)
        counts = torch.bincount(numbers, minlength=self.num_experts + 1)[: self.num_experts]
        pairs = dispatch_all_pairs(numbers.view(-1, k), weights.reshape(-1, k), counts)
        out = exchange(gather_rows(hidden, pairs), counts)
        if missing := numbers.shape[0] - out.shape[0]:  # pairs without an expert come after all others
            out = torch.cat([out, out.new_zeros(missing, out.shape[-1])])
        return combine(out, pairs, hidden.shape[0]).view(*shape[:-1], out.shape[-1])

    def compute(
        self, module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """Applies experts to rows, each as a token with one expert: shape [R, D] -> [R, D']."""
        numbers = torch.arange(first, first + len(counts), device=rows.device)
        repeats = torch.tensor(counts, device=rows.device)
        which = numbers.repeat_interleave(repeats, output_size=rows.shape[0])[:, None]
        arguments = {"hidden": rows, "which": which, "weights": rows.new_ones(rows.shape[0], 1)}
        with self._local_expert_count(module):
            return self._call_forward(module, forward, arguments)


class BatchedRows(_Batched):
    """Adapter for ``experts(rows [P, D], counts [E]) -> [P, D']``, rows sorted by expert; counts a tensor or a list."""

    what = "stacked weights, called with rows by expert and their numbers"

    @classmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """Returns adapters for stacked weights and a call with rows and their counts by expert; else none."""
        size = stacked_experts(module)
        roles = rows_and_counts(bound_arguments(module, call), size)
        if size is None or roles is None:
            return []
        names = dict(zip(("rows", "counts"), roles, strict=True))
        return [cls(size, attributes, names) for attributes in _attributes_of(module, size)]

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """Returns a small call with real data; some experts get no row, and on the last rank most."""
        return small_rows(call, self.num_experts, rank, size, generator)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Tensor:
        """Sends rows, of shape [P, D], to the ranks of their experts; returns the results, of shape [P, D']."""
        arguments = bound_arguments(module, (args, kwargs))
        rows, counts = arguments[self.names["rows"]], arguments[self.names["counts"]]
        self._as_list = not isinstance(counts, Tensor)
        return exchange(rows, torch.as_tensor(counts, device=rows.device))

    def compute(
        self, module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """Applies experts to rows sorted by expert, others of this rank to none: shape [R, D] -> [R, D']."""
        num_local = next(module.parameters()).shape[0]
        numbers = [0] * first + list(counts) + [0] * (num_local - first - len(counts))
        local_counts = numbers if self._as_list else torch.tensor(numbers, device=rows.device)
        with self._local_expert_count(module):
            return self._call_forward(module, forward, {"rows": rows, "counts": local_counts})


def small_call(call: Call, num_experts: int, generator: torch.Generator) -> Call:
    """Returns a call with few tokens and real data.

    Args:
        call: The recorded call.
        num_experts: Upper bound of the integers that are drawn for integer tensors.
        generator: Source of random numbers.
    """
    leaves, spec = flatten(call)
    first = next((leaf for leaf in leaves if is_float(leaf)), None)
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
    """Returns a call with few rows, sorted by expert; some experts have none.

    Args:
        call: The recorded call: rows, and a tensor or a list of row counts.
        num_experts: Number of experts of the module.
        rank: The rank of the example; most experts get no row on the last one.
        size: Number of ranks.
        generator: Source of random numbers.
    """
    which = torch.randint(_num_reachable(num_experts, rank, size), (_TOKENS,), generator=generator)
    numbers = torch.bincount(which, minlength=num_experts)

    def small(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return numbers.tolist()
        if is_float(leaf):
            return torch.randn(_TOKENS, *leaf.shape[1:], generator=generator)
        return numbers.to(leaf.dtype) if isinstance(leaf, Tensor) else leaf

    args, kwargs = call
    return tuple(map(small, args)), {name: small(value) for name, value in kwargs.items()}


def _num_reachable(num_experts: int, rank: int, size: int) -> int:
    """Number of experts that a rank's tokens may choose in a proof: on the last rank, those of the first rank."""
    return num_experts if rank < size - 1 or rank == 0 else num_experts // size


def rows_and_counts(arguments: Mapping[str, Any], size: int | None) -> tuple[str, str] | None:
    """Returns the names of the arguments with rows and with their counts for ``size`` experts, or None."""
    rows = [name for name, value in arguments.items() if is_float(value) and value.dim() == 2]
    counts = [name for name, value in arguments.items() if _is_counts(value, size)]
    return (rows[0], counts[0]) if size is not None and len(rows) == len(counts) == 1 else None


# -- recognising -------------------------------------------------------------------------------------------------------


def stacked_experts(module: nn.Module) -> int | None:
    """Returns the number of experts of a module whose (full) parameters are all stacked weights of experts, or None."""
    direct = list(module.parameters(recurse=False))
    if not direct or len(direct) != len(list(module.parameters())) or not any(p.dim() >= 3 for p in direct):
        return None
    sizes = {p.shape[0] if p.dim() else 0 for p in direct}
    return sizes.pop() if len(sizes) == 1 and min(sizes) >= 2 else None


def _attributes_of(module: nn.Module, size: int) -> list[tuple[str, ...]]:
    """Returns sets of attributes that may contain the number of experts, the most likely first."""
    equal = [name for name, value in vars(module).items() if type(value) is int and value == size]
    named = [name for name in equal if "expert" in name.lower()]
    single = [(name,) for name in equal]
    return list(dict.fromkeys([tuple(named), tuple(equal), *single, ()]))


def _identity(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


# Used in every call of a layer; the signature of a class does not change.
_signature = functools.cache(inspect.signature)


def bound_arguments(module: nn.Module, call: Call) -> dict[str, Any]:
    """Returns the arguments of a call of a module by name; an empty dict if they cannot be named."""
    args, kwargs = call
    try:
        matched = _signature(type(module).forward).bind(module, *args, **kwargs)
    except (TypeError, ValueError):
        return {}
    kinds = {name: parameter.kind for name, parameter in matched.signature.parameters.items()}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: value for name, value in list(matched.arguments.items())[1:] if kinds[name] not in variadic}
    others = [value for name, value in matched.arguments.items() if kinds[name] in variadic and value]
    return {} if others else named


def _pair_names(arguments: Mapping[str, Any]) -> dict[str, str] | None:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    which = [name for name, value in tensors.items() if not is_float(value) and value.dim() == 2]
    if len(which) != 1 or len(tensors) != len(arguments) or len(tensors) != 3:
        return None
    shape = tensors[which[0]].shape
    floats = [name for name, value in tensors.items() if is_float(value) and value.shape[-1:] != ()]
    weights = [name for name in floats if tensors[name].shape == shape]
    hidden = [name for name in floats if name not in weights[-1:]]
    if not weights or len(hidden) != 1 or tensors[hidden[0]].shape[:-1].numel() != shape[0]:
        return None
    return {"hidden": hidden[0], "which": which[0], "weights": weights[-1]}


def _is_counts(value: Any, size: int | None) -> bool:
    if isinstance(value, Tensor):
        return not is_float(value) and value.dim() == 1 and value.numel() == size
    return isinstance(value, list) and len(value) == size and all(isinstance(number, int) for number in value)


def is_float(value: Any) -> bool:
    """Returns whether a value is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()
