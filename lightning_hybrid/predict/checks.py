"""Options of a layout that a command line sets: their names and values, and what the model has no room for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_hybrid.layout import is_count
from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.layout import LAYOUT_OPTIONS, OFFLOADABLE, SIZES, spelled_value
from lightning_hybrid.schedule import SCHEDULE_NAMES
from lightning_hybrid.schedule.generators import make_schedule, stages_of_each_rank

_COUNTS = (*SIZES, "spatial_parallel_size", "stages_per_rank", "num_microbatches", "shard_size")
_FLAGS = ("sequence_parallel", "reshard_after_forward", "chunked_loss")
_COUNT = "a whole number of 1 or more"


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that a plan does not have, or not with this value.

    Raises:
        ValueError: An unknown name, or a value that the option does not take, or not together with another.
    """
    for name, value in options.items():
        if name not in LAYOUT_OPTIONS:
            raise ValueError(f"a plan has no {name}; use {', '.join(sorted(LAYOUT_OPTIONS.values()))}")
        if value is not None and value != "auto" and (wanted := _wanted(name, value)):
            raise ValueError(f"{LAYOUT_OPTIONS[name]}={spelled_value(value)}; use {wanted}")
    zero, offload = options.get("zero_stage"), options.get("offload")
    for kind, least in (("parameters", 3), ("gradients", 1)):
        if isinstance(offload, Mapping) and kind in offload and isinstance(zero, int) and zero < least:
            raise ValueError(f"zero={zero}: {kind} are on the host where replicas shard them; use {least} or more")
    _check_widths(options)
    _check_spatial(options)
    schedule, stages = options.get("schedule"), options.get("stages_per_rank")
    if schedule in SCHEDULE_NAMES and isinstance(stages, int):
        make_schedule(schedule, 1, 1, stages)  # refuses a number of stages that the schedule never has


def _check_spatial(options: Mapping[str, Any]) -> None:
    ranks = options.get("spatial_parallel_size")
    for name in ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"):
        size = options.get(name)
        if isinstance(ranks, int) and isinstance(size, int) and min(ranks, size) > 1:
            raise ValueError(f"spatial={ranks}: layers under {LAYOUT_OPTIONS[name]}={size} would gather the images")


def _check_widths(options: Mapping[str, Any]) -> None:
    widths, stages = options.get("stage_widths"), options.get("stages_per_rank")
    if not isinstance(widths, list):
        return
    if isinstance(stages, int) and stages > 1:
        raise ValueError(f"stage_widths={spelled_value(widths)}: ranks have one stage each; leave stages={stages} out")
    if (schedule := options.get("schedule", "1f1b")) in SCHEDULE_NAMES:
        make_schedule(schedule, sum(widths), 1, widths=widths)  # refuses one that ranks of a stage cannot run


def _wanted(name: str, value: Any) -> str:
    """Return which values an option takes, if this is none of them; otherwise nothing."""
    if name in _COUNTS:
        return "" if is_count(value) else _COUNT
    if name in _FLAGS:
        is_number = name == "chunked_loss" and is_count(value) and value > 1
        return "" if isinstance(value, bool) or is_number else "true or false"
    if name == "stage_widths":
        is_list = isinstance(value, list) and bool(value) and all(map(is_count, value))
        return "" if is_list else "the ranks of each stage, such as 3+1"
    if name == "schedule":
        return "" if value in SCHEDULE_NAMES else f"one of {', '.join(SCHEDULE_NAMES)}"
    if name == "zero_stage":
        return (
            "" if (value == 0 and not isinstance(value, bool)) or (is_count(value) and value <= 3) else "0, 1, 2 or 3"
        )
    if name == "offload":
        return "" if _is_offload(value) else f"cpu, or a mapping of {', '.join(OFFLOADABLE)} to cpu"
    is_share = isinstance(value, float) and 0 < value <= 1
    is_known = value in ("keep", "full", "selective", "none") if isinstance(value, str) else is_count(value)
    is_budget = isinstance(value, str) and value[:1].isdigit()
    is_known = is_known or is_share or is_budget or isinstance(value, list | Mapping)
    return "" if is_known else "full, selective, none, or what the option recompute of a run takes"


def _is_offload(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return value == "cpu"
    return all(kind in OFFLOADABLE and where == "cpu" for kind, where in value.items())


def misfits(costs: ModelCosts, fields: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Yield why a model or a number of devices has no room for sizes, by their names in a plan's layout."""
    tensor, expert, context = (fields.get(name, 1) for name in ("tensor", "expert", "context"))
    pipeline = fields.get("pipeline", 1)
    for count, what in ((costs.heads or 0, "heads"), (costs.key_value_heads or 0, "heads of keys and values")):
        if count % tensor:
            yield f"tp={tensor} does not divide the model's {count} {what}"
    if costs.routes % expert:
        yield f"ep={expert} does not divide the model's {costs.routes} experts"
    if expert > 1 and not costs.routes and costs.is_traced:
        yield f"ep={expert}: the model has no experts"
    if fields.get("spatial") and costs.most_rows < context:
        yield f"spatial={context}: the largest feature map of a convolution has {costs.most_rows} rows"
    elif costs.positions % context and not fields.get("spatial"):
        yield f"cp={context} does not divide the {costs.positions:,} positions of a sample"
    widths = fields.get("widths", ())
    stages = len(widths) or pipeline * stages_of_each_rank(
        fields.get("schedule", "1f1b"), fields.get("stages_per_rank", 1)
    )
    if stages > max(1, costs.num_layers):
        yield f"{stages} stages are more than the model's {costs.num_layers} units"
    if ranks % fields.get("shard", 1):
        yield f"shard_size={fields['shard']} does not divide {ranks} devices"
    product = pipeline * tensor * context * fields.get("data", 1)
    if ranks % product == 0 and ranks // (pipeline * tensor) % expert:
        yield f"ep={expert} does not divide the {ranks // (pipeline * tensor)} ranks that may share experts"
