"""Proof of equivalence: a module with sharded experts computes the same function as the full module.

A copy of the module with random float64 weights is called with random inputs of the recorded shapes; so are copies with
the shards of each rank, one rank after the other, each with its own tokens. Outputs, gradients of every argument and
parameter, and what a call leaves in arguments and buffers must be the same. Where experts are sharded over tensor
ranks, the results of these are summed. A wide module is proved on a narrow copy that runs the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.copies import random_copy
from lightning_hybrid.experts.parallel.adapters import Call, ExpertsAdapter, is_float
from lightning_hybrid.experts.parallel.narrow import NarrowCopies
from lightning_hybrid.experts.parallel.ranks import ExpertRanks, comparable, examples, prepared
from lightning_hybrid.experts.parallel.width import UNSHARDED, WidthSharding
from lightning_hybrid.params import store
from lightning_hybrid.step.objects.pytree import flatten

# By dtype: tolerance of outputs and gradients, relative to the largest element. float32 is used where kernels do not
# support float64.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_MOST_RANKS = 6  # whose tokens are tried, beside the last one's: each may go to all experts
_MOST_IN_FLOAT64 = 10**8  # parameters; larger modules are proved in float32


class ExpertsProof:
    """Proves shardings of one module with experts.

    Attributes:
        copies: Its narrow copies, if it is wide.
    """

    def __init__(self, module: nn.Module, adapter: ExpertsAdapter, call: Call, size: int, tensor_size: int = 1) -> None:
        """Makes a narrow copy if the module is wide; with ``size`` 1 (expert-parallel ranks) its own code runs."""
        self._module, self._adapter, self._call, self._size = module, adapter, call, size
        self.copies = NarrowCopies(module, adapter, call, (size, tensor_size), tuple(_TOLERANCES))

    def why_not_equivalent(self, width: WidthSharding = UNSHARDED) -> str:
        """Compares the module with sharded experts to the full module; returns how they differ, "" if they do not."""
        while (narrow := self.copies.current) is not None:
            try:
                of_copy = narrow.width_of_copy(width)
            except ValueError as error:
                self.copies.refuse(str(error))
                continue
            difference, was_run = self._difference(narrow.module, narrow.call, of_copy, tuple(_TOLERANCES))
            if difference and (was_run or not narrow.runs_sharded(width)):
                return difference
            other_program = difference or narrow.why_another_program(width, of_copy)
            if not other_program:
                return ""
            self.copies.refuse(other_program)
        is_large = sum(parameter.numel() for parameter in self._module.parameters()) > _MOST_IN_FLOAT64
        return self._difference(self._module, self._call, width, tuple(_TOLERANCES)[is_large:])[0]

    def _difference(
        self, module: nn.Module, call: Call, width: WidthSharding, dtypes: tuple[torch.dtype, ...]
    ) -> tuple[str, bool]:
        """Returns the difference, and whether both were run; otherwise the error instead."""
        reason = "it was not tried"
        for dtype in dtypes:
            try:
                comparison = _Comparison(module, self._adapter, self._size, dtype, width)
                return comparison.difference(call, _TOLERANCES[dtype]), True
            except Exception as error:
                lines = str(error).splitlines() or [""]
                reason = f"{type(error).__name__}: {lines[0][:200]}"
        return reason, False


class _Comparison:
    """Runs of a full copy of a module with random weights, and of its ranks."""

    def __init__(
        self, module: nn.Module, adapter: ExpertsAdapter, size: int, dtype: torch.dtype, width: WidthSharding
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.full = random_copy(module, self.generator, dtype)
        self.adapter, self.size, self.dtype = adapter, size, dtype
        self.ranks = ExpertRanks(self.full, adapter, size, width)
        self.modules = [module for modules in self.ranks.modules for module in modules]
        self.buffers = [buffer.clone() for buffer in self.full.buffers()]

    def difference(self, call: Call, tolerance: float) -> str:
        worst, where = max([(0.0, ""), *self._differences(call)], key=lambda found: found[0])
        if worst <= tolerance:
            return ""
        return f"{where} differs by {worst:.1e} of the largest, allowed are {tolerance:.0e}"

    def _differences(self, call: Call) -> Iterator[tuple[float, str]]:
        for rank, example in examples(self.adapter, call, self.size, _MOST_RANKS, self.generator):
            wanted = self._run(self.full.forward, example, [self.full])
            local = [modules[rank % self.size] for modules in self.ranks.modules]
            found = self._run(partial(self.ranks.call, rank % self.size), example, local)
            for where, tensors in wanted.items():
                others = found[where]
                # A rank's copies have the same buffers, each of them.
                for number, other in enumerate(others):
                    yield _difference(tensors[number % len(tensors)], other), where
                if len(others) % max(len(tensors), 1) or len(others) < len(tensors):
                    yield float("inf"), where
        for name, parameter in self.full.named_parameters():
            for place, gradients in self._gradients(name).items():
                expected = None if parameter.grad is None else self.ranks.local_shard(name, parameter.grad, *place)
                found_sum = torch.stack(gradients).sum(0) if gradients else None
                yield _difference(expected, found_sum), f"the gradient of {name}"

    def _gradients(self, name: str) -> dict[tuple[int, int], list[Tensor]]:
        """Returns the gradients of a parameter on all ranks, by the coordinates of their shard."""
        found: dict[tuple[int, int], list[Tensor]] = {}
        for tensor_rank, modules in enumerate(self.ranks.modules):
            for rank, local in enumerate(modules):
                gradient = local.get_parameter(name).grad
                is_sharded = name in self.ranks.width.placements, name in self.ranks.placements
                same_shard = found.setdefault((tensor_rank * is_sharded[0], rank * is_sharded[1]), [])
                same_shard += [] if gradient is None else [gradient]
        return found

    def _run(self, forward: Callable[..., Any], call: Call, modules: list[nn.Module]) -> dict[str, list[Tensor | None]]:
        """Returns outputs, gradients of the arguments, and what the call leaves in arguments and buffers of modules.

        Gradients of parameters accumulate.
        """
        for module in (self.full, *self.modules):
            for buffer, value in zip(module.buffers(), self.buffers, strict=True):
                store.move(buffer, value.clone())
        inputs, given, (args, kwargs) = prepared(call, lambda leaf: leaf.detach().to(self.dtype).requires_grad_())
        with comparable(self.adapter, self.dtype):
            out = [leaf for leaf in flatten(forward(*args, **kwargs))[0] if is_float(leaf)]
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator) for leaf in out]
        total = sum((leaf * weight).sum() for leaf, weight in zip(out, weights, strict=True))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        return {
            "the output": [leaf.detach() for leaf in out],
            "an argument's gradient": [leaf.grad for leaf in inputs if is_float(leaf)],
            "an argument after the call": [leaf.detach() for leaf in given if isinstance(leaf, Tensor)],
            "a buffer after the call": [buffer.clone() for module in modules for buffer in module.buffers()],
        }


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    """Returns the largest difference relative to the largest element; a missing gradient equals zeros."""
    if one is None or other is None:
        present = other if one is None else one
        return 0.0 if present is None or not present.numel() else float(present.abs().max() > 0)
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point() or not one.numel():
        return 0.0 if torch.equal(one, other) else float("inf")
    difference = float((one - other).abs().max() / one.abs().max().clamp(min=1e-300))
    return float("inf") if difference != difference else difference
