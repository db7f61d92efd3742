"""A `PlanLayout` in the options of the strategy and in the spelling of the command line; which layout is simpler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_hybrid.predict.layout import PlanLayout
from lightning_hybrid.predict.techniques.order import PLANNED, sharded_kinds

_SIZES = {
    "data_parallel_size": "data",
    "pipeline_parallel_size": "pipeline",
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
}
_BY_OPTION = {option: each for each in PLANNED for option in each.options}
_SHORT = dict(zip(_SIZES, ("dp", "pp", "tp", "cp"), strict=True)) | {
    option: word for each in PLANNED for option, word in each.short.items()
}
# Options of the strategy that name one field of a layout.
_FIELDS = {**_SIZES, **{option: each.options[option] for option, each in _BY_OPTION.items()}}

# All options of the strategy that make a layout.
LAYOUT_OPTIONS = (*_FIELDS, "num_microbatches")


def strategy_options(layout: PlanLayout) -> dict[str, Any]:
    """Return the arguments of `Hybrid3DStrategy` that differ from its defaults; the number of replicas is left out."""
    options = {name: layout.fields[field] for name, field in _SIZES.items() if field != "data"}
    options = {name: size for name, size in options.items() if size > 1}
    for technique in PLANNED:
        options |= technique.arguments(layout)
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
        for technique in PLANNED:
            technique.check(name, value)
        if name in ("stages_per_rank", "num_microbatches", "shard_size") and not _is_count(value):
            raise ValueError(f"{_SHORT.get(name, name)}={value}; use a whole number of 1 or more")


def _is_count(value: Any) -> bool:
    return value in ("auto", None) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def fixed_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what options of the strategy fix of a layout; an option "auto" fixes nothing.

    Args:
        options: By their full names, those alone that the user has set.
    """
    fixed: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        value, technique = options.get(name, "auto"), _BY_OPTION.get(name)
        if value == "auto" or (value is None and not (technique and technique.none_is_set)):
            continue
        fixed[field] = technique.value(value, options) if technique else value
    if isinstance(options.get("num_microbatches"), int):
        fixed["num_microbatches"] = options["num_microbatches"]
    return fixed


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
    shard = math.gcd(data, shard or data) if "states" in sharded_kinds(layout) else 1
    of_replica = max(1, batch // data)
    microbatch = math.gcd(microbatch, of_replica) if count is None else -(-of_replica // count)
    return layout.replaced(replicate=data // shard, shard=shard, microbatch=microbatch)


def simplicity(layout: PlanLayout) -> tuple[float, ...]:
    """Return a key that orders layouts from the simplest: kinds of parallelism, ZeRO, recomputation, the rest."""
    kinds = sum(size > 1 for size in layout.mesh) - (layout.data > 1)
    places: dict[int, float] = {0: kinds, 8: layout.ranks // layout.data, 10: layout.num_microbatches}
    for technique in PLANNED:
        places |= technique.simplicity(layout)
    return tuple(places[place] for place in sorted(places))
