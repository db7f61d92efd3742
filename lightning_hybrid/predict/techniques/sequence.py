"""Sequence parallelism: tensor ranks divide the positions between sharded regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lightning_hybrid.predict.techniques.technique import Candidates, PlanLayout, PlanTechnique


class SequenceParallel(PlanTechnique):
    """On or off; ``overlapped_tensor_ranks``: whether the collectives of tensor ranks run beside the products."""

    settings: ClassVar = {"sequence_parallel": False, "overlapped_tensor_ranks": False}
    options: ClassVar = {"sequence_parallel": "sequence_parallel"}

    def frugal(self, layout: PlanLayout, candidates: Candidates) -> Mapping[str, Any]:
        """Return that it is on."""
        return {"sequence_parallel": layout.tensor > 1}

    def changes(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield the other way."""
        if layout.tensor > 1:
            yield {"sequence_parallel": not layout.sequence_parallel}

    def arguments(self, layout: PlanLayout) -> dict[str, Any]:
        """Return that it is on."""
        return {"sequence_parallel": True} if layout.tensor > 1 and layout.sequence_parallel else {}

    def simplicity(self, layout: PlanLayout) -> Mapping[int, float]:
        """Return whether it is on."""
        return {7: layout.sequence_parallel}
