"""One reason for each family of layouts that the chosen plan does not belong to, with both numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from lightning_hybrid.predict.candidates import Candidates
from lightning_hybrid.predict.layout import RECOMPUTED, PlanLayout, spelled
from lightning_hybrid.predict.plans import TIE, Plan, PredictedTime, Rejection, simplest_of_tied
from lightning_hybrid.text import sized, timed


class Family(NamedTuple):
    """Layouts with one property."""

    name: str  # for reports
    has: Callable[[PlanLayout], bool]  # whether a layout is one of them
    # why the model or the cluster has none of them; empty if it may
    impossible: Callable[[Candidates], str] = lambda candidates: ""
    field: str = ""  # the field of a layout that decides, which may be fixed


def _ruled_out(candidates: Candidates, field: str, reason: str = "") -> str:
    if field in candidates.fixed:
        return f"{field}_parallel_size={candidates.fixed[field]} is set"
    return "" if getattr(candidates.allowed, field) else reason or "not permitted for this model"


def _no_tensor(candidates: Candidates) -> str:
    if reason := _ruled_out(candidates, "tensor"):
        return reason
    costs = candidates.costs
    if not candidates.is_sharded_by_tensor_ranks:
        return f"tensor ranks would share {candidates.divided_share(1):.0%} of the FLOPs of its layers' parameters"
    if costs.heads:
        return f"no number of ranks divides both {costs.heads} heads and {candidates.ranks} devices"
    return f"no number of ranks divides the layers' sizes and {candidates.ranks} devices"


def _no_crossing(candidates: Candidates) -> str:
    node, costs = candidates.hardware.devices_per_node, candidates.costs
    if candidates.ranks <= node:
        return f"all {candidates.ranks} devices are on one node"
    if "tensor" in candidates.fixed or not candidates.allowed.tensor or not costs.heads:
        return _no_tensor(candidates)
    heads = f"{costs.heads} heads, {costs.key_value_heads or costs.heads} of keys and values"
    return f"no number of ranks above {node} divides {heads}, and {candidates.ranks} devices"


def _no_pipeline(candidates: Candidates) -> str:
    few = f"{candidates.most_stages} layers and {candidates.ranks} devices have no common number of stages"
    return _ruled_out(candidates, "pipeline", candidates.costs.why_no_stages) or few


def _no_context(candidates: Candidates) -> str:
    if reason := _ruled_out(candidates, "context"):
        return reason
    positions, least = candidates.costs.positions, candidates.allowed.positions_per_context_rank
    if positions == 1:
        return "samples are no sequences"
    if positions < 2 * least:
        return f"samples of {positions} positions; each context rank should have {least} or more"
    return f"no number of ranks divides {positions} positions and {candidates.ranks} devices"


def _no_spatial(candidates: Candidates) -> str:
    """Nothing of a model without feature maps."""
    costs, fixed = candidates.costs, candidates.fixed
    if not costs.most_rows or not candidates.allowed.spatial:
        return ""
    if "spatial" in fixed or "context" in fixed:
        return "spatial_parallel_size=1 is set" if "spatial" in fixed else _ruled_out(candidates, "context")
    if candidates.shares_maps(2):
        return f"no number of ranks divides {candidates.ranks} devices"
    return f"two ranks would share {2 * (1 - costs.map_share(2)):.0%} of the activations, as rows of feature maps"


def _no_routed(candidates: Candidates) -> str:
    return _ruled_out(candidates, "expert") or candidates.why_no_routed_ranks


def _with(field: str, value: Any, layout: PlanLayout) -> bool:
    return bool(layout.fields[field] == value)


def _replicas_alone(stage: int, layout: PlanLayout) -> bool:
    return layout.has_replicas_alone and _with("zero_stage", stage, layout)


def _families(node: int) -> list[Family]:
    kinds: dict[str, tuple[str, Any]] = {f"zero {stage}": ("zero_stage", stage) for stage in range(4)}
    for kind, word in zip(RECOMPUTED, ("no", "selective", "full"), strict=True):
        kinds[f"{word} recomputation"] = "recompute", kind
    return [
        *(Family(f"replicas alone, zero {stage}", partial(_replicas_alone, stage)) for stage in (0, 3)),
        Family("tensor ranks within a node", lambda plan: 1 < plan.tensor <= node, _no_tensor),
        Family("tensor ranks across nodes", lambda plan: plan.tensor > node, _no_crossing),
        Family("no tensor ranks", lambda plan: plan.tensor == 1, _no_tensor),
        Family("pipeline ranks", lambda plan: plan.pipeline > 1, _no_pipeline),
        Family("no pipeline ranks", lambda plan: plan.pipeline == 1, _no_pipeline),
        Family("context ranks", lambda plan: plan.context > 1 and not plan.spatial, _no_context),
        Family("spatial ranks", partial(_with, "spatial", True), _no_spatial),
        Family("expert ranks", lambda plan: plan.routed_ranks > 1, _no_routed),
        *(Family(name, partial(_with, *kind), field=kind[0]) for name, kind in kinds.items()),
        Family("offload to the host", lambda plan: bool(plan.elsewhere)),
        Family("stages of different width", lambda plan: bool(plan.widths)),
        Family("several stages per rank", lambda plan: plan.stages_per_rank > 1),
        Family("zero bubble", partial(_with, "schedule", "zero_bubble")),
    ]


def rejected_families(
    best: Plan, candidates: Candidates, plan: Callable[[PlanLayout], Plan], evaluated: Iterable[Plan]
) -> Iterator[Rejection]:
    """Yield the reason against each family without the chosen plan."""
    for layout in [*candidates.neighbours(best.layout), *candidates.of_replicas(best.layout)]:
        plan(layout)
    known = list(evaluated)
    for family in _families(candidates.hardware.devices_per_node):
        if family.has(best.layout):
            continue
        members = [member for member in known if family.has(member.layout)]
        fitting = [member for member in members if member.fits]
        if fitting:
            member = simplest_of_tied(
                fitting, lambda member: (member.seconds_per_sample,), chosen=best.seconds_per_sample
            )
            yield Rejection(family.name, slower_than(member, best), member.layout)
        elif members:
            member = min(members, key=lambda member: (member.memory.missing, member.memory.least))
            yield Rejection(family.name, larger_than_device(member), member.layout)
        elif family.field in candidates.fixed:
            yield Rejection(family.name, f"{family.field}={candidates.fixed[family.field]} is set")
        elif reason := family.impossible(candidates):
            yield Rejection(family.name, reason)


def slower_than(plan: Plan, best: Plan) -> str:
    """Return the term of the step time that makes a plan slower, of how much in all, against the chosen plan."""
    assert plan.time is not None and best.time is not None
    own, other = plan.time, best.time
    against = f"{spelled(plan.layout)}: "
    scale = other.samples / own.samples  # both times are those of the chosen plan's samples
    if (1 + TIE) * plan.seconds_per_sample < best.seconds_per_sample:
        samples, most = (each.layout.microbatch * each.layout.data for each in (plan, best))
        faster = f"{timed(scale * own.seconds)}, the chosen plan {timed(other.seconds)}"
        if (1 + plan.time_error) * plan.seconds_per_sample >= best.seconds_per_sample:
            why = "it may not fit" if best.fits_with_error and not plan.fits_with_error else "and not simpler"
            return f"{against}{faster}: within the error bar of {plan.time_error:.0%}, {why}"
        return f"{against}{samples} samples are computed at a time, with the chosen plan {most}"
    if plan.seconds_per_sample <= (1 + TIE) * best.seconds_per_sample:
        times = f"{timed(scale * own.seconds)}, the chosen plan {timed(other.seconds)}"
        if best.fits_with_error and not plan.fits_with_error:
            memory = f"{sized(plan.memory.least)} of {sized(plan.memory.capacity)}"
            return f"{against}{times}: not slower, but {memory} is within the error of memory"
        return f"{against}{times}: a tie within 3 %, and not simpler"
    name = largest_difference(own, other)
    return (
        f"{against}{name} {timed(scale * own.terms.get(name, 0.0))} of {timed(scale * own.seconds)}; the chosen"
        f" plan has {timed(other.terms.get(name, 0.0))} of {timed(other.seconds)}"
    )


def largest_difference(own: PredictedTime, other: PredictedTime) -> str:
    """Return the name of the term by which one step is slower than the other, per sample."""
    scale = own.samples / other.samples
    names = {**own.terms, **other.terms}
    return max(names, key=lambda name: own.terms.get(name, 0.0) - scale * other.terms.get(name, 0.0))


def larger_than_device(plan: Plan) -> str:
    """Return the memory that a plan needs and has, with its largest terms."""
    need = within_error(plan) if plan.may_fit else plan.memory.need
    return f"{spelled(plan.layout)}: {need} (most: {plan.largest_terms})"


def within_error(plan: Plan) -> str:
    """Return the memory that a plan needs and has, which differ by less than the error bar."""
    sizes = f"{sized(plan.memory.least)} of {sized(plan.memory.capacity)}"
    return f"may not fit, {sizes} is within the error of memory of {plan.memory_error:.0%}"
