"""Adapter for experts in a ``ModuleList``, which the code of their block calls one by one, each with its own tokens.

That code is unchanged, and runs twice: first each expert only records the rows that it is called with; all rows are
then computed on the ranks of their experts; in the second run each expert returns the received results.

    for number, expert in enumerate(self.experts):
        rows = (which == number).nonzero()
        out[rows] += weights[rows, number] * expert(x[rows])

This is correct if the rows do not depend on results of experts, which is proved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.errors import UnsupportedExpertCalls
from lightning_hybrid.experts.parallel.batched_expert_adapters import (
    Call,
    Exchange,
    ExpertsAdapter,
    bound_arguments,
    rows_and_counts,
    small_call,
    small_rows,
)
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import TensorSnapshot
from lightning_hybrid.step.objects.pytree import map_leaves

_LISTS = (nn.ModuleList, nn.ModuleDict)


class ExpertList(ExpertsAdapter):
    """Adapter for a block whose code calls the modules of a list, each with the rows of its tokens."""

    what = "a list of modules, each called with its rows"
    may_skip = True

    def __init__(self, names: Sequence[str], *, takes_rows: bool = False) -> None:
        """Creates the adapter.

        Args:
            names: Names of the experts in the block, in order.
            takes_rows: Whether the block takes rows sorted by expert, and their counts.
        """
        super().__init__(len(names))
        self.names, self._takes_rows = list(names), takes_rows
        self._called: list[bool] = []  # in the current run; an expert that gets no row may be called or not

    @classmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """Returns an adapter for each list of equally structured children of a block."""
        adapters: list[ExpertsAdapter] = []
        for name, child in module.named_children():
            if isinstance(child, _LISTS) and _same_structure(list(child.children())):
                names = [f"{name}.{key}" for key, _ in child.named_children()]
                adapters.append(
                    cls(names, takes_rows=rows_and_counts(bound_arguments(module, call), len(names)) is not None)
                )
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

        def returning(number: int) -> Callable[..., Any]:
            def expert(rows: Tensor) -> Tensor:
                """Of shape [..., D] -> [..., D']."""
                if not results[number] or results[number][0].shape[0] != rows.shape[:-1].numel():
                    raise UnsupportedExpertCalls(
                        f"the rows of {self.names[number]} depend on the results of other experts", entry="expert-calls"
                    )
                return results[number].pop(0).view(*rows.shape[:-1], out.shape[-1])

            return expert

        with self._replaced_experts(module, returning):
            return forward(*args, **kwargs)

    def _record(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> list[list[Tensor]]:
        """Runs the block's code without its experts; returns the rows of each call of each expert."""
        recorded: list[list[Tensor]] = [[] for _ in self.names]
        local_expert = self._local_experts(module)[0][1].forward

        def recording(number: int) -> Callable[..., Any]:
            def expert(*args: Any, **kwargs: Any) -> Tensor:
                """Of shape [..., D] -> zeros [..., D']."""
                if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 2:
                    raise UnsupportedExpertCalls(
                        f"{self.names[number]} is called with other arguments than one tensor of rows",
                        entry="expert-calls",
                    )
                recorded[number].append(args[0])
                empty = _empty_result(local_expert, args[0])
                return empty.new_zeros(*args[0].shape[:-1], empty.shape[-1])

            return expert

        with _restored_state(module), self._replaced_experts(module, recording):
            self.again(forward)(*map_leaves(_cloned, list(args)), **map_leaves(_cloned, dict(kwargs)))
        return recorded

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """Returns a small call of the block with real data."""
        if self._takes_rows:
            return small_rows(call, self.num_experts, rank, size, generator)
        return small_call(call, self.num_experts, generator)

    @contextlib.contextmanager
    def _replaced_experts(self, module: nn.Module, forward_of: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        numbers = {name: number for number, name in enumerate(self.names)}
        experts = {name: module.get_submodule(name) for name in self.names}
        with replaced_forwards(experts, lambda name, _: forward_of(numbers[name]), reason="calls of experts"):
            yield

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
        if outs:
            return torch.cat(outs)
        return _empty_result(experts[0][1].forward, rows)

    def _local_experts(self, module: nn.Module) -> list[tuple[int, nn.Module]]:
        experts = [(number, module.get_submodule(name)) for number, name in enumerate(self.names)]
        return [(number, expert) for number, expert in experts if all(p.numel() for p in expert.parameters())]


@torch.no_grad()
def _empty_result(expert: Callable[..., Any], rows: Tensor) -> Tensor:
    """Applies an expert to no rows: gives dtype and features of its results, outside of the autograd graph."""
    out: Tensor = expert(rows.detach().reshape(-1, rows.shape[-1])[:0])
    return out


def _same_structure(modules: Sequence[nn.Module]) -> bool:
    structures = {(type(m), tuple((n, p.shape) for n, p in m.named_parameters())) for m in modules}
    has_hooks = any(inner._forward_hooks or inner._forward_pre_hooks for m in modules for inner in m.modules())
    has_weights = any(p.dim() >= 2 for m in modules[:1] for p in m.parameters())
    return len(modules) >= 2 and len(structures) == 1 and has_weights and not has_hooks


def _cloned(leaf: Any) -> Any:
    """Returns a copy of a tensor, so that in-place writes do not reach the caller's."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


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
