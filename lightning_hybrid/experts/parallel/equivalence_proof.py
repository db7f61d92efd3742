"""Proof of equivalence: a module with sharded experts computes the same function as the full module.

A copy of the module with random float64 weights is called with random inputs of the recorded shapes; so are copies with
the shards of each rank, one rank after the other, each with its own tokens. Outputs, and gradients of every argument
and parameter, must be the same. Where experts are sharded over tensor ranks, the results of these are summed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.equivalence.copy_layers_with_random_weights import random_copy
from lightning_hybrid.equivalence.deterministic_mode import DeterministicMode
from lightning_hybrid.experts.parallel.batched_expert_adapters import Call, ExpertsAdapter, is_float
from lightning_hybrid.experts.parallel.expert_tensor_parallel import WidthSharding
from lightning_hybrid.parts.parameter_shard_placement import shard_tensor
from lightning_hybrid.step.objects.pytree import flatten, unflatten

# By dtype: tolerance of outputs and gradients, relative to the largest element. float32 is used where kernels do not
# support float64 (grouped_mm on CPUs).
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_MOST_IN_FLOAT64 = 10**8  # parameters; larger modules are proved in float32


def why_not_equivalent(
    module: nn.Module, adapter: ExpertsAdapter, call: Call, size: int, width: WidthSharding | None = None
) -> str:
    """Compares a module with sharded experts to the full module; returns how they differ, "" if they are equivalent.

    Args:
        module: The user's module, with full parameters; it is not changed.
        adapter: The adapter to prove.
        call: Recorded arguments of a call of the module.
        size: Number of expert-parallel ranks; with 1 the module's own code runs.
        width: Sharding of each expert over tensor ranks, if any.
    """
    reason = "it was not tried"
    is_large = sum(parameter.numel() for parameter in module.parameters()) > _MOST_IN_FLOAT64
    for dtype, tolerance in _TOLERANCES.items():
        if is_large and dtype is torch.float64:
            continue
        try:
            return _Proof(module, adapter, size, dtype, width).difference(call, tolerance)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[0][:200]}"
    return reason


class _Proof:
    """A full copy of a module, and one with the shards of each rank."""

    def __init__(
        self, module: nn.Module, adapter: ExpertsAdapter, size: int, dtype: torch.dtype, width: WidthSharding | None
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.full = random_copy(module, self.generator, dtype).requires_grad_()
        self.adapter, self.size, self.dtype = adapter, size, dtype
        self.width = WidthSharding(1, 0, {}) if width is None else width
        self.placements = adapter.placements(self.full, size) if size > 1 else {}
        self.ranks = [[copy.deepcopy(self.full) for _ in range(size)] for _ in range(self.width.size)]  # by tensor rank
        for tensor_rank, modules in enumerate(self.ranks):
            for rank, local in enumerate(modules):
                for name, parameter in local.named_parameters():
                    parameter.data = self._local_shard(name, parameter.data, tensor_rank, rank).contiguous()

    def _local_shard(self, name: str, tensor: Tensor, tensor_rank: int, rank: int) -> Tensor:
        if name in self.width.placements:
            tensor = shard_tensor(tensor, self.width.placements[name], tensor_rank, self.width.size)
        return shard_tensor(tensor, self.placements[name], rank, self.size) if name in self.placements else tensor

    def difference(self, call: Call, tolerance: float) -> str:
        worst, where = max([(0.0, ""), *self._differences(call)], key=lambda found: found[0])
        if worst <= tolerance:
            return ""
        return f"{where} differs by {worst:.1e} of the largest, allowed are {tolerance:.0e}"

    def _differences(self, call: Call) -> Iterator[tuple[float, str]]:
        for rank in range(max(2, self.size)):
            example = self.adapter.example(call, rank, max(2, self.size), self.generator)
            (out, gradients), (other, others) = (
                self._run(forward, example) for forward in (self.full.forward, partial(self._sharded, rank % self.size))
            )
            yield from ((_difference(*pair), "the output") for pair in zip(out, other, strict=True))
            yield from ((_difference(*pair), "an argument's gradient") for pair in zip(gradients, others, strict=True))
        for name, parameter in self.full.named_parameters():
            for gradient, coordinates in self._gradients(name):
                expected = None if parameter.grad is None else self._local_shard(name, parameter.grad, *coordinates)
                yield _difference(expected, gradient), f"the gradient of {name}"

    def _gradients(self, name: str) -> Iterator[tuple[Tensor | None, tuple[int, int]]]:
        """Yields each shard's gradient, summed over the ranks with that shard, and the shard's coordinates."""
        grads = {
            (tensor_rank, rank): local.get_parameter(name).grad
            for tensor_rank, modules in enumerate(self.ranks)
            for rank, local in enumerate(modules)
        }
        replicas: dict[tuple[int, int], list[Tensor]] = {}
        for (tensor_rank, rank), gradient in grads.items():
            coordinates = tensor_rank * (name in self.width.placements), rank * (name in self.placements)
            replicas.setdefault(coordinates, []).extend([] if gradient is None else [gradient])
        for coordinates, gradients in replicas.items():
            yield torch.stack(gradients).sum(0) if gradients else None, coordinates

    def _sharded(self, rank: int, *args: Any, **kwargs: Any) -> Any:
        outs = [self._partial_output(tensor_rank, rank, args, kwargs) for tensor_rank in range(self.width.size)]
        return outs[0] if len(outs) == 1 else torch.stack(outs).sum(0)

    def _partial_output(self, tensor_rank: int, rank: int, args: Any, kwargs: Any) -> Any:
        """Runs a call on one tensor rank of one expert-parallel rank; returns its addend of the output."""
        module = self.ranks[tensor_rank][rank]
        forward = partial(self._local_forward, tensor_rank, rank)
        if self.size == 1:
            return forward(*args, **kwargs)
        return self.adapter.run(module, forward, args, kwargs, partial(self._exchange, tensor_rank))

    def _local_forward(self, tensor_rank: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        module = self.ranks[tensor_rank][rank]
        with self.width.local_features(module, tensor_rank, list):
            return module.forward(*args, **kwargs)

    def _exchange(self, tensor_rank: int, rows: Tensor, counts: Tensor) -> Tensor:
        """Replaces the all-to-all: the module of each rank computes its rows in this process."""
        numbers = counts.view(self.size, -1).tolist()
        blocks = rows[: int(counts.sum())].split([sum(of_rank) for of_rank in numbers])
        outs = [
            self.adapter.compute(module, partial(self._local_forward, tensor_rank, rank), block, of_rank, 0)
            for rank, (module, block, of_rank) in enumerate(zip(self.ranks[tensor_rank], blocks, numbers, strict=True))
        ]
        return torch.cat(outs)

    def _run(self, forward: Callable[..., Any], call: Call) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns outputs, and gradients of the arguments; gradients of parameters accumulate."""
        leaves, spec = flatten(call)
        inputs = [leaf.detach().to(self.dtype).requires_grad_() if is_float(leaf) else leaf for leaf in leaves]
        args, kwargs = unflatten([leaf * 1 if is_float(leaf) else leaf for leaf in inputs], spec)
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
        return [leaf.detach() for leaf in out], [leaf.grad for leaf in inputs if is_float(leaf)]


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    """Returns the largest difference relative to the largest element; a missing gradient equals zeros."""
    if one is None or other is None:
        present = other if one is None else one
        return 0.0 if present is None or not present.numel() else float(present.abs().max() > 0)
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    difference = float((one - other).abs().max() / one.abs().max().clamp(min=1e-300))
    return float("inf") if difference != difference else difference
