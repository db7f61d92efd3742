"""Combinations of ways to train, drawn by a seed, and what can be combined with what."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

# Sizes: pipeline, data, tensor, expert; options of the strategy.
LAYOUTS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "dp2": ((1, 2, 1, 1), {}),
    "zero1": ((1, 2, 1, 1), {"zero_stage": 1}),
    "zero2": ((1, 2, 1, 1), {"zero_stage": 2}),
    "zero3": ((1, 2, 1, 1), {"zero_stage": 3, "reshard_after_forward": False}),
    "zero3 layerwise": ((1, 2, 1, 1), {"zero_stage": 3, "reshard_after_forward": True}),
    "ep2": ((1, 2, 1, 2), {}),
    "pp2": ((2, 1, 1, 1), {}),
    "tp2": ((1, 1, 2, 1), {}),
    "pp2 x dp2": ((2, 2, 1, 1), {}),
    "pp2 x zero3": ((2, 2, 1, 1), {"zero_stage": 3}),
    "tp2 x pp2": ((2, 1, 2, 1), {}),
    "tp2 x zero3": ((1, 2, 2, 1), {"zero_stage": 3}),
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "then": tuple(LAYOUTS),
    "microbatches": (1, 2, 4),
    "optimization": ("automatic", "one manual", "two manual"),
    "optimizer": ("Adam", "SGD"),
    "recompute": (None, "full", 2),
    "offload": (None, None, "cpu"),
    "accumulation": (1, 2),
    "frozen": (None, "norms", "embedding", "block"),
    "clipping": (None, "norm", "value"),
    "averaging": (None, "shadow", "averaged copy"),
    "batch_norm": (False, False, True),
    "tied": (False, True),
    "experts": (None, None, "stacked", "listed"),
    "hook": (None, "reads norm", "writes gradient", "writes parameter", "masks gradient"),
    "validation": (None, "mean", "metrics"),
    "replicas": (None, None, "compressed", "local rounds"),
    "save": ("inside", "after"),
}

LAYOUTS["ep2 x tp2"] = (1, 2, 2, 2), {}  # not among those that are drawn


@dataclass(frozen=True)
class Combination:
    """One way to train in two runs: the second one resumes the first, under another layout."""

    layout: str
    then: str
    microbatches: int
    optimization: str
    optimizer: str
    recompute: str | int | None
    offload: str | None
    accumulation: int
    frozen: str | None
    clipping: str | None
    averaging: str | None
    batch_norm: bool
    tied: bool
    experts: str | None
    hook: str | None
    validation: str | None
    replicas: str | None
    save: str

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def techniques(self) -> list[str]:
        """What is used beyond a plain fit, a word each."""
        plain = {"microbatches": 1, "optimization": "automatic", "accumulation": 1}
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "optimizer"}
        named = {f"{key} {value}" for key, value in given.items() if value and plain.get(key) != value}
        return sorted(named)


def drawn(seed: int) -> Combination:
    """The combination of a seed, one that docs/features.md allows."""
    random_state = random.Random(seed)
    return allowed(Combination(**{name: random_state.choice(values) for name, values in CHOICES.items()}))


def allowed(each: Combination) -> Combination:
    """The same without what the documentation excludes."""
    if each.batch_norm:  # statistics are those of a microbatch
        each = replace(each, microbatches=1)
    if each.experts is None:
        each = replace(each, layout=_without_experts(each.layout), then=_without_experts(each.then))
    if each.optimization != "automatic" and each.replicas == "local rounds":
        each = replace(each, replicas=None)
    if each.replicas is not None:
        each = replace(each, layout=_of_replicas(each.layout), then=_of_replicas(each.then))
    if each.replicas == "local rounds":  # an average of steps is the step of averages if steps are linear
        hook = None if each.hook == "reads norm" else each.hook
        each = replace(each, layout="dp2", then="dp2", batch_norm=False, optimizer="SGD", clipping=None, hook=hook)
    if each.replicas == "compressed" and each.optimization != "automatic":  # needs full gradients inside the step
        each = replace(each, layout="dp2", then="dp2")
    return each


def _without_experts(layout: str) -> str:
    return "dp2" if layout == "ep2" else layout


def _of_replicas(layout: str) -> str:
    return layout if LAYOUTS[layout][0][1] > 1 and layout != "ep2" else "dp2"
