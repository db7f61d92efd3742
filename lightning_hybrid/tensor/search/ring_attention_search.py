"""The search for ring attention, where context ranks cannot exchange positions for heads.

Nothing but attention mixes positions: the linears of all groups run on local positions, as they do over tensor ranks
alone, and the search only proves that.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_hybrid.tensor.plan.unit_plan import RING, PositionsPlan, SequenceAxes, SequenceParallel, UnitPlan
from lightning_hybrid.tensor.search.sequence_parallel_search import find_sequence, plan_sequence
from lightning_hybrid.tensor.trial.sharded_unit_proof import Proof


def shard_for_ring_attention(
    unit: nn.Module, plan: UnitPlan, over_tensor: UnitPlan, proof: Proof, sequence_parallel: SequenceParallel
) -> UnitPlan:
    """Shards the sequence over context ranks with ring attention; or returns the plan with the reason why not.

    Args:
        unit: A copy of the unit with random weights.
        plan: A plan without a sharded sequence, with the reason why heads are not exchanged.
        over_tensor: The proved plan over tensor ranks; with one tensor rank, a plan that replicates everything.
        proof: Of the unit, on tensor ranks times context ranks.
        sequence_parallel: Whether the shard of a context rank is sharded again over its tensor ranks.
    """
    sequence, failures = find_sequence(proof), []
    axes: tuple[SequenceAxes, ...] = ("both", "context") if sequence_parallel == "tensor" else ("context",)
    for by in axes:
        positions = PositionsPlan(by=by, leaf_index=0, dim=1, num_dims=3, ring_attention=True)
        candidate = replace(over_tensor, context=proof.ranks.context, positions=positions)
        found: UnitPlan | None = None
        for guess in (True, False):
            sharded = plan_sequence(unit, candidate, proof, by, sequence=sequence, guess=guess, prove=False)
            failure = sharded.full_sequence_reason or proof.first_failure(sharded)
            if failure is None:
                found = sharded
                break
        if found is None:
            failures.append(str(failure))
        elif not any(site[0] == RING for site in found.rules):
            failures.append("scaled_dot_product_attention is not called with local positions")
        else:
            full = over_tensor if over_tensor.size > 1 else None
            notes = [f"positions of a context rank on each of its tensor ranks ({failures[0]})"] if failures else []
            return replace(found, full_sequence_plan=full, notes=(*found.notes, *notes))
    return replace(plan, full_sequence_reason=f"{plan.full_sequence_reason}; ring attention: {failures[-1]}")
