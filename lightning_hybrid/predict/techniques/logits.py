"""The loss over a vocabulary, in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_hybrid.predict.techniques.technique import PlanLayout, PlanTechnique


class ChunkedLoss(PlanTechnique):
    """Whether the loss over the vocabulary is computed in chunks."""

    settings: ClassVar = {"chunked_loss": False}
    options: ClassVar = {"chunked_loss": "chunked_loss"}

    def arguments(self, layout: PlanLayout) -> dict[str, Any]:
        """Return that it is."""
        return {"chunked_loss": True} if layout.chunked_loss else {}

    def value(self, value: Any, options: Mapping[str, Any]) -> bool:
        """Return whether there are chunks of any size."""
        return bool(value)
