"""Layouts to verify: a name, a number of processes, and the options of the strategy.

A new layout, or a strategy of another name, joins by one line in ``LAYOUTS``.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_hybrid.layout import SIZE_OPTIONS
from lightning_hybrid.schedule import stages_of_each_rank

_SHORT = {
    "dp": "data_parallel_size",
    **SIZE_OPTIONS,
    "spatial": "spatial_parallel_size",
    "stages": "stages_per_rank",
    "m": "num_microbatches",
    "zero": "zero_stage",
}
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
# Sizes whose ranks see the same batch; experts are a view of other axes and need no ranks of their own.
_SAME_BATCH = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "spatial_parallel_size")

# Sizes whose ranks hold parts of one layer, of its positions or of its rows.
_OF_LAYERS = ("tensor_parallel_size", "context_parallel_size", "spatial_parallel_size", "expert_parallel_size")


@dataclass(frozen=True)
class Layout:
    """A layout: a number of processes and the options of the strategy.

    Attributes:
        name: Name in the report.
        devices: Number of processes.
        strategy: Options of the strategy.
        strategy_name: Name under which the strategy is registered with Lightning.
    """

    name: str
    devices: int
    strategy: Mapping[str, Any] = field(default_factory=dict)
    strategy_name: str = "hybrid3d"

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: The processes are no multiple of the ranks that share a batch.
        """
        if self.devices < 1 or self.devices % self._same_batch:
            raise ValueError(
                f"layout {self.name!r}: {self.devices} processes cannot be split into replicas of {self._same_batch}"
                f" ranks; set devices to a multiple of {self._same_batch}"
            )

    @property
    def _same_batch(self) -> int:
        sizes = {size: int(self.strategy.get(size, 1)) for size in _SAME_BATCH}
        return math.prod({**sizes, "pipeline_parallel_size": self._num_pipeline_ranks}.values())

    @property
    def _num_pipeline_ranks(self) -> int:
        widths = self.strategy.get("stage_widths")
        return sum(widths) if isinstance(widths, list) else int(self.strategy.get("pipeline_parallel_size", 1))

    @property
    def shares_layers(self) -> bool:
        """Whether ranks hold parts of one layer, or of its positions."""
        return any(self.strategy.get(size, 1) not in (1, None) for size in _OF_LAYERS)

    @property
    def replicas(self) -> int:
        """Number of replicas: ranks, or groups of ranks, that receive different batches.

        Where it is set, other sizes may be planned.
        """
        replicas = self.strategy.get("data_parallel_size", "auto")
        return self.devices // self._same_batch if replicas == "auto" else int(replicas)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages over all ranks, if each has one rank."""
        each = stages_of_each_rank(self.strategy.get("schedule", "1f1b"), int(self.strategy.get("stages_per_rank", 1)))
        return self._num_pipeline_ranks * each

    def options(self, num_microbatches: int | None) -> dict[str, Any]:
        """Options of the strategy, with a number of microbatches where the layout names none."""
        defaults: dict[str, Any] = {}
        if num_microbatches is not None and self.strategy_name.startswith("hybrid"):
            defaults["num_microbatches"] = num_microbatches
        return {**defaults, **self.strategy}


LAYOUTS = [
    Layout("pp2", devices=2, strategy={"pipeline_parallel_size": 2}),
    Layout("dp2", devices=2),
    Layout("dp2 x pp2", devices=4, strategy={"pipeline_parallel_size": 2}),
    Layout("pp2 x 2 stages", devices=2, strategy={"pipeline_parallel_size": 2, "stages_per_rank": 2}),
    Layout("dp2 x zero3", devices=2, strategy={"zero_stage": 3}),
]


