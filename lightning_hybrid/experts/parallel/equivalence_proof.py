"""Prove on a copy that a module with experts means the same when ranks share its experts.

A copy of the module with random weights, in float64, is called with random values of the shapes that it was recorded
with; then copies that hold the parts of each rank are, one rank after the other, each with its own tokens. Outputs, and
gradients of every argument and parameter, must be the same. Where experts are cut over tensor ranks, the results of
these are added up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.deterministic_mode import Exact, random_copy
from lightning_hybrid.experts.parallel.expert_adapters import Call, ExpertsAdapter
from lightning_hybrid.experts.parallel.expert_tensor_parallel import Width
from lightning_hybrid.parts.placement import cut
from lightning_hybrid.step.objects.pytree import flatten, unflatten

# By number format: how far outputs and gradients may differ, relative to the largest. Where kernels know no float64
# (grouped_mm on CPUs), float32 must do.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_MOST_IN_FLOAT64 = 10**8  # parameters; larger modules are proved in float32


@dataclass(frozen=True)
class Verdict:
    """Whether an adapter is right for a module; why not if it is not."""

    is_right: bool
    reason: str = ""


def prove(module: nn.Module, adapter: ExpertsAdapter, call: Call, size: int, width: Width | None = None) -> Verdict:
    """Compare a module whose experts are shared out with the whole one.

    Args:
        module: Of the user, whole; left as it is.
        adapter: That may be right.
        call: Arguments of a call of it, as they were recorded.
        size: Number of ranks that share experts; of one its own code runs.
        width: How each expert is cut over tensor ranks, if it is.
    """
    verdict = Verdict(False, "it was not tried")
    is_large = sum(parameter.numel() for parameter in module.parameters()) > _MOST_IN_FLOAT64
    for dtype, tolerance in _TOLERANCES.items():
        if is_large and dtype is torch.float64:
            continue
        try:
            return _Proof(module, adapter, size, dtype, width).verdict(call, tolerance)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            verdict = Verdict(False, f"{type(error).__name__}: {lines[0][:200]}")
    return verdict


class _Proof:
    """The whole copy, and those of the ranks."""

    def __init__(
        self, module: nn.Module, adapter: ExpertsAdapter, size: int, dtype: torch.dtype, width: Width | None
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.whole = random_copy(module, self.generator, dtype).requires_grad_()
        self.adapter, self.size, self.dtype = adapter, size, dtype
        self.width = Width(1, 0, {}) if width is None else width
        self.placements = adapter.placements(self.whole, size) if size > 1 else {}
        self.ranks = [
            [copy.deepcopy(self.whole) for _ in range(size)] for _ in range(self.width.size)
        ]  # by tensor rank
        for tensor_rank, parts in enumerate(self.ranks):
            for rank, part in enumerate(parts):
                for name, parameter in part.named_parameters():
                    parameter.data = self._part_of(name, parameter.data, tensor_rank, rank).contiguous()

    def _part_of(self, name: str, whole: Tensor, tensor_rank: int, rank: int) -> Tensor:
        if name in self.width.placements:
            whole = cut(whole, self.width.placements[name], tensor_rank, self.width.size)
        return cut(whole, self.placements[name], rank, self.size) if name in self.placements else whole

    def verdict(self, call: Call, tolerance: float) -> Verdict:
        worst, where = max([(0.0, ""), *self._differences(call)], key=lambda found: found[0])
        if worst > tolerance:
            return Verdict(False, f"{where} differs by {worst:.1e} of the largest, allowed are {tolerance:.0e}")
        return Verdict(True)

    def _differences(self, call: Call) -> Iterator[tuple[float, str]]:
        for rank in range(max(2, self.size)):
            example = self.adapter.example(call, rank, max(2, self.size), self.generator)
            (out, gradients), (other, others) = (
                self._run(forward, example) for forward in (self.whole.forward, partial(self._shared, rank % self.size))
            )
            yield from ((_difference(*pair), "the output") for pair in zip(out, other, strict=True))
            yield from ((_difference(*pair), "an argument's gradient") for pair in zip(gradients, others, strict=True))
        for name, parameter in self.whole.named_parameters():
            for found, places in self._gradients(name):
                own = None if parameter.grad is None else self._part_of(name, parameter.grad, *places)
                yield _difference(own, found), f"the gradient of {name}"

    def _gradients(self, name: str) -> Iterator[tuple[Tensor | None, tuple[int, int]]]:
        """What the ranks have of a parameter's gradient, summed over those that hold the same, and where these are."""
        grads = {
            (tensor_rank, rank): part.get_parameter(name).grad
            for tensor_rank, parts in enumerate(self.ranks)
            for rank, part in enumerate(parts)
        }
        alike: dict[tuple[int, int], list[Tensor]] = {}
        for (tensor_rank, rank), gradient in grads.items():
            places = tensor_rank * (name in self.width.placements), rank * (name in self.placements)
            alike.setdefault(places, []).extend([] if gradient is None else [gradient])
        for places, there in alike.items():
            yield torch.stack(there).sum(0) if there else None, places

    def _shared(self, rank: int, *args: Any, **kwargs: Any) -> Any:
        outs = [self._addend(tensor_rank, rank, args, kwargs) for tensor_rank in range(self.width.size)]
        return outs[0] if len(outs) == 1 else torch.stack(outs).sum(0)

    def _addend(self, tensor_rank: int, rank: int, args: Any, kwargs: Any) -> Any:
        """What one tensor rank makes of a call on one of the ranks that share experts."""
        module = self.ranks[tensor_rank][rank]
        forward = partial(self._held, tensor_rank, rank)
        if self.size == 1:
            return forward(*args, **kwargs)
        return self.adapter.run(module, forward, args, kwargs, partial(self._exchange, tensor_rank))

    def _held(self, tensor_rank: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        module = self.ranks[tensor_rank][rank]
        with self.width.held(module, tensor_rank, list):
            return module.forward(*args, **kwargs)

    def _exchange(self, tensor_rank: int, rows: Tensor, counts: Tensor) -> Tensor:
        """Without messages: every rank's part computes its rows here."""
        numbers = counts.view(self.size, -1).tolist()
        parts = rows[: int(counts.sum())].split([sum(of) for of in numbers])
        outs = [
            self.adapter.compute(module, partial(self._held, tensor_rank, rank), part, of, 0)
            for rank, (module, part, of) in enumerate(zip(self.ranks[tensor_rank], parts, numbers, strict=True))
        ]
        return torch.cat(outs)

    def _run(self, forward: Callable[..., Any], call: Call) -> tuple[list[Tensor], list[Tensor | None]]:
        """Outputs, and gradients of the arguments; those of parameters are added up."""
        leaves, spec = flatten(call)
        given = [leaf.detach().to(self.dtype).requires_grad_() if _is_float(leaf) else leaf for leaf in leaves]
        args, kwargs = unflatten([leaf * 1 if _is_float(leaf) else leaf for leaf in given], spec)
        exact = Exact(self.dtype)
        before, self.adapter.again = self.adapter.again, partial(_drawn_again, exact)
        try:
            with exact:
                out = [leaf for leaf in flatten(forward(*args, **kwargs))[0] if _is_float(leaf)]
        finally:
            self.adapter.again = before
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator) for leaf in out]
        total = sum((leaf * weight).sum() for leaf, weight in zip(out, weights, strict=True))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        return [leaf.detach() for leaf in out], [leaf.grad for leaf in given if _is_float(leaf)]


def _drawn_again(exact: Exact, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with exact.drawn_again():
            return forward(*args, **kwargs)

    return run


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference, relative to the largest number; no gradient is one of zeros."""
    if one is None or other is None:
        rest = other if one is None else one
        return 0.0 if rest is None or not rest.numel() else float(rest.abs().max() > 0)
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    difference = float((one - other).abs().max() / one.abs().max().clamp(min=1e-300))
    return float("inf") if difference != difference else difference


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
