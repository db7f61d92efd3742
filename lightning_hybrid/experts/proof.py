"""Prove on a copy that a module with experts means the same when ranks share its experts.

A copy of the module with random weights, in float64, is called with random values of the shapes that it was recorded
with; then copies that hold the parts of each rank are, one rank after the other, each with its own tokens. Outputs, and
gradients of every argument and parameter, must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.adapters import Call, ExpertsAdapter
from lightning_hybrid.parts.placement import cut
from lightning_hybrid.step.exact import Exact, random_copy
from lightning_hybrid.step.tree import flatten, unflatten

# By number format: how far outputs and gradients may differ, relative to the largest. Where kernels know no float64
# (grouped_mm on CPUs), float32 must do.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_MOST_IN_FLOAT64 = 10**8  # parameters; larger modules are proved in float32


@dataclass(frozen=True)
class Verdict:
    """Whether an adapter is right for a module; why not if it is not."""

    is_right: bool
    reason: str = ""


def prove(module: nn.Module, adapter: ExpertsAdapter, call: Call, size: int) -> Verdict:
    """Compare a module whose experts are shared out with the whole one.

    Args:
        module: Of the user, whole; left as it is.
        adapter: That may be right.
        call: Arguments of a call of it, as they were recorded.
        size: Number of ranks.
    """
    verdict = Verdict(False, "it was not tried")
    is_large = sum(parameter.numel() for parameter in module.parameters()) > _MOST_IN_FLOAT64
    for dtype, tolerance in _TOLERANCES.items():
        if is_large and dtype is torch.float64:
            continue
        try:
            return _Proof(module, adapter, size, dtype).verdict(call, tolerance)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            verdict = Verdict(False, f"{type(error).__name__}: {lines[0][:200]}")
    return verdict


class _Proof:
    """The whole copy, and those of the ranks."""

    def __init__(self, module: nn.Module, adapter: ExpertsAdapter, size: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.whole = random_copy(module, self.generator, dtype).requires_grad_()
        self.adapter, self.size, self.dtype = adapter, size, dtype
        self.placements = adapter.placements(self.whole, size)
        self.ranks = [copy.deepcopy(self.whole) for _ in range(size)]
        for rank, part in enumerate(self.ranks):
            for name, parameter in part.named_parameters():
                if name in self.placements:
                    parameter.data = cut(parameter.data, self.placements[name], rank, size).contiguous()

    def verdict(self, call: Call, tolerance: float) -> Verdict:
        worst, where = max([(0.0, ""), *self._differences(call)], key=lambda found: found[0])
        if worst > tolerance:
            return Verdict(False, f"{where} differs by {worst:.1e} of the largest, allowed are {tolerance:.0e}")
        return Verdict(True)

    def _differences(self, call: Call) -> Iterator[tuple[float, str]]:
        for rank in range(self.size):
            example = self.adapter.example(call, rank, self.size, self.generator)
            module = self.ranks[rank]
            (out, gradients), (other, others) = (
                self._run(forward, example) for forward in (self.whole.forward, partial(self._shared, module))
            )
            yield from ((_difference(*pair), "the output") for pair in zip(out, other, strict=True))
            yield from ((_difference(*pair), "an argument's gradient") for pair in zip(gradients, others, strict=True))
        for name, parameter in self.whole.named_parameters():
            parts = [part.get_parameter(name).grad for part in self.ranks]
            if name in self.placements:
                for rank, gradient in enumerate(parts):
                    own = None
                    if parameter.grad is not None:
                        own = cut(parameter.grad, self.placements[name], rank, self.size)
                    yield _difference(own, gradient), f"the gradient of {name}"
            else:
                there = [gradient for gradient in parts if gradient is not None]
                total = torch.stack(there).sum(0) if there else None
                yield _difference(parameter.grad, total), f"the gradient of {name}"

    def _shared(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.adapter.run(module, module.forward, args, kwargs, self._exchange)

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Without messages: every rank's part computes its rows here."""
        numbers = counts.view(self.size, -1).tolist()
        parts = rows[: int(counts.sum())].split([sum(of) for of in numbers])
        outs = [
            self.adapter.compute(module, module.forward, part, of, 0)
            for module, part, of in zip(self.ranks, parts, numbers, strict=True)
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
