"""Recomputation: the backward repeats forwards of layers, or a part of them, in place of what these saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from lightning_hybrid.predict.techniques.technique import (
    Candidates,
    Family,
    LayerCosts,
    LayerWork,
    PlanLayout,
    PlanTechnique,
)

_KINDS = ("none", "selective", "full")
# Selective layers that drop 0.6 of the bytes of a GPT's block repeat 0.3 of the work of its products.
_REPEATED_PRODUCTS = 0.3 / 0.6


class Recompute(PlanTechnique):
    """Of nothing, of what is cheap, or of layers."""

    settings: ClassVar = {"recompute": "none"}
    limits: ClassVar = {"recompute": _KINDS}
    options: ClassVar = {"recompute": "recompute"}
    none_is_set: ClassVar = True

    def frugal(self, layout: PlanLayout, candidates: Candidates) -> Mapping[str, Any]:
        """Return the last of what is permitted."""
        return {"recompute": candidates.allowed.recompute[-1]}

    def levels(self, layout: PlanLayout, candidates: Candidates) -> Iterable[Mapping[str, Any]]:
        """Yield the kinds."""
        if "recompute" in candidates.fixed:
            return [{"recompute": candidates.fixed["recompute"]}]
        return self.changes(layout, candidates)

    def changes(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield the kinds that differ for this model."""
        repeated = [layer for layer in candidates.costs.layers if layer.repeats]
        differ = any(layer.saved_scores or layer.selective_saved != layer.saved for layer in repeated)
        for kind in candidates.allowed.recompute:
            if differ or kind != "selective":
                yield {"recompute": kind}

    def kept(self, best: PlanLayout) -> Mapping[str, Any]:
        """Return the kind."""
        return {"recompute": best.recompute}

    def keeps(self, layout: PlanLayout) -> str:
        """Return the kind."""
        return str(layout.recompute)

    def forwards(self, layout: PlanLayout) -> int:
        """Return 1 where layers run again."""
        return int(layout.recompute == "full")

    def repeated(self, layer: LayerCosts, layout: PlanLayout, work: LayerWork) -> Mapping[str, tuple[float, float]]:
        """Return the seconds that the backward takes to compute again."""
        seconds = waits = 0.0
        if layer.repeats and layout.recompute == "full":
            seconds = max(work.device - work.not_repeated, work.starts)
            waits = max(0.0, work.starts - work.device + work.not_repeated)
        elif layer.repeats and layout.recompute == "selective":
            dropped = 1.0 - layer.selective_saved / layer.saved if layer.saved else 0.0
            seconds = dropped * (work.around + _REPEATED_PRODUCTS * work.linear)
            seconds += 0.0 if layout.fused_attention else work.attention + work.scores
        return {"recomputation": (seconds, waits)}

    def arguments(self, layout: PlanLayout) -> dict[str, Any]:
        """Return the kind."""
        return {} if layout.recompute == "none" else {"recompute": layout.recompute}

    def value(self, value: Any, options: Mapping[str, Any]) -> Any:
        """Return the kind of a policy; policies by layer count as full."""
        if value is None or value == "keep":
            return "none"
        if isinstance(value, float):
            return "selective"
        return value if isinstance(value, str) and value in _KINDS else "full"

    def families(self, devices_per_node: int) -> Iterable[Family]:
        """Return each kind."""

        def has(kind: str, layout: PlanLayout) -> bool:
            return bool(layout.recompute == kind)

        for kind, name in zip(_KINDS, ("no", "selective", "full"), strict=True):
            yield Family(f"{name} recomputation", partial(has, kind), field="recompute", place=6)

    def simplicity(self, layout: PlanLayout) -> Mapping[int, float]:
        """Return the place of the kind."""
        return {3: _KINDS.index(layout.recompute)}
