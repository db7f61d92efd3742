"""Experts in a ``ModuleList``, which the code of their block calls one after the other, each with its own tokens.

That code stays as it is, and runs twice: first each expert only notes the rows that it is called with; these are
computed where their experts are, all at once; then the code runs again, and each expert answers with what came back.

    for number, expert in enumerate(self.experts):
        rows = (which == number).nonzero()
        out[rows] += weights[rows, number] * expert(x[rows])

It is right where the rows do not depend on what experts answer, which is proved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.parallel.expert_adapters import (
    Call,
    Exchange,
    ExpertsAdapter,
    bound,
    rows_and_counts,
    small_call,
    small_rows,
)
from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.randomness.keyed_draws import replaced_forwards
from lightning_hybrid.step.module_state.snapshot import Content
from lightning_hybrid.step.objects.pytree import map_leaves

_LISTS = (nn.ModuleList, nn.ModuleDict)


class NotLikeExperts(RuntimeError):
    """A block does not call its modules as experts are called."""


class ExpertList(ExpertsAdapter):
    """A block whose own code calls the modules of a list, each with the rows of its tokens.

    Attributes:
        names: Of the experts in the block, in order.
    """

    what = "a list of modules, each called with its rows"
    may_skip = True

    def __init__(self, names: Sequence[str], *, takes_rows: bool = False) -> None:
        """Make the adapter.

        Args:
            names: Of the experts in the block, in order.
            takes_rows: Whether the block is given rows sorted by expert, and their numbers.
        """
        super().__init__(len(names))
        self.names, self._takes_rows = list(names), takes_rows
        self._called: list[bool] = []  # in the run that goes on; an expert that gets no row may be called or not

    @classmethod
    def recognise(cls, module: nn.Module, call: Call) -> list[ExpertsAdapter]:
        """As ``ExpertsAdapter``."""
        found: list[ExpertsAdapter] = []
        for name, child in module.named_children():
            if isinstance(child, _LISTS) and _are_alike(list(child.children())):
                names = [f"{name}.{key}" for key, _ in child.named_children()]
                found.append(cls(names, takes_rows=rows_and_counts(bound(module, call), len(names)) is not None))
        return found

    def placements(self, module: nn.Module, size: int) -> dict[str, Shard]:
        """As ``ExpertsAdapter``."""
        each = self.num_experts // size
        return {
            f"{expert}.{name}": Shard.owned(parameter.shape[0], size, number // each)
            for number, expert in enumerate(self.names)
            for name, parameter in module.get_submodule(expert).named_parameters()
            if parameter.dim()
        }

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, exchange: Exchange) -> Any:
        """As ``ExpertsAdapter``."""
        noted: list[list[Tensor]] = [[] for _ in self.names]
        one = self._here(module)[0][1].forward

        def note(number: int) -> Callable[..., Any]:
            def expert(*given: Any, **named: Any) -> Tensor:
                if len(given) != 1 or named or not isinstance(given[0], Tensor) or given[0].dim() < 2:
                    raise NotLikeExperts(f"{self.names[number]} is called with something else than one tensor of rows")
                noted[number].append(given[0])
                form = _form(one, given[0])
                return form.new_zeros(*given[0].shape[:-1], form.shape[-1])

            return expert

        with _as_before(module), self._calling(module, note):
            self.again(forward)(*map_leaves(_own, list(args)), **map_leaves(_own, dict(kwargs)))
        shapes = [[rows.shape for rows in of] for of in noted]
        flat = [rows.reshape(-1, rows.shape[-1]) for of in noted for rows in of]
        if not flat:
            raise NotLikeExperts("the block calls none of its experts")
        numbers = [sum(shape[:-1].numel() for shape in of) for of in shapes]
        self._called = [bool(of) for of in noted]
        out = exchange(torch.cat(flat), torch.tensor(numbers, device=flat[0].device))
        answers = [
            list(of.split([shape[:-1].numel() for shape in sizes])) if sizes else []
            for of, sizes in zip(out.split(numbers), shapes, strict=True)
        ]

        def answer(number: int) -> Callable[..., Any]:
            def expert(rows: Tensor) -> Tensor:
                if not answers[number] or answers[number][0].shape[0] != rows.shape[:-1].numel():
                    raise NotLikeExperts(f"the rows of {self.names[number]} depend on what other experts answer")
                return answers[number].pop(0).view(*rows.shape[:-1], out.shape[-1])

            return expert

        with self._calling(module, answer):
            return forward(*args, **kwargs)

    def example(self, call: Call, rank: int, size: int, generator: torch.Generator) -> Call:
        """As ``ExpertsAdapter``."""
        if self._takes_rows:
            return small_rows(call, self.num_experts, rank, size, generator)
        return small_call(call, self.num_experts, generator)

    @contextlib.contextmanager
    def _calling(self, module: nn.Module, instead: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        numbers = {name: number for number, name in enumerate(self.names)}
        experts = {name: module.get_submodule(name) for name in self.names}
        with replaced_forwards(experts, lambda name, _: instead(numbers[name])):
            yield

    def compute(
        self, module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """As ``ExpertsAdapter``."""
        here = self._here(module)[first:]
        outs = [
            expert.forward(part)
            for (number, expert), part in zip(here, rows.split(list(counts)), strict=False)
            if part.shape[0] or self._called[number]
        ]
        if outs:
            return torch.cat(outs)
        return _form(here[0][1].forward, rows)

    def _here(self, module: nn.Module) -> list[tuple[int, nn.Module]]:
        """The experts of this rank, with their numbers."""
        experts = [(number, module.get_submodule(name)) for number, name in enumerate(self.names)]
        return [(number, expert) for number, expert in experts if all(p.numel() for p in expert.parameters())]


@torch.no_grad()
def _form(expert: Callable[..., Any], rows: Tensor) -> Tensor:
    """What an expert makes of no rows: the form of its answers, without taking part."""
    out: Tensor = expert(rows.detach().reshape(-1, rows.shape[-1])[:0])
    return out


def _are_alike(modules: Sequence[nn.Module]) -> bool:
    forms = {(type(m), tuple((n, p.shape) for n, p in m.named_parameters())) for m in modules}
    has_hooks = any(inner._forward_hooks or inner._forward_pre_hooks for m in modules for inner in m.modules())
    return (
        len(modules) >= 2 and len(forms) == 1 and any(p.dim() >= 2 for p in modules[0].parameters()) and not has_hooks
    )


def _own(leaf: Any) -> Any:
    """What may be written without the caller seeing it."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@contextlib.contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """What the block notes on itself inside is forgotten: attributes, buffers, and the generators' states."""
    attributes = {inner: dict(inner.__dict__) for inner in module.modules()}
    buffers = [Content(buffer) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):  # others are keyed
            yield
    finally:
        for inner, before in attributes.items():
            inner.__dict__.clear()
            inner.__dict__.update(before)
        for content in buffers:
            content.restore()
