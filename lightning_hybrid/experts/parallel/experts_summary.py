"""What was found of the experts of a module, as the table at the start of a run says it."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hybrid.experts.parallel.expert_detection import FoundExperts


def describe_experts(found: FoundExperts, size: int, tensor_size: int) -> str:
    """What is shared and what is not, in words.

    Args:
        found: Experts of the user's module.
        size: Number of ranks that share experts.
        tensor_size: Number of tensor ranks.
    """
    alike: dict[tuple[str, int], list[str]] = {}
    for fqn, adapter in found.adapters.items():
        alike.setdefault((adapter.what, adapter.num_experts), []).append(fqn)
    lines = [
        f"{_listed(fqns)}: {number} experts, {number // size} on each of {size} ranks ({what})"
        for (what, number), fqns in alike.items()
    ]
    lines += [f"{fqns}: experts stay whole on every rank, {reason}" for fqns, reason in by_reason(found.whole)]
    widths = {
        fqn: f"{width.length // width.size} of the {width.length} features of each expert"
        for fqn, width in found.widths.items()
    }
    lines += [f"{fqns}: {share} on each of {tensor_size} tensor ranks" for fqns, share in by_reason(widths)]
    lines += [f"{fqns}: no expert is cut over tensor ranks, {reason}" for fqns, reason in by_reason(found.uncut)]
    return "\n".join(lines)


def by_reason(whole: Mapping[str, str]) -> list[tuple[str, str]]:
    """Modules, in words, and the reason that they share.

    Args:
        whole: Why modules stay whole, by FQN.
    """
    reasons: dict[str, list[str]] = {}
    for fqn, reason in whole.items():
        reasons.setdefault(reason, []).append(fqn)
    return [(_listed(fqns), reason) for reason, fqns in reasons.items()]


def _listed(fqns: list[str]) -> str:
    return fqns[0] if len(fqns) == 1 else f"{fqns[0]} .. {fqns[-1]} ({len(fqns)})"
