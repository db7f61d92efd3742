"""Offload: the host holds states, gradients, parameters or activations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.techniques.technique import (
    Allowed,
    Candidates,
    Family,
    Parameters,
    PlanLayout,
    PlanTechnique,
    StepModel,
)

_KINDS = ("optimizer_states", "gradients", "parameters")


def _of_stage(stage: int | None) -> frozenset[str]:
    """What is on the host beside a stage of ZeRO."""
    return frozenset(_KINDS[: (1, 2, 2, 3)[stage or 0]])


class Offload(PlanTechnique):
    """Of "optimizer_states", "gradients", "parameters", as the stage of ZeRO allows, and of "activations"."""

    settings: ClassVar = {"offload": frozenset()}
    limits: ClassVar = {"offload": True}
    options: ClassVar = {"offload": "offload"}
    none_is_set: ClassVar = True

    def permitted(self, allowed: Allowed, hardware: Hardware) -> Mapping[str, Any]:
        """Return whether the host has memory of its own."""
        return {"offload": allowed.offload and not hardware.is_host}

    def changes(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield nothing on the host, or what the stage of ZeRO allows."""
        if candidates.allowed.offload:
            yield {"offload": frozenset() if layout.offload else _of_stage(layout.zero_stage)}

    def rescues(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield what the stage of ZeRO allows."""
        if "offload" not in candidates.fixed:
            yield from self.changes(layout, candidates)

    def followed(self, layout: PlanLayout, candidates: Candidates) -> Mapping[str, Any]:
        """Return what another stage of ZeRO allows."""
        is_free = layout.offload and "offload" not in candidates.fixed
        return {"offload": _of_stage(layout.zero_stage)} if is_free else {}

    def elsewhere(self, layout: PlanLayout) -> Collection[str]:
        """Return the kinds, and the optimizer's step, which runs where its states are."""
        kinds = [kind.replace("_", " ") for kind in layout.offload]
        return [*kinds, "optimizer step"] if "optimizer_states" in layout.offload else kinds

    def gathers(self, layout: PlanLayout) -> bool:
        """Whether parameters are on the host."""
        return "parameters" in layout.offload

    def optimizer_terms(self, step: StepModel, own: Parameters, stepped: float) -> dict[str, float] | None:
        """Return the seconds of the host's step, or of copies of gradients and parameters, whichever is longer."""
        layout, form, hardware = step.layout, step.format, step.hardware
        if "optimizer_states" not in layout.offload:
            return None
        copied = stepped * (form.gradient + form.parameter) / hardware.host_bandwidth
        copies = 0.0  # of shards of parameters to the device, for each forward and backward
        if "parameters" in layout.offload:
            passes = 2 * layout.num_microbatches if layout.reshard_after_forward else 1
            copies = passes * own.over_shards(layout).total * form.gathered / hardware.host_bandwidth
        return {"host": max(copied, stepped / hardware.host_update_rate) + copies}

    def arguments(self, layout: PlanLayout) -> dict[str, Any]:
        """Return the place of each kind."""
        return {"offload": {kind: "cpu" for kind in sorted(layout.offload)}} if layout.offload else {}

    def value(self, value: Any, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the kinds on the host."""
        if value is None:
            return frozenset()
        if isinstance(value, Mapping):
            return frozenset(kind for kind, where in value.items() if where == "cpu")
        return _of_stage(options.get("zero_stage"))

    def families(self, devices_per_node: int) -> Iterable[Family]:
        """Return the layouts with anything on the host."""
        return [Family("offload to the host", lambda layout: bool(layout.offload), place=7)]

    def simplicity(self, layout: PlanLayout) -> Mapping[int, float]:
        """Return whether anything is on the host."""
        return {1: bool(layout.offload)}
