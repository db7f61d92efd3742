"""Summary of the sharding of experts, for the table at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hybrid.experts.parallel.find_and_prove_shardable_experts import FoundExperts
from lightning_hybrid.text import spanned


def describe_experts(found: FoundExperts, size: int, tensor_size: int) -> str:
    """Describes which experts are sharded and which are not, one line per kind of module."""
    by_kind: dict[tuple[str, int], list[str]] = {}
    for fqn, adapter in found.adapters.items():
        by_kind.setdefault((adapter.what, adapter.num_experts), []).append(fqn)
    lines = [
        f"{spanned(fqns)}: {number} experts, {number // size} on each of {size} ranks ({what})"
        for (what, number), fqns in by_kind.items()
    ]
    lines += [f"{fqns}: experts are replicated on every rank, {reason}" for fqns, reason in by_reason(found.replicated)]
    widths = {
        fqn: f"{width.length // width.size} of the {width.length} features of each expert"
        for fqn, width in found.widths.items()
    }
    lines += [f"{fqns}: {share} on each of {tensor_size} tensor ranks" for fqns, share in by_reason(widths)]
    lines += [
        f"{fqns}: no expert is sharded over tensor ranks, {reason}"
        for fqns, reason in by_reason(found.unsharded_widths)
    ]
    return "\n".join(lines)


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Groups modules by reason, given by FQN; returns the listed FQNs and the reason of each group."""
    groups: dict[str, list[str]] = {}
    for fqn, reason in reasons.items():
        groups.setdefault(reason, []).append(fqn)
    return [(spanned(fqns), reason) for reason, fqns in groups.items()]
