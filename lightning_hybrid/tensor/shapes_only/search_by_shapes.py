"""The search for the plan of one unit by shapes alone, without a proof: for dry runs of layers too large to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_hybrid.tensor.plan.unit_plan import SequenceParallel, UnitPlan
from lightning_hybrid.tensor.requests.plan_requests_by_unit import UnitRequests, check_followed
from lightning_hybrid.tensor.search.linear_group_search import GroupSearch
from lightning_hybrid.tensor.shapes_only.proof_of_shapes import ShapeProof

NOT_PROVED = "chosen by shapes, without a proof"


def plan_by_shapes(
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
) -> UnitPlan:
    """Find how a unit can be sharded over tensor ranks so that all shapes fit; not to be trained with.

    Nothing is computed and no weights are made, so that a layer of any width takes a second. A run proves its plans by
    numbers, and may shard otherwise.

    Args:
        unit: The unit; its weights are not read.
        example_args: Arguments of one call, real or fake tensors.
        example_kwargs: Its keyword arguments.
        size: Number of tensor ranks.
        keep_replicated: Parameters that must stay replicated, each with the reason.
        context: Number of context ranks; only 1.
        sequence_parallel: Not searched: the sequence stays full between regions.
        plan_requests: The requests of plans for its modules.
        vocabulary: Weights and biases to shard by vocabulary.

    Raises:
        TensorPlanError: The user's plan cannot be followed.
        ValueError: There are context ranks.
    """
    if context > 1:
        raise ValueError("plans over context ranks are not searched by shapes")
    requests = plan_requests or UnitRequests()
    excluded = {**(keep_replicated or {}), **requests.replicated(unit)}
    with torch.random.fork_rng(devices=[]):
        proof = ShapeProof.of_unit(unit, example_args, example_kwargs or {}, size)
        plan = GroupSearch(unit, proof, excluded, requests, None, vocabulary or {}).run()
    if sequence_parallel is not None:
        plan = replace(plan, full_sequence_reason="not searched by shapes")
    check_followed(requests, plan)
    return replace(plan, notes=(*plan.notes, NOT_PROVED))
