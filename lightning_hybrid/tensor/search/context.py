"""The search for context parallelism: how the sequence is sharded over context ranks, with or without tensor ranks.

Three things are found by trials, each on its own number of ranks:

    on T tensor ranks       how linears are sharded; the storage of parameters, and calls whose sequence is not sharded
    on T * C tensor ranks   how the features of a region are sharded where context ranks exchange positions for features
    on T x C ranks          which regions must exchange, the others run on local positions; and how the shard of a
                            context rank is sharded again over its tensor ranks, if that is requested

A region that exchanges runs as on T * C tensor ranks, heads included; only its linears know that weights are sharded
over T of them. So heads, sizes and captured inputs are not searched again, and the combined plan is proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.tensor.plan import RING, PositionsPlan, SequenceAxes, SequenceParallel, UnitPlan, split_placements
from lightning_hybrid.tensor.proof.proof import Proof
from lightning_hybrid.tensor.search.group_search import GroupSearch
from lightning_hybrid.tensor.search.groups import GroupPlan
from lightning_hybrid.tensor.search.requests import UnitTask
from lightning_hybrid.tensor.search.sequence import find_sequence, plan_sequence

# A group as it is stored, the features of its linears sharded over all ranks, and other parameters sharded over all.
_ExchangedGroup = tuple[GroupPlan, dict[str, Shard], dict[str, Shard]]


class ContextSearch:
    """The search for exchanges of positions for heads between the context ranks of one unit."""

    def __init__(self, task: UnitTask, search: GroupSearch, plan: UnitPlan, proof: Proof) -> None:
        """Takes the proved plan over tensor ranks, its search, and a proof on tensor ranks times context ranks."""
        self._task, self._search, self._plan, self._proof = task, search, plan, proof
        self._sequence = find_sequence(proof)

    def run(self) -> UnitPlan:
        """The plan that shards the sequence over context ranks, or that over tensor ranks with the reason why not."""
        task, search, found = self._task, self._search, self._plan
        proof = self._proof.on(task.size * task.context)
        wide = search.over_all_ranks(proof, found.placements)
        for with_heads in (True, False):  # groups that mix positions mostly have heads
            groups, why = wide.exchanged(None if task.size == 1 else search.groups, with_heads=with_heads)
            found = self._exchanging(groups, why)
            if found.by:
                break
        num_trials = found.num_trials + proof.ranks.num_trials + self._proof.ranks.num_trials
        return replace(found, num_trials=num_trials)

    def _exchanging(self, groups: list[GroupPlan], why: str) -> UnitPlan:
        """Exchanges positions where some of these groups need it, sharded over all ranks; ``why`` others are not."""
        candidates = [self._exchanged_group(each) for each in groups]
        reasons = [why, *(found for found in candidates if isinstance(found, str))]
        exchanged = [found for found in candidates if not isinstance(found, str)]
        found = _over_axes(self._task.sequence_parallel, partial(self._with_fewest_exchanges, exchanged))
        if isinstance(found, UnitPlan):
            return found
        reason = "; ".join(dict.fromkeys(text for text in (*reasons, found) if text))
        return replace(self._plan, context=self._task.context, full_sequence_reason=reason)

    def _with_fewest_exchanges(self, exchanged: list[_ExchangedGroup], by: SequenceAxes) -> UnitPlan | str:
        """Finds a proved plan with few exchanging groups by dropping them one by one, or returns what is wrong."""
        shard = partial(self._sharded, by)
        tried = [(exchanged, shard(exchanged))]
        for group in exchanged if isinstance(tried[0][1], UnitPlan) else ():
            if group[0].group.role == "attention":
                continue
            fewer = [other for other in exchanged if other is not group]
            without = shard(fewer, same_as=tried[-1][1])
            if isinstance(without, UnitPlan):
                exchanged = fewer
                tried.append((fewer, without))
        first_failure = ""
        for groups, found in reversed(tried):
            failure = found if isinstance(found, str) else self._proof.first_failure(found)
            if isinstance(found, UnitPlan) and failure is not None:
                found = shard(groups, guess=False)
                failure = found if isinstance(found, str) else self._proof.first_failure(found)
            if isinstance(found, UnitPlan) and failure is None:
                return found
            first_failure = first_failure or str(failure)
        return first_failure

    def _sharded(
        self, by: SequenceAxes, exchanged: list[_ExchangedGroup], guess: bool = True, same_as: Any = None
    ) -> UnitPlan | str:
        """Makes the plan with these groups exchanged, tried in one setting; or returns what is wrong with it."""
        plan, search, proof = self._plan, self._search, self._proof
        keys = {_key(group) for group, _, _ in exchanged}
        stored = [group for group in search.groups if _key(group) not in keys]
        stored += [group for group, _, _ in exchanged]
        features = {fqn: placement for _, found, _ in exchanged for fqn, placement in found.items()}
        others = {fqn: placement for _, _, found in exchanged for fqn, placement in found.items()}
        order = list(search.linears)
        stored.sort(key=lambda each: order.index(each.group.columns[0]) if each.group.columns[0] in order else -1)
        merged = search.plan(stored)
        if merged.placements != plan.placements:
            return "regions that exchange positions would need another sharding of the stored parameters"
        candidate = replace(
            merged,
            context=self._task.context,
            replicated_reasons=plan.replicated_reasons,
            uneven=plan.uneven,
            notes=plan.notes,
            positions=PositionsPlan(by, 0, 1, 3, features=features, parameter_shards=others),
        )
        found = plan_sequence(
            proof.unit, candidate, proof, by, sequence=self._sequence, guess=guess, prove=False, same_as=same_as
        )
        if found.full_sequence_reason:
            return found.full_sequence_reason
        return found if plan.size == 1 else replace(found, full_sequence_plan=plan)

    def _exchanged_group(self, group: GroupPlan) -> _ExchangedGroup | str:
        """Derives a group that exchanges from its sharding over all ranks; or returns why it cannot exchange."""
        size, context = self._task.size, self._task.context
        try:
            placements, _ = split_placements(group.placements, size, context)
        except ValueError as error:
            return str(error)
        features: dict[str, Shard] = {}
        linear_parameters: set[str] = set()
        for fqn, role in group.roles().items():
            if role == "attention":
                continue
            linear = self._search.linears[fqn]
            placement = group.placements[linear.parameter("weight")]
            assert isinstance(placement, Shard)
            if linear.feature_dim != -1:
                return f"the features of {fqn} are not in the last dim"
            if role == "row" and placement.is_repeated(size * context):
                return f"ranks share features of {fqn}"
            features[fqn] = Shard(-1, placement.pieces)
            linear_parameters |= {linear.parameter("weight"), linear.parameter("bias")}
        others = {
            fqn: placement
            for fqn, placement in group.placements.items()
            if isinstance(placement, Shard) and fqn not in linear_parameters
        }
        return replace(group, placements=placements), features, others


def _over_axes(sequence_parallel: SequenceParallel, shard: Callable[[SequenceAxes], UnitPlan | str]) -> UnitPlan | str:
    """The plan with positions sharded over both axes if that is requested and proved, else over context ranks alone.

    Returns what is wrong with the latter if neither is proved.
    """
    if sequence_parallel is None:
        return shard("context")
    over_both = shard("both")
    over_context = shard("context") if isinstance(over_both, str) else over_both
    if isinstance(over_context, UnitPlan) and isinstance(over_both, str):
        note = f"positions of a context rank on each of its tensor ranks ({over_both})"
        return replace(over_context, notes=(*over_context.notes, note))
    return over_context


def _key(group: GroupPlan) -> tuple[object, ...]:
    return group.group.role, group.group.columns, group.group.rows


# The search for ring attention, where context ranks cannot exchange positions for heads.
# Nothing but attention mixes positions: the linears of all groups run on local positions, as they do over tensor ranks
# alone, and the search only proves that.


_NO_ATTENTION = "scaled_dot_product_attention is not called with local positions"


def with_ring_attention(
    plan: UnitPlan, proof: Proof, prove: Callable[..., Proof | str], sequence_parallel: SequenceParallel
) -> UnitPlan:
    """Shards the sequence over context ranks with ring attention; or returns the plan with the reason why not."""
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
    before = proof.ranks.num_trials
    found = _over_axes(sequence_parallel, partial(_attending_by_ring, plan, proof, sequence))
    if isinstance(found, str):
        return plan if _NO_ATTENTION in found else _without(plan, found)
    num_trials = plan.num_trials + proof.ranks.num_trials - before
    return replace(found, calls=plan.calls | proof.calls, num_trials=num_trials)


def _attending_by_ring(
    plan: UnitPlan, proof: Proof, sequence: tuple[int, int] | None, by: SequenceAxes
) -> UnitPlan | str:
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
        return failure or _NO_ATTENTION
    return found if plan.size == 1 else replace(found, full_sequence_plan=over_tensor)


def reads_values(proof: Proof) -> str:
    """Why a unit that reads values of tensors is not sharded."""
    return f"it reads values of tensors ({proof.value_read}), of which ranks would have shards"


def _without(plan: UnitPlan, reason: str) -> UnitPlan:
    return replace(plan, full_sequence_reason=f"{plan.full_sequence_reason}; ring attention: {reason}")
