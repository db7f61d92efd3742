"""The pipeline's schedule, and the stages of each of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from lightning_hybrid.predict.techniques.technique import Candidates, Family, PlanLayout, PlanTechnique
from lightning_hybrid.schedule import SCHEDULE_NAMES


class Schedule(PlanTechnique):
    """The name of the schedule, and ``stages_per_rank`` stages on each pipeline rank."""

    settings: ClassVar = {"schedule": "1f1b", "stages_per_rank": 1}
    limits: ClassVar = {"schedules": ("1f1b", "zero_bubble"), "largest_stages_per_rank": 4}
    options: ClassVar = {"schedule": "schedule", "stages_per_rank": "stages_per_rank"}
    short: ClassVar = {"stages_per_rank": "stages", "num_microbatches": "m"}

    def changes(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield the schedules with one stage per rank, and 1F1B with several."""
        if layout.pipeline > 1:
            for schedule in candidates.allowed.schedules:
                yield {"schedule": schedule, "stages_per_rank": 1}
            for stages in range(2, candidates.allowed.largest_stages_per_rank + 1):
                yield {"schedule": "1f1b", "stages_per_rank": stages}

    def arguments(self, layout: PlanLayout) -> dict[str, Any]:
        """Return stages and microbatches, and a schedule other than 1F1B."""
        options = {"stages_per_rank": layout.stages_per_rank} if layout.stages_per_rank > 1 else {}
        if layout.pipeline > 1 or layout.num_microbatches > 1:
            options["num_microbatches"] = layout.num_microbatches
        if layout.pipeline > 1 and layout.schedule != "1f1b":
            options["schedule"] = layout.schedule
        return options

    def check(self, name: str, value: Any) -> None:
        """Refuse an unknown schedule."""
        if name == "schedule" and value not in (*SCHEDULE_NAMES, "auto"):
            raise ValueError(f"schedule={value}; use one of {', '.join(SCHEDULE_NAMES)}")

    def families(self, devices_per_node: int) -> Iterable[Family]:
        """Return several stages per rank, and zero bubble."""
        yield Family("several stages per rank", lambda layout: layout.stages_per_rank > 1, place=8)
        yield Family("zero bubble", lambda layout: bool(layout.schedule == "zero_bubble"), place=8)

    def simplicity(self, layout: PlanLayout) -> Mapping[int, float]:
        """Return the stages of a rank, and whether the schedule is 1F1B."""
        return {5: layout.stages_per_rank, 6: layout.schedule != "1f1b"}
