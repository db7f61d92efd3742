"""The search for the plan of one unit, over tensor ranks and context ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.tensor.plan import NO_LINEAR, ONE_TENSOR_RANK, SequenceParallel, UnitPlan
from lightning_hybrid.tensor.proof.narrow import NarrowLayer, narrow_layer
from lightning_hybrid.tensor.proof.proof import Proof, proof_of
from lightning_hybrid.tensor.search.context import ContextSearch, reads_values, with_ring_attention
from lightning_hybrid.tensor.search.group_search import GroupSearch
from lightning_hybrid.tensor.search.requests import UnitRequests, UnitTask, check_followed
from lightning_hybrid.tensor.search.sequence import NO_SEQUENCE

NOT_SEARCHED = "not searched here, but by a run at full width"  # of a wide unit without a narrow copy


def plan_unit(
    unit: nn.Module,
    example_args: tuple[Any, ...],
    example_kwargs: dict[str, Any] | None,
    size: int,
    *,
    keep_replicated: Mapping[str, str] | None = None,
    context: int = 1,
    sequence_parallel: SequenceParallel = None,
    plan_requests: UnitRequests | None = None,
    vocabulary: Mapping[str, int] | None = None,
    at_full_width: bool = True,
) -> UnitPlan:
    """Finds how a unit can be sharded over tensor ranks, and proves it.

    The unit itself, its weights and torch's generators are unchanged: all trials run on a copy with random weights. The
    same unit and arguments give the same plan.

    Args:
        unit: The smallest module that a pipeline cut never enters.
        example_args: Arguments of one call as in training, with ``requires_grad`` as there. Fake tensors will do.
        example_kwargs: Its keyword arguments.
        size: Number of tensor ranks.
        keep_replicated: Parameters that must stay replicated, each with the reason, by FQN inside the unit.
        context: Number of context ranks, over which the sequence is sharded.
        sequence_parallel: "tensor" to shard the sequence, or the shard of a context rank, over tensor ranks
            between regions (sequence parallelism).
        plan_requests: The requests of plans for its modules.
        vocabulary: Weights and biases to shard by vocabulary, by FQN inside the unit, each with its dim of rows.
        at_full_width: Whether a wide unit is searched itself where it has no narrow copy; it is left unsharded
            otherwise. That takes several copies of its weights.

    Returns:
        A proved plan; at worst one that replicates everything and has the reason.

    Raises:
        TensorPlanError: The user's plan cannot be followed, or is not proved.
    """
    began = time.perf_counter()
    if size < 1 or context < 1:
        raise ValueError(f"tensor_parallel_size={size} and context_parallel_size={context}; they must be at least 1")
    plan_requests = plan_requests or UnitRequests()
    excluded = {**(keep_replicated or {}), **plan_requests.replicated(unit)}
    task = UnitTask(unit, size, context, sequence_parallel, plan_requests, vocabulary or {}, excluded)
    call = example_args, example_kwargs or {}
    kept = {unit.get_parameter(name).shape[dim] for name, dim in task.vocabulary.items()}
    narrow = narrow_layer(unit, *call, size * context, kept)
    plan = narrow if isinstance(narrow, str) else _find_on_copy(narrow, task)
    if isinstance(plan, str) and plan and not at_full_width:
        plan = task.unsharded(f"{NOT_SEARCHED} ({plan})")
    elif isinstance(plan, str):
        notes = [f"searched at full width ({plan})"] if plan else []
        plan = _find(task, unit, *call)
        plan = replace(plan, notes=(*plan.notes, *notes))
    check_followed(plan_requests, plan)
    return replace(plan, seconds=time.perf_counter() - began)


def _find_on_copy(narrow: NarrowLayer, task: UnitTask) -> UnitPlan | str:
    """The plan of a unit, searched on its narrow copy; or why it has to be searched on the unit itself."""
    try:
        plan = _find(task, narrow.unit, narrow.args, narrow.kwargs)
    except TensorPlanError as error:  # raised again with the sizes of the unit
        return str(error)
    reasons = {*plan.replicated_reasons.values(), *filter(None, [plan.full_sequence_reason])}
    # There is nothing to shard; other reasons may have the sizes of the unit.
    if not plan.is_sharded and not reasons <= {NO_LINEAR, ONE_TENSOR_RANK, NO_SEQUENCE, *task.excluded.values()}:
        return f"nothing is sharded at 1/{narrow.factor} of it"
    return narrow.plan_of_full(plan)


def _find(task: UnitTask, tried_unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitPlan:
    """Searches the plan of a unit by trials of `tried_unit`, which is the unit or its narrow copy."""
    with torch.random.fork_rng(devices=[]):
        prove = partial(proof_of, tried_unit, args, kwargs, task.size, task.vocabulary, context=task.context)
        proof = prove(least=task.size * task.context if task.sequence_parallel == "tensor" else 1)
        if isinstance(proof, str):
            return task.unsharded(proof)
        plan = _search(task, proof)
        if task.context > 1 and plan.positions is None and not plan.vocabulary:
            plan = with_ring_attention(plan, proof, prove, task.sequence_parallel)
    return plan


def _search(task: UnitTask, proof: Proof) -> UnitPlan:
    """Searches over tensor ranks, then over context ranks; the result is proved."""
    search = GroupSearch(task, proof if task.context == 1 else proof.on(task.size))
    plan = search.run()
    if search.proof_failed:  # outputs were right in trials where gradients are not
        search = search.with_gradients()
        plan = search.run()
    if task.context > 1:
        why = "vocabulary-parallel lookups and products need all positions"
        without = replace(plan, context=task.context, full_sequence_reason=why)
        plan = without if plan.vocabulary else ContextSearch(task, search, plan, proof).run()
    if plan.is_sharded and not plan.vocabulary and proof.value_read:
        plan = _unsharded_since_it_reads_values(task, plan, proof)
    return replace(plan, calls=proof.calls)


def _unsharded_since_it_reads_values(task: UnitTask, plan: UnitPlan, proof: Proof) -> UnitPlan:
    """The plan that shards neither parameters nor the sequence; on one tensor rank the sequence alone is sharded."""
    reason = reads_values(proof)
    if plan.size > 1:
        return task.unsharded(reason)
    unsharded = task.unsharded(ONE_TENSOR_RANK)
    return replace(unsharded, context=plan.context, full_sequence_reason=reason, num_trials=plan.num_trials)
