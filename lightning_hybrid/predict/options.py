"""A `PlanLayout` in the options of the strategy and in the spelling of the command line; which layout is simpler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_hybrid.predict.layout import OFFLOADABLE, RECOMPUTED, PlanLayout
from lightning_hybrid.schedule import SCHEDULE_NAMES

_SIZES = {
    "data_parallel_size": "data",
    "pipeline_parallel_size": "pipeline",
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
    "expert_parallel_size": "expert",
}
# Options of the strategy that name one field of a layout.
_FIELDS = {
    **_SIZES,
    **{name: name for name in ("schedule", "stages_per_rank", "zero_stage")},
    "shard_size": "shard",
    **{name: name for name in ("reshard_after_forward", "sequence_parallel", "recompute", "offload", "chunked_loss")},
}
_SHORT = dict(zip(_SIZES, ("dp", "pp", "tp", "cp", "ep"), strict=True))
_SHORT |= {"stages_per_rank": "stages", "num_microbatches": "m", "zero_stage": "zero"}
_OFF_BY_NONE = ("recompute", "offload")  # None of the others is their default

# All options of the strategy that make a layout.
LAYOUT_OPTIONS = (*_FIELDS, "num_microbatches")


def offloaded_beside(zero_stage: int | None) -> frozenset[str]:
    """Return what is on the host beside a stage of ZeRO."""
    return frozenset(OFFLOADABLE[: (1, 2, 2, 3)[zero_stage or 0]])


def strategy_options(layout: PlanLayout) -> dict[str, Any]:
    """Return the arguments of `Hybrid3DStrategy` that differ from its defaults; the number of replicas is left out."""
    options = {name: layout.fields[field] for name, field in _SIZES.items() if field != "data"}
    options = {name: size for name, size in options.items() if size > 1}
    if layout.stages_per_rank > 1:
        options["stages_per_rank"] = layout.stages_per_rank
    if layout.pipeline > 1 or layout.num_microbatches > 1:
        options["num_microbatches"] = layout.num_microbatches
    if layout.pipeline > 1 and layout.schedule != "1f1b":
        options["schedule"] = layout.schedule
    if layout.zero_stage:
        options["zero_stage"] = layout.zero_stage
        if layout.shard != layout.data:
            options["shard_size"] = layout.shard
        if layout.shards("parameters") or layout.reduces_each_microbatch:
            options["reshard_after_forward"] = layout.reshard_after_forward
    if layout.tensor > 1 and layout.sequence_parallel:
        options["sequence_parallel"] = True
    if layout.recompute != "none":
        options["recompute"] = layout.recompute
    if layout.offload:
        options["offload"] = {kind: "cpu" for kind in sorted(layout.offload)}
    if layout.chunked_loss:
        options["chunked_loss"] = True
    return options


def spelled(layout: PlanLayout) -> str:
    """Return the layout as ``--layout`` of the commands spells it, such as "dp=4,tp=2,zero=1"."""
    options = {"data_parallel_size": layout.data, **strategy_options(layout)}
    return ",".join(f"{_SHORT.get(name, name)}={_word(value)}" for name, value in options.items())


def spelled_fields(fixed: Mapping[str, Any]) -> str:
    """Return what `fixed_fields` returns in the same spelling, such as "dp=3, zero=1"."""
    names = {field: _SHORT.get(name, name) for name, field in _FIELDS.items()}
    words = []
    for field, value in fixed.items():
        name = names.get(field, _SHORT.get(field, field))
        words.append(f"{name}={_word(dict.fromkeys(sorted(value), 'cpu') if isinstance(value, frozenset) else value)}")
    return ", ".join(words)


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that a plan does not have, or not with this value.

    Raises:
        ValueError: An unknown name, or a stage of ZeRO, a schedule or a number that there is not.
    """
    known = {_SHORT.get(name, name) for name in LAYOUT_OPTIONS}
    for name, value in options.items():
        if name not in LAYOUT_OPTIONS:
            raise ValueError(f"a plan has no {name}; use {', '.join(sorted(known))}")
        if name == "schedule" and value not in (*SCHEDULE_NAMES, "auto"):
            raise ValueError(f"schedule={value}; use one of {', '.join(SCHEDULE_NAMES)}")
        if name == "zero_stage" and value not in (0, 1, 2, 3, "auto", None):
            raise ValueError(f"zero={value}; use 0, 1, 2 or 3")
        if name in ("stages_per_rank", "num_microbatches", "shard_size") and not _is_count(value):
            raise ValueError(f"{_SHORT.get(name, name)}={value}; use a whole number of 1 or more")


def _is_count(value: Any) -> bool:
    return value in ("auto", None) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def fixed_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what options that the user has set, by full names, fix of a layout; "auto" fixes nothing."""
    fixed: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        value = options.get(name, "auto")
        if value != "auto" and (value is not None or name in _OFF_BY_NONE):
            fixed[field] = _value(name, value, options)
    if isinstance(options.get("num_microbatches"), int):
        fixed["num_microbatches"] = options["num_microbatches"]
    return fixed


def _value(name: str, value: Any, options: Mapping[str, Any]) -> Any:
    """Return the value of the field that an option sets; policies of recomputation by layer count as full."""
    if name == "recompute":
        if value in (None, "keep"):
            return "none"
        is_kind = isinstance(value, str) and value in RECOMPUTED
        return value if is_kind else "selective" if isinstance(value, float) else "full"
    if name == "offload":
        if value is None or isinstance(value, Mapping):
            return frozenset(kind for kind, where in (value or {}).items() if where == "cpu")
        stage = options.get("zero_stage")
        return offloaded_beside(None if stage == "auto" else stage)
    return bool(value) if name == "chunked_loss" else value


def layout_from_options(options: Mapping[str, Any], ranks: int, batch: int, *, microbatch: int = 1) -> PlanLayout:
    """Return the layout of the strategy's options on a number of ranks.

    Args:
        options: By their full names.
        ranks: Number of ranks, a multiple of those that share a batch; the options may set another number of replicas.
        batch: Samples of a step over all replicas.
        microbatch: Samples of a microbatch at most, where the options name no number of microbatches; they divide the
            batch of a replica.
    """
    fixed = fixed_fields(options)
    count, shard = fixed.pop("num_microbatches", None), fixed.pop("shard", None)
    data = fixed.pop("data", None)
    layout = PlanLayout(batch=batch, microbatch=microbatch, **fixed)
    data = data or max(1, ranks // (layout.pipeline * layout.tensor * layout.context))
    shard = math.gcd(data, shard or data) if layout.shards("states") else 1
    of_replica = max(1, batch // data)
    microbatch = math.gcd(microbatch, of_replica) if count is None else -(-of_replica // count)
    return layout.replaced(replicate=data // shard, shard=shard, microbatch=microbatch)


def simplicity(layout: PlanLayout) -> tuple[float, ...]:
    """Return a key that orders layouts from the simplest: kinds of parallelism, ZeRO, recomputation, the rest."""
    return (
        sum(size > 1 for size in layout.mesh) - (layout.data > 1),
        bool(layout.offload),
        layout.zero_stage,
        RECOMPUTED.index(layout.recompute),
        layout.replicate > 1 and layout.zero_stage > 0,
        layout.stages_per_rank,
        layout.schedule != "1f1b",
        layout.sequence_parallel,
        layout.ranks // layout.data,
        not layout.reshard_after_forward,
        layout.num_microbatches,
    )
