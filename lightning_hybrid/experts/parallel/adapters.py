"""Adapters for the calling conventions of modules with experts, so that rows can be computed on other ranks.

An adapter implements one convention: it extracts rows sorted by expert from a call, applies the experts of one rank to
rows, and turns the results into the call's return value. Three are here, and users register further ones:

    BatchedPairs    experts(hidden [T, D], which [T, k], weights [T, k])     weights stacked [E, ...], as transformers'
    BatchedRows     experts(rows [P, D] by expert, counts [E])               weights stacked; the package's own layer
    ExpertList      block(...) that calls self.experts[i](rows) in a loop    modules of a ModuleList

The code of a block with a list is unchanged, and runs twice: first each expert only records the rows that it is called
with; all rows are then computed on the ranks of their experts; in the second run each expert returns the received
results. This is correct if the rows do not depend on results of experts, which is proved.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_hybrid.errors import UnsupportedExpertCalls
from lightning_hybrid.experts.moe.dispatch import combine, dispatch_all_pairs, gather_rows
from lightning_hybrid.experts.moe.routers import count
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.module_state.snapshots import TensorSnapshot
from lightning_hybrid.step.objects.pytree import flatten, map_leaves, unflatten

# (rows [P, D] sorted by expert, row count of each expert [E]) -> results [P, D'], computed on the experts' ranks.
Exchange = Callable[[Tensor, Tensor], Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]
_TOKENS = 13  # tokens of each rank in a proof


def is_float(value: Any) -> bool:
    """Returns whether a value is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def rows_and_counts(arguments: Mapping[str, Any], size: int) -> dict[str, str]:
    """Returns the names of the arguments with "rows" and with their "counts" for ``size`` experts, if there are two."""

    def is_counts(value: Any) -> bool:
        if isinstance(value, Tensor):
            return not is_float(value) and value.dim() == 1 and value.numel() == size
        return isinstance(value, list) and len(value) == size and all(isinstance(number, int) for number in value)

    rows = [name for name, value in arguments.items() if is_float(value) and value.dim() == 2]
    counts = [name for name, value in arguments.items() if is_counts(value)]
    return {"rows": rows[0], "counts": counts[0]} if len(rows) == len(counts) == 1 else {}


