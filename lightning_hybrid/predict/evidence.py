"""The error bar of a plan's step time, by the published runs that predictions were compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layout import NumberFormat, PlanLayout
from lightning_hybrid.predict.plans import TIME_ERROR

# Of the others, by the runs whose source was left out of the fit (`benchmarks/published/leave_one_out.py`): 85 % of all
# are inside.
UNCALIBRATED = {"dense": 0.22, "mixtures": 0.35}
# For each device and number format of products, the techniques of dense models that three runs or more were compared
# with. Runs of V100 and of mixtures were compared, too, and are off by more.
COMPARED: Mapping[tuple[str, str], frozenset[str]] = {
    ("a100", "16 bits"): frozenset({"replicas", "ZeRO-3", "stages", "tensor ranks"}),
    ("h100", "16 bits"): frozenset({"replicas", "ZeRO-3", "stages", "tensor ranks"}),
    ("h100", "float8"): frozenset({"replicas", "ZeRO-3", "stages", "tensor ranks", "context ranks"}),
}


def kind_of(costs: ModelCosts) -> str:
    """Return the kind of a model."""
    return "mixtures" if costs.routes else "dense"


def device_of(hardware: Hardware) -> str:
    """Return a device by its name, without its cluster and the size of its memory."""
    return hardware.name.partition(",")[0].removesuffix("-40").removesuffix("-80")


def format_of(number_format: NumberFormat) -> str:
    """Return the number format of products; both of 16 bits have one rate."""
    return "16 bits" if number_format.products in ("bfloat16", "float16") else number_format.products


def techniques_of(layout: PlanLayout) -> Iterator[str]:
    """Yield what a layout does that changes its time."""
    if layout.data > 1:
        yield f"ZeRO-{layout.zero_stage}" if layout.zero_stage == 3 else "replicas"
    names = {"pipeline": "stages", "tensor": "tensor ranks", "context": "context ranks", "expert": "expert ranks"}
    names |= {"context": "spatial ranks"} if layout.spatial else {}
    yield from (name for field, name in names.items() if layout.fields[field] > 1)
    if layout.offload:
        yield "offload"


def time_error(costs: ModelCosts, layout: PlanLayout, number_format: NumberFormat, hardware: Hardware) -> float:
    """Return the relative error bar of a predicted step time."""
    compared = COMPARED.get((device_of(hardware), format_of(number_format)), frozenset())
    is_known = costs.is_sequence and not costs.routes and bool(compared)
    is_compared = is_known and compared.issuperset(techniques_of(layout))
    return TIME_ERROR if is_compared else UNCALIBRATED[kind_of(costs)]
