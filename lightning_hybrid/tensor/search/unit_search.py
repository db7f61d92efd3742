"""The search for the plan of one unit: tensor ranks, and positions of its sequence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_hybrid.tensor.plan.unit_plan import Deal, UnitPlan
from lightning_hybrid.tensor.requests.precedence import Wishes, check_done
from lightning_hybrid.tensor.search.context_search import Regions, deal_in_context
from lightning_hybrid.tensor.search.group_search import GroupSearch
from lightning_hybrid.tensor.trial.equivalence_proof import Proof, proof_of


def plan_unit(
    unit: nn.Module,
    example_args: tuple[Any, ...],
    example_kwargs: dict[str, Any] | None,
    size: int,
    *,
    whole: Mapping[str, str] | None = None,
    context: int = 1,
    deal: Deal = None,
    wishes: Wishes | None = None,
    vocabulary: Mapping[str, int] | None = None,
    seed: int = 0,
) -> UnitPlan:
    """Find how a unit can be sharded over tensor ranks, and prove it.

    The unit itself, its weights and torch's generators are left alone: everything is tried on a copy with random
    weights. The same unit, arguments and seed give the same plan.

    Args:
        unit: The smallest module that a cut never enters.
        example_args: Arguments of one call, as in training: what needs a gradient there, needs one here. Tensors
            without content will do.
        example_kwargs: Its keyword arguments.
        size: Number of tensor ranks.
        whole: Parameters that must stay whole, each with the reason, by FQN inside the unit.
        context: Number of context ranks, to which positions of the sequence are dealt.
        deal: Deal positions to tensor ranks, between what they share ("tensor": sequence parallelism); those that a
            context rank has, if there are several.
        wishes: What plans ask for its modules.
        vocabulary: Weights and biases that are to be cut by their vocabulary, by FQN inside the unit, each with the
            dim along which it lies.
        seed: Of the random weights.

    Returns:
        A proved plan; at worst one that keeps everything whole and says why.

    Raises:
        TensorPlanError: The user's plan cannot be followed, or is not proved.
    """
    began = time.perf_counter()
    if size < 1 or context < 1:
        raise ValueError(f"tensor_parallel_size={size} and context_parallel_size={context}; they must be at least 1")
    wishes = wishes or Wishes()
    with torch.random.fork_rng(devices=[]):
        least = size * context if deal == "tensor" else 1
        given = unit, example_args, example_kwargs or {}, size, seed, vocabulary
        proof = proof_of(*given, context=context, least=least)
        if isinstance(proof, str):
            plan = UnitPlan.whole(unit, size, proof)
        else:
            kept = {**(whole or {}), **wishes.whole(unit)}
            on_tensor, dealt = (proof, deal) if context == 1 else (proof.on(size), None)
            search = GroupSearch(unit, on_tensor, kept, wishes, dealt, vocabulary or {})
            plan = search.run()
            if search.spoiled:  # outputs were right in trials where gradients are not
                search = search.carefully()
                plan = search.run()
            if context > 1:
                plan = _with_context(plan, search, proof, deal)
            if plan.num_sharded and not plan.vocabulary and (line := proof.value_read):
                plan = UnitPlan.whole(
                    unit, size, f"it reads values of tensors ({line}), of which ranks would have parts"
                )
            plan = replace(plan, calls=proof.calls)
    check_done(wishes, plan)
    return replace(plan, seconds=time.perf_counter() - began)


def _with_context(plan: UnitPlan, search: GroupSearch, proof: Proof, deal: Deal) -> UnitPlan:
    """The plan of a search over tensor ranks with positions dealt to context ranks as well."""
    size, context = proof.ranks.size, proof.ranks.context
    if plan.vocabulary:
        return replace(plan, context=context, undealt="ranks that look up or multiply by their rows need all positions")
    wide = search.over_more(proof.on(size * context), plan.placements, size, context)
    given = plan
    for with_heads in (True, False):  # mostly what mixes positions has heads
        exchanged, why = wide.exchanged(None if size == 1 else search.parts, with_heads=with_heads)
        regions = Regions(wide.linears, search.parts, exchanged, search.reasons, why)
        plan = deal_in_context(proof.unit, given, regions, proof, deal)
        if plan.positions is not None:
            break
    return replace(plan, num_trials=plan.num_trials + wide.num_trials + proof.ranks.num_trials)
