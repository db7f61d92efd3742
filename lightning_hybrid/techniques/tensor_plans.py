"""Checks, warnings and descriptions of the tensor plans of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.errors import LayoutError, TensorPlanError
from lightning_hybrid.tensor.plan import NOT_A_MULTIPLE, UnitPlan, nearest_divisors
from lightning_hybrid.tensor.search.sequence import NO_SEQUENCE, NOTHING_SHARDED


def check_sequence_sharding(plans: Mapping[str, UnitPlan], size: int, context: int) -> None:
    """Refuse plans if none shards a sequence, with the reasons; a LayoutError."""
    if any(plan.positions is not None for plan in plans.values()):
        return
    reasons = "; ".join(
        f"{fqn}: {plan.full_sequence_reason}" for fqn, plan in plans.items() if plan.full_sequence_reason
    )
    beside, divisor = "", ""
    if size > 1:
        beside = f" beside tensor_parallel_size={size}"
        divisor = f", or sizes whose product, now {size}*{context} = {size * context}, divides the numbers of heads"
    raise LayoutError(
        f"context_parallel_size={context}{beside} shards the positions of no layer over its ranks, so {context} ranks"
        f" would compute the same ({reasons or 'no layer takes a sequence'}); set context_parallel_size=1{divisor}",
        entry="no-context-shards",
    )


def warn_of_full_sequences(plans: Mapping[str, UnitPlan], size: int) -> None:
    """Warn of layers whose positions are not sharded over the ``size`` tensor ranks, with the reasons."""
    by_reason: dict[str, list[str]] = {}
    for fqn, plan in plans.items():
        if plan.positions is None and plan.full_sequence_reason not in ("", NO_SEQUENCE, NOTHING_SHARDED):
            by_reason.setdefault(plan.full_sequence_reason, []).append(fqn)
    if by_reason:
        listed = "; ".join(f"{_first_and(names)}: {reason}" for reason, names in by_reason.items())
        rank_zero_warn(
            f"sequence_parallel=True is inactive in some layers, where each of the {size} tensor ranks keeps the"
            f" activations of all positions ({listed}); set a tensor_parallel_size that divides the numbers of heads"
        )


def check_is_sharded(plans: Mapping[str, UnitPlan], size: int) -> None:
    """Check that some unit is sharded over ``size`` tensor ranks.

    Raises:
        LayoutError: None is; the message has the sizes that prevent it, and the modules that have them.
    """
    if any(plan.num_sharded > len(plan.vocabulary) for plan in plans.values()):
        return
    if any(plan.vocabulary for plan in plans.values()) and not any(plan.uneven for plan in plans.values()):
        return  # there is nothing but embeddings and heads that could be cut
    uneven, sizes = _uneven(plans, size)
    others: dict[str, list[str]] = {}
    for fqn, plan in plans.items():
        for name, reason in plan.replicated_reasons.items():
            if reason not in ("no weight of a linear", "added to the sum over ranks") and NOT_A_MULTIPLE not in reason:
                others.setdefault(reason, []).append(f"{fqn}.{name}")
    listed = uneven + [f"{_first_and(names)}: {reason}" for reason, names in others.items()]
    advice = f"{sizes}, which divides the numbers of heads and the widths of the layers, or to 1" if sizes else "1"
    raise LayoutError(
        f"tensor_parallel_size={size} shards no layer of the module, so {size} ranks would compute the same; set it to"
        f" {advice} ({'; '.join(listed) or 'it has no layers that multiply by a weight'})",
        entry="no-tensor-shards",
    )


def check_is_even(plans: Mapping[str, UnitPlan], size: int) -> None:
    """Check that the ranks divide the heads and features of every layer.

    Raises:
        TensorPlanError: They do not; the message has the sizes that prevent it, and the modules that have them.
    """
    warned = {fqn: plan for fqn, plan in plans.items() if any(line.startswith("warning") for line in plan.lines())}
    uneven, sizes = _uneven(warned, size)
    if uneven:
        advice = f"tensor_parallel_size={sizes} on as many devices, or " if sizes else ""
        raise TensorPlanError(
            f"strict_layout=True, and {size} tensor ranks do not divide every layer: {'; '.join(uneven)}; set"
            f" {advice}strict_layout=False",
            entry="uneven-layers",
        )


def _uneven(plans: Mapping[str, UnitPlan], size: int) -> tuple[list[str], str]:
    """The numbers of heads and features that ranks do not divide, with modules; and the nearest sizes that do."""
    found: dict[tuple[int, str], list[str]] = {}
    for fqn, plan in plans.items():
        for name, count in plan.uneven.items():
            found.setdefault(count, []).append(f"{fqn}.{name}" if name else fqn)
    listed = [f"{count} {what} of {_first_and(n)} are {NOT_A_MULTIPLE} {size}" for (count, what), n in found.items()]
    return listed, nearest_divisors(math.gcd(*(count for count, _ in found)), size)


def _first_and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def warn_across_nodes(size: int, ranks_per_node: int, num_nodes: int) -> None:
    """Warn if neighbouring tensor ranks, which communicate several times in each layer, are on several nodes."""
    if num_nodes == 1 or ranks_per_node % size == 0:
        return
    start = next(first for first in range(0, ranks_per_node * num_nodes, size) if _spans(first, size, ranks_per_node))
    rank_zero_warn(
        f"tensor_parallel_size={size} does not divide the {ranks_per_node} ranks of a node, so tensor ranks such as"
        f" {start} to {start + size - 1} are on several of the {num_nodes} nodes, and each layer waits for the network"
        f" between them; set tensor_parallel_size to a divisor of {ranks_per_node}, or devices to a multiple of {size}"
    )


def _spans(first: int, size: int, ranks_per_node: int) -> bool:
    return first // ranks_per_node != (first + size - 1) // ranks_per_node
