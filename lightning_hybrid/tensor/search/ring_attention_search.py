"""The search for ring attention, where context ranks cannot exchange positions for heads.

Nothing but attention mixes positions: the linears of all groups run on local positions, as they do over tensor ranks
alone, and the search only proves that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_hybrid.tensor.plan.unit_plan import RING, PositionsPlan, SequenceAxes, SequenceParallel, UnitPlan
from lightning_hybrid.tensor.search.search_sharding_of_unit_sequence import find_sequence, plan_sequence
from lightning_hybrid.tensor.trial.sharded_unit_proof import Proof


def with_ring_attention(
    plan: UnitPlan, proof: Proof, prove: Callable[..., Proof | str], sequence_parallel: SequenceParallel
) -> UnitPlan:
    """Shards the sequence over context ranks with ring attention; or returns the plan with the reason why not.

    Args:
        plan: The proved plan over tensor ranks, with the reason why no heads are exchanged over context ranks.
        proof: Of the unit, on tensor ranks times context ranks.
        prove: Makes a proof whose example has at least ``least`` positions, or returns why that is not possible.
        sequence_parallel: Whether the shard of a context rank is sharded again over its tensor ranks.
    """
    sequence = find_sequence(proof)
    if sequence is None or plan.context == 1:
        return plan
    index, dim = sequence
    least = plan.context * max(2, plan.size if sequence_parallel == "tensor" else 1)
    if proof.example.leaves[index].shape[dim] < least:
        longer = prove(least=least)
        if isinstance(longer, str):
            return _without(plan, longer)
        proof = longer
        sequence = find_sequence(proof)
    if proof.value_read:
        reason = reads_values(proof)
        return plan if plan.full_sequence_reason == reason else _without(plan, reason)
    failures, before = list[str](), proof.ranks.num_trials
    axes: tuple[SequenceAxes, ...] = ("both", "context") if sequence_parallel == "tensor" else ("context",)
    for by in axes:
        found = _proved(plan, proof, by, sequence)
        if isinstance(found, UnitPlan):
            notes = [f"positions of a context rank on each of its tensor ranks ({failures[0]})"] if failures else []
            return replace(
                found,
                notes=(*found.notes, *notes),
                calls=plan.calls | proof.calls,
                num_trials=plan.num_trials + proof.ranks.num_trials - before,
            )
        failures.append(found)
    return _without(plan, failures[-1])


def _proved(plan: UnitPlan, proof: Proof, by: SequenceAxes, sequence: tuple[int, int] | None) -> UnitPlan | str:
    """The proved plan with ring attention, positions sharded over these axes; or what is wrong with it."""
    over_tensor = replace(plan, full_sequence_reason="")
    positions = PositionsPlan(by=by, leaf_index=0, dim=1, num_dims=3, ring_attention=True)
    candidate, failure = replace(over_tensor, positions=positions), ""
    for guess in (True, False):
        found = plan_sequence(proof.unit, candidate, proof, by, sequence=sequence, guess=guess, prove=False)
        failure = found.full_sequence_reason or proof.first_failure(found) or ""
        if not failure:
            break
    if not failure and proof.value_read:  # in eval mode, say
        failure = reads_values(proof)
    if failure or not any(site[0] == RING for site in found.rules):
        return failure or "scaled_dot_product_attention is not called with local positions"
    return found if plan.size == 1 else replace(found, full_sequence_plan=over_tensor)


def reads_values(proof: Proof) -> str:
    """Why a unit that reads values of tensors is not sharded."""
    return f"it reads values of tensors ({proof.value_read}), of which ranks would have shards"


def _without(plan: UnitPlan, reason: str) -> UnitPlan:
    return replace(plan, full_sequence_reason=f"{plan.full_sequence_reason}; ring attention: {reason}")
