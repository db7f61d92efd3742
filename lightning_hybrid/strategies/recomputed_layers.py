"""Activation checkpointing in a strategy: which layers of the recorded step are computed again, and by whose word."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

from torch import nn

from lightning_hybrid.memory.recompute import Policy, Recomputation, Recompute, RecomputeError, layer_policies
from lightning_hybrid.pipeline.executor import Variant
from lightning_hybrid.step.layers import find_layers


def recompute_layers(
    root: nn.Module, recompute: Recompute, variant: Variant, here: Collection[int]
) -> tuple[Recomputation, dict[str, Policy]]:
    """The layers of a recorded step that are computed again.

    Args:
        root: The user's module.
        recompute: What is asked for.
        variant: Of the first step.
        here: Stages of this rank.

    Raises:
        RecomputeError: There is no layer, or no pattern matches one.
    """
    recording, assignment = variant.recording, variant.assignment
    layers = find_layers(recording.units)
    if not layers:
        raise RecomputeError(f"recompute={recompute!r}: {type(root).__name__} has no layers; leave recompute out")
    policies = layer_policies(recompute, list(layers))
    stages: dict[str, set[int]] = {}
    for node, stage in zip(recording.graph.nodes, assignment.node_stage, strict=True):
        if node.unit is not None:
            stages.setdefault(node.unit, set()).add(stage)
            if recording.templates[node.index].held:
                # A second run would find on its modules what the next microbatch left there.
                policies |= {fqn: "keep" for fqn in layers if _is_in(fqn, node.unit)}
    mine = {
        fqn: layer
        for fqn, layer in layers.items()
        if any(_is_in(fqn, unit) and at & set(here) for unit, at in stages.items())
    }
    return Recomputation(mine, policies, keyed=True), policies


def recompute_plain_layers(root: nn.Module, recompute: Recompute) -> tuple[Recomputation, dict[str, Policy]]:
    """The layers that are computed again where steps run as they are; see ``recompute_layers``."""
    layers = find_layers(dict(root.named_children()))
    if not layers:
        raise RecomputeError(f"recompute={recompute!r}: {type(root).__name__} has no layers; leave recompute out")
    policies = layer_policies(recompute, list(layers))
    return Recomputation(layers, policies), policies


def _is_in(fqn: str, unit: str) -> bool:
    return fqn == unit or fqn.startswith(f"{unit}.")


def describe_policies(policies: dict[str, Policy]) -> str:
    """One line: which layers are computed again."""
    runs = []
    for is_kept, group in groupby(policies.items(), lambda item: item[1] == "keep"):
        names = [fqn for fqn, _ in group]
        if not is_kept:
            runs.append(names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})")
    return f"computed again in the backward: {', '.join(runs) or 'nothing'}"