def parse_layout(text: str, tensor_plan: Sequence[str] = ()) -> Layout:
    """Parse a layout such as ``dp=2,pp=2`` or ``dp2xpp2``.

    Args:
        text: Sizes (``dp``, ``tp``, ``pp``, ``cp``, ``ep``, ``spatial``), ``stages`` per rank, ``m`` microbatches,
            ``zero`` stage, ``stage_widths`` such as 3+1, or any option of the strategy by its full name; separated by
            commas. Without ``=`` only short names, separated by ``x``. A value is YAML: a number, true, false, null,
            text, or a list or mapping in brackets.
        tensor_plan: ``pattern=style`` for each entry of a ``tensor_parallel_plan``; for layouts with tensor ranks.

    Raises:
        ValueError: An entry without a value, or with one that is no YAML.
    """
    options: dict[str, Any] = {}
    short = re.findall(r"([a-wyz]+)(\d+)", text) if re.fullmatch(r"[a-z]+\d+(\s*x\s*[a-z]+\d+)*", text) else []
    is_short = short and {name for name, _ in short} <= _SHORT.keys()
    for entry in [f"{name}={size}" for name, size in short] if is_short else _entries(text):
        name, equals, value = entry.strip().partition("=")
        if not equals or not name or not value:
            raise ValueError(f"--layout {text!r}: {entry!r} is not name=value; use such as dp=2,pp=2 or dp2xpp2")
        if _SHORT.get(name, name) in options:
            raise ValueError(f"--layout {text!r}: {name} is set twice")
        options[_SHORT.get(name, name)] = _value(text, value)
    if re.fullmatch(r"\d+(\+\d+)*", str(options.get("stage_widths", ""))):
        options["stage_widths"] = [int(width) for width in str(options["stage_widths"]).split("+")]
    if isinstance(widths := options.get("stage_widths"), list) and all(isinstance(width, int) for width in widths):
        size = options.setdefault("pipeline_parallel_size", sum(widths))
        if size != sum(widths):
            given = "+".join(map(str, widths))
            raise ValueError(f"--layout {text!r}: stage_widths={given} are {sum(widths)} pipeline ranks, and pp={size}")
    devices = _num_ranks(text, options)
    entries = [entry.partition("=") for entry in tensor_plan]
    for pattern, equals, style in entries:
        if not pattern or not equals or not style:
            raise ValueError(f"--tensor-plan {pattern + equals + style!r} is not pattern=style")
    if entries and options.get("tensor_parallel_size", 1) > 1:
        options["tensor_parallel_plan"] = {pattern: style for pattern, _, style in entries}
    return Layout(text, devices=devices, strategy=options)


def _entries(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    entries, depth = [""], 0
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth <= 0:
            entries.append("")
        else:
            entries[-1] += character
    return entries


def _value(text: str, value: str) -> Any:
    """Parse the value of an option; text that is no number, list or mapping stays as it is."""
    if value in _WORDS:
        return _WORDS[value]
    if value[0] not in "{[" and not re.fullmatch(r"-?\d+(\.\d*)?", value):
        return value
    yaml = importlib.import_module("yaml")  # a dependency of Lightning; it has no types
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"--layout {text!r}: {value!r} is no YAML: {' '.join(str(error).split())}") from error


def layout_of_options(options: Mapping[str, Any], devices: int | None = None) -> Layout:
    """Return the layout of a strategy's options, named as ``parse_layout`` reads it, with the number of its replicas.

    Raises:
        ValueError: A size is no whole number, or the processes are no multiple of the ranks that share a batch.
    """
    names = {full: short for short, full in _SHORT.items()}
    named = {names.get(option, option): value for option, value in options.items()}
    name = _name(named) or "dp=auto"
    layout = Layout(name, devices=devices or _num_ranks(name, options), strategy=dict(options))
    if named.get("dp", "auto") == "auto" and layout.replicas > 1:
        return replace(layout, name=_name({"dp": layout.replicas, **{k: v for k, v in named.items() if k != "dp"}}))
    return layout


def _name(options: Mapping[str, Any]) -> str:
    return ",".join(f"{option}={value}" for option, value in options.items())


def _num_ranks(name: str, options: Mapping[str, Any]) -> int:
    """Return the product of the sizes that need ranks of their own."""
    replicas = options.get("data_parallel_size", 1)
    sizes = [replicas if replicas != "auto" else 1, *(options.get(size, 1) for size in _SAME_BATCH)]
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"--layout {name!r}: sizes must be whole numbers of 1 or more; use such as dp=2,pp=2")
    return math.prod(sizes)
