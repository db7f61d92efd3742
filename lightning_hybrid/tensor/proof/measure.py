"""What one call of a unit sends between tensor ranks, and saves for its backward, measured on meta tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.logits.vocabulary import VocabularyShard
from lightning_hybrid.step.module_state.copies import copy_on_meta, on_meta
from lightning_hybrid.step.objects.modules import copied
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.kernels import GroupedProductShapes
from lightning_hybrid.step.standins.tensors import materialize
from lightning_hybrid.tensor.collectives import Collective, CountedRanks
from lightning_hybrid.tensor.plan import UnitPlan
from lightning_hybrid.tensor.proof.example import Example
from lightning_hybrid.tensor.runtime.unit import shards_of, unit_on_trial


@dataclass(frozen=True)
class UnitUse:
    """What one call of a unit takes on one rank."""

    forward: tuple[Collective, ...]  # its collectives between tensor ranks
    recomputed: tuple[Collective, ...]  # those of a recomputed forward, which ends with the last tensor that is saved
    backward: tuple[Collective, ...]  # those of its backward
    saved_bytes: int  # of tensors saved for the backward, without parameters and inputs
    has_loss: bool = False  # whether a cross entropy over a sharded vocabulary is included: the output is logits


def measure_unit(
    unit: nn.Module,
    plan: UnitPlan | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
    around: AbstractContextManager[Any],
    context_rank: int = 0,
    prepare: Callable[[nn.Module, CountedRanks], AbstractContextManager[Any]] | None = None,
) -> UnitUse:
    """Run a unit and its backward on meta tensors, as one of the tensor ranks; unsharded if there is no plan.

    Arguments have the shapes of a microbatch. Contexts are entered around the forward: ``around`` such as that of a
    precision, and what ``prepare`` returns, which shards what the plan does not in the copy on meta tensors.

    Raises:
        Exception: The unit does not run on meta tensors, for example because it reads values.
    """
    twin = copy_on_meta(unit).train(unit.training)
    ranks = CountedRanks(rank, 1 if plan is None else plan.size)
    running: AbstractContextManager[Any] = contextlib.nullcontext()
    prepared = running if prepare is None else prepare(twin, ranks)
    if plan is not None:
        local = shards_of(twin, plan, rank)
        context = CountedRanks(context_rank, plan.context, "context", ranks.done)
        running = unit_on_trial(twin, plan, ranks, context, local).running()
    else:
        local = dict(twin.named_parameters())
    call_args, call_kwargs, inputs = _example_on_meta(args, kwargs).call()
    saved = _SavedBytes([*local.values(), *inputs.values(), *twin.parameters()], ranks)
    with torch.enable_grad(), torch.device("meta"), GroupedProductShapes(), saved.counting():
        with prepared, running, around:
            outputs = [leaf for leaf in flatten(twin(*call_args, **call_kwargs))[0] if isinstance(leaf, Tensor)]
        recomputed = tuple(ranks.done[: saved.num_collectives])
        has_loss = any(isinstance(output, VocabularyShard) for output in outputs)
        ends = [_end_of(output) for output in outputs]
        forward = tuple(ranks.done)
        _run_backward(ends, [*inputs.values(), *(p for p in local.values() if p.requires_grad)])
    return UnitUse(forward, recomputed, tuple(ranks.done[len(forward) :]), saved.nbytes, has_loss)


def _example_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
    """The arguments of one call with their own shapes, on the meta device."""
    leaves, spec = flatten((args, kwargs))
    moved = (
        on_meta(leaf) if isinstance(leaf, Tensor) else copied(leaf, lambda tensor: on_meta(tensor).detach())
        for leaf in leaves
    )
    return Example(tuple(moved), spec)


def _end_of(output: Tensor) -> Tensor:
    """The value to differentiate: of logits over a sharded vocabulary, their cross entropy."""
    if not isinstance(output, VocabularyShard):
        return output
    if output.cut_dim != output.dim() - 1 or not output.is_floating_point():
        result = materialize(output)
        assert isinstance(result, Tensor)
        return result
    targets = torch.zeros(output.shape[:-1], dtype=torch.int64, device="meta").reshape(-1)
    return torch.nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), targets)


def _run_backward(ends: list[Tensor], wanted: list[Tensor]) -> None:
    trained = [end for end in ends if end.requires_grad]
    if trained and wanted:
        grads = [torch.empty_like(end) for end in trained]
        torch.autograd.grad(trained, wanted, grads, allow_unused=True)


class _SavedBytes:
    """Counts the bytes of tensors that autograd saves, each storage once.

    Attributes:
        nbytes: So far.
        num_collectives: Those of the rank before the latest tensor was saved.
    """

    def __init__(self, ignored: list[Tensor], ranks: CountedRanks) -> None:
        self.nbytes = self.num_collectives = 0
        self._ranks = ranks
        self._seen = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._kept: list[Tensor] = []  # an address may be used again otherwise

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        self.num_collectives = len(self._ranks.done)
        local = tensor.local if isinstance(tensor, VocabularyShard) else tensor
        key = local.untyped_storage()._cdata
        if key not in self._seen:
            self._seen.add(key)
            self._kept.append(local)
            self.nbytes += local.untyped_storage().nbytes()
        return tensor
