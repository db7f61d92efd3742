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
from lightning_hybrid.equivalence.deterministic import DeterministicMode
from lightning_hybrid.experts.parallel.batched_expert_adapters import Call, ExpertsAdapter, is_float
from lightning_hybrid.experts.parallel.expert_ranks_in_one_process import ExpertRanks
from lightning_hybrid.experts.parallel.expert_tensor_parallel import WidthSharding
from lightning_hybrid.experts.parallel.narrow_experts import NarrowCopies
from lightning_hybrid.step.objects.pytree import flatten, unflatten

# By dtype: tolerance of outputs and gradients, relative to the largest element. float32 is used where kernels do not
# support float64.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_MOST_RANKS = 6  # whose tokens are tried, beside the last one's: each may go to all experts
_MOST_IN_FLOAT64 = 10**8  # parameters; larger modules are proved in float32


class ExpertsProof:
    """Proves shardings of one module with experts."""

    def __init__(self, module: nn.Module, adapter: ExpertsAdapter, call: Call, size: int, tensor_size: int = 1) -> None:
        """Makes a narrow copy if the module is wide.

        Args:
            module: The user's module, with full parameters; it is not changed.
            adapter: The adapter to prove.
            call: Recorded arguments of a call of the module.
            size: Number of expert-parallel ranks; with 1 the module's own code runs.
            tensor_size: Number of tensor ranks.
        """
        self._module, self._adapter, self._call, self._size = module, adapter, call, size
        self._copies = NarrowCopies(module, adapter, call, (size, tensor_size), tuple(_TOLERANCES))
        self._narrow = self._copies.find()

    @property
    def why_full_width(self) -> str:
        """Why a wide module is not proved on a narrow copy; "" if it is."""
        return "" if self._narrow is not None else self._copies.reason

    @property
    def narrow_copy(self) -> nn.Module | None:
        """The narrow copy, if the module is proved on one."""
        return None if self._narrow is None else self._narrow.module

    def why_not_equivalent(self, width: WidthSharding | None = None) -> str:
        """Compares the module with sharded experts to the full module; returns how they differ, "" if they do not.

        Args:
            width: Sharding of each expert over tensor ranks, if any.
        """
        while (narrow := self._narrow) is not None:
            try:
                of_copy = None if width is None else narrow.width_of_copy(width)
            except ValueError as error:
                self._narrow = self._copies.refuse(str(error))
                continue
            difference, was_run = self._difference(narrow.module, narrow.call, of_copy, tuple(_TOLERANCES))
            if was_run and difference:
                return difference
            if not was_run and not narrow.runs_sharded(width):
                return difference
            other_program = difference or narrow.why_another_program(width, of_copy)
            if not other_program:
                return ""
            self._narrow = self._copies.refuse(other_program)
        is_large = sum(parameter.numel() for parameter in self._module.parameters()) > _MOST_IN_FLOAT64
        return self._difference(self._module, self._call, width, tuple(_TOLERANCES)[is_large:])[0]

    def _difference(
        self, module: nn.Module, call: Call, width: WidthSharding | None, dtypes: tuple[torch.dtype, ...]
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


def why_not_equivalent(
    module: nn.Module, adapter: ExpertsAdapter, call: Call, size: int, width: WidthSharding | None = None
) -> str:
    """Proves one sharding: returns how it differs from the full module, "" if it does not; as `ExpertsProof`."""
    proof = ExpertsProof(module, adapter, call, size, 1 if width is None else width.size)
    return proof.why_not_equivalent(width)


class _Comparison:
    """Runs of a full copy of a module with random weights, and of its ranks."""

    def __init__(
        self, module: nn.Module, adapter: ExpertsAdapter, size: int, dtype: torch.dtype, width: WidthSharding | None
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.full = random_copy(module, self.generator, dtype).requires_grad_()
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
        size = max(2, self.size)
        for rank in (*range(min(size - 1, _MOST_RANKS)), size - 1):
            example = self.adapter.example(call, rank, size, self.generator)
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
            for gradient, coordinates in self._gradients(name):
                expected = (
                    None if parameter.grad is None else self.ranks.local_shard(name, parameter.grad, *coordinates)
                )
                yield _difference(expected, gradient), f"the gradient of {name}"

    def _gradients(self, name: str) -> Iterator[tuple[Tensor | None, tuple[int, int]]]:
        """Yields each shard's gradient, summed over the ranks with that shard, and the shard's coordinates."""
        replicas: dict[tuple[int, int], list[Tensor]] = {}
        for tensor_rank, modules in enumerate(self.ranks.modules):
            for rank, local in enumerate(modules):
                gradient = local.get_parameter(name).grad
                coordinates = (
                    tensor_rank * (name in self.ranks.width.placements),
                    rank * (name in self.ranks.placements),
                )
                replicas.setdefault(coordinates, []).extend([] if gradient is None else [gradient])
        for coordinates, gradients in replicas.items():
            yield torch.stack(gradients).sum(0) if gradients else None, coordinates

    def _run(self, forward: Callable[..., Any], call: Call, modules: list[nn.Module]) -> dict[str, list[Tensor | None]]:
        """Returns outputs, gradients of the arguments, and what the call leaves in arguments and buffers of modules.

        Gradients of parameters accumulate.
        """
        for module in (self.full, *self.modules):
            for buffer, value in zip(module.buffers(), self.buffers, strict=True):
                buffer.data = value.clone()
        leaves, spec = flatten(call)
        inputs = [leaf.detach().to(self.dtype).requires_grad_() if is_float(leaf) else leaf for leaf in leaves]
        given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inputs]
        args, kwargs = unflatten(given, spec)
        exact = DeterministicMode(self.dtype)
        before, self.adapter.again = self.adapter.again, exact.redrawn_afterwards()  # which is a decorator too
        try:
            with exact:
                out = [leaf for leaf in flatten(forward(*args, **kwargs))[0] if is_float(leaf)]
        finally:
            self.adapter.again = before
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
