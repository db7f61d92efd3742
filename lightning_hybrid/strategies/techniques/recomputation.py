"""Activation checkpointing in a strategy: which layers of the recorded step are computed again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby

from torch import nn

from lightning_hybrid.memory.recompute import (
    Policy,
    Recomputation,
    Recompute,
    RecomputeError,
    is_selective,
    layer_policies,
)
from lightning_hybrid.pipeline.stages.trace_variant import TraceVariant
from lightning_hybrid.step.objects.repeated_layers import find_layers
from lightning_hybrid.step.tracing.compiled_modules import compiled_modules
from lightning_hybrid.zero.unshard_policy import ZeroSharding


def recompute_layers(
    root: nn.Module, recompute: Recompute, variant: TraceVariant, here: Collection[int], *, compiled: bool
) -> Recomputation:
    """The layers of a recorded step that are computed again.

    Args:
        root: The user's module.
        recompute: What is asked for.
        variant: Of the first step.
        here: Stages of this rank.
        compiled: Whether layers run compiled.

    Raises:
        RecomputeError: There is no layer, or no pattern matches one.
    """
    recording, assignment = variant.recording, variant.assignment
    layers = find_layers(recording.units)
    if not layers:
        raise RecomputeError(f"recompute={recompute!r}: {type(root).__name__} has no layers; leave recompute out")
    by_user = compiled_modules(root, recording.units.values())
    policies = _policies(recompute, layers, by_user, compiled=compiled)
    stages: dict[str, set[int]] = {}
    for node, stage in zip(recording.graph.nodes, assignment.node_stage, strict=True):
        if node.unit is not None:
            stages.setdefault(node.unit, set()).add(stage)
            if recording.templates[node.index].attribute_inputs:
                # A second run would find on its modules what the next microbatch left there.
                policies |= {fqn: "keep" for fqn in layers if _is_in(fqn, node.unit)}
    mine = {
        fqn: layer
        for fqn, layer in layers.items()
        if any(_is_in(fqn, unit) and at & set(here) for unit, at in stages.items())
    }
    return Recomputation(mine, policies, keyed=True)


def recompute_plain_layers(root: nn.Module, recompute: Recompute, *, compiled: bool) -> Recomputation:
    """The layers that are computed again where steps run as they are; see ``recompute_layers``."""
    layers = find_layers(dict(root.named_children()))
    if not layers:
        raise RecomputeError(f"recompute={recompute!r}: {type(root).__name__} has no layers; leave recompute out")
    policies = _policies(recompute, layers, compiled_modules(root), compiled=compiled)
    return Recomputation(layers, policies)


def _policies(
    recompute: Recompute, layers: dict[str, nn.Module], by_user: Collection[int], *, compiled: bool
) -> dict[str, Policy]:
    """Nobody can look into what is compiled: there, whole layers are computed again."""
    policies = layer_policies(recompute, list(layers))
    for fqn, layer in layers.items():
        if is_selective(policies[fqn]) and (compiled or any(id(inner) in by_user for inner in layer.modules())):
            policies[fqn] = "full"
    return policies


def lend_parameters(recomputation: Recomputation, zero: ZeroSharding) -> None:
    """Where layers' parameters are freed until their backward gathers them, recipes hold none of them.

    Args:
        recomputation: That has not run yet.
        zero: Shares out the parameters.
    """
    policies = recomputation.policies
    zero.recomputed = frozenset(fqn for fqn, policy in policies.items() if policy == "full")
    zero.full_in_backward = frozenset(fqn for fqn in zero.freed if is_selective(policies.get(fqn)))
    recomputation.gather_on_read(zero, zero.full_in_backward)


def _is_in(fqn: str, unit: str) -> bool:
    return fqn == unit or fqn.startswith(f"{unit}.")


def describe_policies(policies: dict[str, Policy], recompute: Recompute | None) -> str:
    """One line for each way: which layers are computed again, whole or in part.

    Args:
        policies: Of the layers.
        recompute: What was asked for.
    """
    whole = _runs({fqn: policy == "full" for fqn, policy in policies.items()})
    part = _runs({fqn: is_selective(policy) for fqn, policy in policies.items()})
    lines = []
    if part:
        lines.append(f"recomputed in the backward, except for expensive operations: {part}")
    if whole or not part:
        asked = recompute.values() if isinstance(recompute, Mapping) else (recompute,)
        is_other = any(map(is_selective, asked)) and "full" not in asked and whole
        reason = " (in full: compiled)" if is_other else ""
        lines.append(f"recomputed in the backward{reason}: {whole or 'nothing'}")
    return "\n".join(lines)


def _runs(chosen: dict[str, bool]) -> str:
    """Names of those that are chosen, neighbours in one."""
    runs = []
    for is_chosen, group in groupby(chosen.items(), lambda item: item[1]):
        names = [fqn for fqn, _ in group]
        if is_chosen:
            runs.append(names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})")
    return ", ".join(runs)