class ExpertsAdapter(ABC):
    """Base class of adapters: one module with experts and its calling convention.

    Attributes:
        num_experts: Number of experts of the module.
        what: Description of the calling convention.
        may_skip: Whether an expert that gets no row has no gradient.
    """

    what: ClassVar[str]
    may_skip: ClassVar[bool] = False

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._again: Callable[[Callable[..., Any]], Callable[..., Any]] = _identity

    def draw_again_by(self, again: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        """Wrap the module's forward so that it draws the random numbers of the next one; returns the wrapper before."""
        before, self._again = self._again, again
        return before

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
    """Experts whose weights are stacked along their first dim; ``names`` are the arguments' names, by role."""

    def __init__(self, num_experts: int, attributes: Sequence[str], names: Mapping[str, str]) -> None:
        super().__init__(num_experts)
        self.attributes, self.names = tuple(attributes), dict(names)

    @classmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """Returns an adapter for each set of attributes that may contain the number of stacked experts."""
        size = stacked_experts(module)
        names = cls._roles(bound_arguments(module, call), size) if size else {}
        if not names:
            return []
        equal = [name for name, value in vars(module).items() if type(value) is int and value == size]
        named = [name for name in equal if "expert" in name.lower()]
        single = [(name,) for name in equal]
        return [cls(size, each, names) for each in dict.fromkeys([tuple(named), tuple(equal), *single, ()])]

    @staticmethod
    def _roles(arguments: Mapping[str, Any], size: int) -> dict[str, str]:
        """Returns the names of the arguments of a call, by role; empty if it is another convention."""
        raise NotImplementedError

    def placements(self, module: nn.Module, size: int) -> dict[str, Shard]:
        """Shards the first dim of every parameter evenly, by name in the module."""
        return {name: Shard.evenly(0, self.num_experts, size) for name, _ in module.named_parameters()}

    def _call(self, module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Tensor:
        """Calls a module of as many experts as this rank has; arguments are given by role."""
        named = {self.names[role]: value for role, value in arguments.items()}
        positional = []  # where possible: the function in a decorated forward may name them otherwise
        for parameter in list(_signature(type(module).forward).parameters.values())[1:]:
            if parameter.name not in named or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                break
            positional.append(named.pop(parameter.name))
        saved = {name: module.__dict__[name] for name in self.attributes}
        module.__dict__.update(dict.fromkeys(self.attributes, next(module.parameters()).shape[0]))
        try:
            return forward(*positional, **named)
        finally:
            module.__dict__.update(saved)


class BatchedPairs(_Batched):
    """Adapter for ``experts(hidden [T, D], which [T, k], weights [T, k]) -> [T, D]``; ignores unknown experts."""

    what = "stacked weights, called with tokens, experts and weights"

    @staticmethod
    def _roles(arguments: Mapping[str, Any], size: int) -> dict[str, str]:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        which = [name for name, value in tensors.items() if not is_float(value) and value.dim() == 2]
        if len(which) != 1 or len(tensors) != len(arguments) or len(tensors) != 3:
            return {}
        shape = tensors[which[0]].shape
        floats = [name for name, value in tensors.items() if is_float(value) and value.dim()]
        weights = [name for name in floats if tensors[name].shape == shape]
        hidden = [name for name in floats if name not in weights[-1:]]
        if not weights or len(hidden) != 1 or tensors[hidden[0]].shape[:-1].numel() != shape[0]:
            return {}
        return {"hidden": hidden[0], "which": which[0], "weights": weights[-1]}

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """Returns a small call with real data; the last rank's tokens all go to the experts of the first one."""
        leaves, spec = flatten(call)
        k = next(leaf.shape[1] for leaf in leaves if not is_float(leaf))
        reachable = max(k, _num_reachable(self.num_experts, rank, size))
        which = torch.rand(_TOKENS, reachable, generator=generator).argsort(1)[:, :k]
        small = [
            torch.randn(_TOKENS, *leaf.shape[1:], generator=generator) if is_float(leaf) else which.to(leaf.dtype)
            for leaf in leaves
        ]
        return unflatten(small, spec)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Tensor:
        """Computes the pairs on their experts' ranks, and sums by token: hidden of shape [..., D] -> [..., D']."""
        arguments = bound_arguments(module, (args, kwargs))
        hidden, which, weights = (arguments[self.names[role]] for role in ("hidden", "which", "weights"))
        shape, k = hidden.shape, which.shape[-1]
        hidden = hidden.reshape(-1, shape[-1])
        numbers = which.reshape(-1).clamp(0, self.num_experts)
        counts = count(numbers.to(torch.int64), self.num_experts + 1)[: self.num_experts]
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
        return self._call(module, forward, arguments)


class BatchedRows(_Batched):
    """Adapter for ``experts(rows [P, D], counts [E]) -> [P, D']``, rows sorted by expert; counts a tensor or a list."""

    what = "stacked weights, called with rows by expert and their numbers"

    _roles = staticmethod(rows_and_counts)

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """Returns a small call with real data; some experts get no row, and on the last rank most."""
        return _small_rows(call, self.num_experts, rank, size, generator)

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
        counted: Any = numbers if self._as_list else torch.tensor(numbers)
        if not (self._as_list or getattr(module, "counts_on_host", False)):
            counted = counted.to(rows.device)
        return self._call(module, forward, {"rows": rows, "counts": counted})


class ExpertList(ExpertsAdapter):
    """Adapter for a block whose code calls the modules of a list, each with the rows of its tokens."""

    what = "a list of modules, each called with its rows"
    may_skip = True

    def __init__(self, names: Sequence[str], *, takes_rows: bool = False) -> None:
        """Take the experts' names in the block, and whether it takes rows sorted by expert, and their counts."""
        super().__init__(len(names))
        self.names, self._takes_rows = list(names), takes_rows
        self._called: list[bool] = []  # in the current run; an expert that gets no row may be called or not

    @classmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """Returns an adapter for each list of equally structured children of a block."""
        adapters: list[ExpertsAdapter] = []
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and _have_same_structure(list(child.children())):
                names = [f"{name}.{key}" for key, _ in child.named_children()]
                takes_rows = bool(rows_and_counts(bound_arguments(module, call), len(names)))
                adapters.append(cls(names, takes_rows=takes_rows))
        return adapters

    def placements(self, module: nn.Module, size: int) -> dict[str, Shard]:
        """Gives each parameter of an expert to one rank in full, by name in the block."""
        num_local = self.num_experts // size
        return {
            f"{expert}.{name}": Shard.owned(parameter.shape[0], size, number // num_local)
            for number, expert in enumerate(self.names)
            for name, parameter in module.get_submodule(expert).named_parameters()
            if parameter.dim()
        }

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """Returns a small call of the block with real data."""
        if self._takes_rows:
            return _small_rows(call, self.num_experts, rank, size, generator)
        return _small_call(call, self.num_experts, generator)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Any:
        """Runs the block's code for the rows of each expert, and again with their results from the experts' ranks."""
        recorded = self._record(module, forward, args, kwargs)
        shapes = [[rows.shape for rows in calls] for calls in recorded]
        flat = [rows.reshape(-1, rows.shape[-1]) for calls in recorded for rows in calls]
        if not flat:
            raise UnsupportedExpertCalls("the block calls none of its experts", entry="expert-calls")
        numbers = [sum(shape[:-1].numel() for shape in calls) for calls in shapes]
        self._called = [bool(calls) for calls in recorded]
        out = exchange(torch.cat(flat), torch.tensor(numbers, device=flat[0].device))
        results = [
            list(rows.split([shape[:-1].numel() for shape in sizes])) if sizes else []
            for rows, sizes in zip(out.split(numbers), shapes, strict=True)
        ]

        def received(number: int, rows: Tensor) -> Tensor:
            """Of shape [..., D] -> [..., D']."""
            if not results[number] or results[number][0].shape[0] != rows.shape[:-1].numel():
                raise UnsupportedExpertCalls(
                    f"the rows of {self.names[number]} depend on the results of other experts", entry="expert-calls"
                )
            return results[number].pop(0).view(*rows.shape[:-1], out.shape[-1])

        with self._replaced_experts(module, received):
            return forward(*args, **kwargs)

    def _record(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> list[list[Tensor]]:
        """Runs the block's code without its experts; returns the rows of each call of each expert."""
        recorded: list[list[Tensor]] = [[] for _ in self.names]
        local_expert = self._local_experts(module)[0][1].forward

        def zeros(number: int, *args: Any, **kwargs: Any) -> Tensor:
            """Of shape [..., D] -> [..., D']."""
            if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 2:
                raise UnsupportedExpertCalls(
                    f"{self.names[number]} is called with other arguments than one tensor of rows",
                    entry="expert-calls",
                )
            recorded[number].append(args[0])
            empty = _empty_result(local_expert, args[0])
            return empty.new_zeros(*args[0].shape[:-1], empty.shape[-1])

        with _restored_state(module), self._replaced_experts(module, zeros):
            # On copies: in-place writes must not reach the caller's tensors.
            copies = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            self._again(forward)(*copies[0], **copies[1])
        return recorded

    def _replaced_experts(self, module: nn.Module, result: Callable[..., Tensor]) -> AbstractContextManager[None]:
        numbers = {name: number for number, name in enumerate(self.names)}
        experts = {name: module.get_submodule(name) for name in self.names}
        return replaced_forwards(experts, lambda name, _: partial(result, numbers[name]), reason="calls of experts")

    def compute(
        self, module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """Applies each expert of this rank to its rows: shape [R, D] -> [R, D']."""
        experts = self._local_experts(module)[first:]
        outs = [
            expert.forward(inputs)
            for (number, expert), inputs in zip(experts, rows.split(list(counts)), strict=False)
            if inputs.shape[0] or self._called[number]
        ]
        return torch.cat(outs) if outs else _empty_result(experts[0][1].forward, rows)

    def _local_experts(self, module: nn.Module) -> list[tuple[int, nn.Module]]:
        experts = [(number, module.get_submodule(name)) for number, name in enumerate(self.names)]
        return [(number, expert) for number, expert in experts if all(p.numel() for p in expert.parameters())]


@torch.no_grad()
def _empty_result(expert: Callable[..., Any], rows: Tensor) -> Tensor:
    """Applies an expert to no rows: gives dtype and features of its results, outside of the autograd graph."""
    return expert(rows.detach().reshape(-1, rows.shape[-1])[:0])


@contextlib.contextmanager
def _restored_state(module: nn.Module) -> Iterator[None]:
    """Restores the block's attributes, its buffers and the generators' states on exit."""
    attributes = {inner: dict(inner.__dict__) for inner in module.modules()}
    buffers = [TensorSnapshot(buffer) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):  # other devices have keyed random numbers
            yield
    finally:
        for inner, before in attributes.items():
            inner.__dict__.clear()
            inner.__dict__.update(before)
        for content in buffers:
            content.restore()


def _small_call(call: Call, num_experts: int, generator: torch.Generator) -> Call:
    """Returns a call with few tokens and real data; integers are drawn below the number of experts."""
    leaves, spec = flatten(call)
    leading = next((leaf.shape[:-1] for leaf in leaves if is_float(leaf)), ())
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

    return unflatten([small(leaf) for leaf in leaves], spec)


def _small_rows(call: Call, num_experts: int, rank: int, size: int, generator: torch.Generator) -> Call:
    """Returns a call with few rows, sorted by expert, and their counts, a tensor or a list; some experts have none."""
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
    """Number of experts that a rank's tokens may choose in a proof: the last rank's choose the first rank's experts."""
    return num_experts if rank < size - 1 or rank == 0 else num_experts // size


def stacked_experts(module: nn.Module) -> int:
    """Returns the number of experts of a module whose (full) parameters are all stacked weights of experts, or 0."""
    direct = list(module.parameters(recurse=False))
    if not direct or len(direct) != len(list(module.parameters())) or not any(p.dim() >= 3 for p in direct):
        return 0
    sizes = {p.shape[0] if p.dim() else 0 for p in direct}
    return sizes.pop() if len(sizes) == 1 and min(sizes) >= 2 else 0


def _have_same_structure(modules: Sequence[nn.Module]) -> bool:
    structures = {(type(m), tuple((n, p.shape) for n, p in m.named_parameters())) for m in modules}
    has_hooks = any(inner._forward_hooks or inner._forward_pre_hooks for m in modules for inner in m.modules())
    has_weights = any(p.dim() >= 2 for m in modules[:1] for p in m.parameters())
    return len(modules) >= 2 and len(structures) == 1 and has_weights and not has_hooks


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


# Mutable global: adapters must be registered on every rank before a strategy is set up.
_ADAPTERS: list[type[ExpertsAdapter]] = [BatchedPairs, BatchedRows, ExpertList]


def register_experts(adapter: type[ExpertsAdapter]) -> type[ExpertsAdapter]:
    """Registers an adapter of the user's, which is tried before all others; usable as a decorator.

    Args:
        adapter: A class whose ``recognise`` returns instances for the modules that it supports.

    Raises:
        TypeError: The argument is no subclass of ``ExpertsAdapter``.
    """
    if not (isinstance(adapter, type) and issubclass(adapter, ExpertsAdapter)):
        raise TypeError(f"register_experts({adapter!r}): give a subclass of lightning_hybrid.experts.ExpertsAdapter")
    if adapter not in _ADAPTERS:
        _ADAPTERS.insert(0, adapter)
    return adapter


def candidate_adapters(module: nn.Module, call: Call) -> list[ExpertsAdapter]:
    """Returns adapters that may fit a module with full parameters, the most likely first."""
    return [candidate for adapter in _ADAPTERS for candidate in adapter.recognise(module, call)]
