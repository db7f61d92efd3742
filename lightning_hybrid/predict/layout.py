"""`PlanLayout`: one candidate of the planner, its options and spelling; `NumberFormat`: bytes of what it holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_hybrid.schedule.generators import stages_of_each_rank

Balance = Literal["layers", "flops"]


@dataclass(frozen=True)
class NumberFormat:
    """Bytes per element under one precision and optimizer."""

    name: str  # as the Trainer's ``precision`` spells it, with what matters besides
    products: str  # the number format of matrix products, a key of ``Hardware.product_flops``
    activation: int = 2  # bytes of an activation
    parameter: int = 4  # bytes of the parameter that the optimizer, or the layers, hold all the time
    # bytes of a further copy in the compute format that is held all the time, as by mixed precision of Megatron and
    # DeepSpeed; 0 where autocast makes it for a layer
    compute_copy: int = 0
    gradient: int = 4  # bytes of a gradient
    state: float = 8  # bytes of the optimizer's states per parameter, a copy of master weights included
    gathered: int = 4  # bytes in which ZeRO gathers parameters
    reduced: int = 4  # bytes in which gradients are reduced
    # bytes that the optimizer's step takes for a moment, per parameter whose states a rank holds, such as 32-bit copies
    # of 16-bit gradients
    step: float = 0
    # whether weights are cast to 8 bits once per step, as Transformer Engine does (its argument
    # ``is_first_microbatch``), and not for each microbatch
    casts_weights_once: bool = False


# 16-bit parameters and gradients, 32-bit master weights and Adam (arXiv 1910.02054); the step casts gradients.
_MASTER = (2, 2, 0, 2, 12, 2, 2, 4)
FORMATS = {
    "32-true": NumberFormat("32-true", "float32", activation=4),
    "bf16-mixed": NumberFormat("bf16-mixed", "bfloat16"),
    "16-mixed": NumberFormat("16-mixed", "float16"),
    "bf16-true": NumberFormat("bf16-true", "bfloat16", 2, 2, 0, 2, 4, 2, 2),
    "bf16-true, float32 master weights": NumberFormat("bf16-true, float32 master weights", "bfloat16", *_MASTER),
    "16-true, float32 master weights": NumberFormat("16-true, float32 master weights", "float16", *_MASTER),
    "float8": NumberFormat("float8", "float8", *_MASTER),
}


FLOAT8 = "float8"  # of the command: this package's, of linear layers in a run in bf16-mixed
_OTHER_NAMES = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed", "64": "64-true"}
_SAME_BYTES = {"16-true": "bf16-true", "64-true": "32-true"}


def number_format_of(precision: str, state_bytes: float | None = None) -> NumberFormat:
    """Return the bytes of parameters, gradients and states.

    Args:
        precision: As the Trainer spells it, or a key of `FORMATS`.
        state_bytes: Bytes of the optimizer's states per parameter; those of Adam if None.

    Raises:
        ValueError: The precision is unknown.
    """
    name = _OTHER_NAMES.get(str(precision), str(precision))
    found = FORMATS.get(name) or FORMATS.get(_SAME_BYTES.get(name, ""))
    if found is None:
        raise ValueError(f"precision={precision!r} is unknown to the planner; use one of {', '.join(FORMATS)}")
    if name == "16-true":
        found = dataclasses.replace(found, name=name, products="float16")
    if name == "64-true":
        doubled = {field: 2 * getattr(found, field) for field in _SIZES}
        found = dataclasses.replace(found, name=name, **doubled)
    return found if state_bytes is None else dataclasses.replace(found, state=state_bytes)


_SIZES = ("activation", "parameter", "compute_copy", "gradient", "state", "gathered", "reduced")


OFFLOADABLE = ("optimizer_states", "gradients", "parameters")
RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class PlanLayout:
    """How a model would be laid out over the ranks of a cluster."""

    pipeline: int = 1  # ranks that share the layers
    replicate: int = 1  # replicas that hold full copies of what is sharded over ``shard`` ranks
    shard: int = 1  # replicas that one copy of states (gradients, parameters) is sharded over
    tensor: int = 1  # ranks that share each layer
    context: int = 1  # ranks that share the positions of a sequence
    microbatch: int = 1  # samples of one microbatch on one replica
    batch: int = 1  # samples of one optimizer step over all replicas
    # what stages have about the same of: "flops" (the strategies), or "layers" (Megatron-LM)
    balanced_by: Balance = "layers"
    fused_attention: bool = True  # whether attention scores stay in the kernel (FlashAttention)
    # whether these share the rows of images and feature maps instead; each has all parameters, and sums their gradients
    spatial: bool = False
    expert: int = 1  # ranks that share the experts of each layer, among replicas and context ranks
    schedule: str = "1f1b"  # name of the pipeline's schedule
    stages_per_rank: int = 1  # stages on each pipeline rank
    widths: tuple[int, ...] = ()  # pipeline ranks of each stage, which take its microbatches in turn; one each if empty
    zero_stage: int = 0  # what is sharded over replicas: 1 is states, 2 gradients too, 3 parameters too
    # whether stage 3 gathers parameters again for each backward, and stage 2 reduces gradients after each
    reshard_after_forward: bool = True
    sequence_parallel: bool = False  # whether tensor ranks divide the positions between sharded regions
    overlapped_tensor_ranks: bool = False  # whether the collectives of tensor ranks run beside the products
    overlapped_expert_ranks: bool = False  # whether the all-to-alls of experts run beside other microbatches
    recompute: str = "none"  # what the backward computes again: "none", "selective" (what is cheap) or "full" (layers)
    offload: frozenset[str] = frozenset()  # what is on the host, of `OFFLOADABLE` and "activations"
    chunked_loss: bool = False  # whether the loss over the vocabulary is computed in chunks

    @property
    def fields(self) -> Mapping[str, Any]:
        """All values by their names."""
        return vars(self)

    def replaced(self, **changes: Any) -> PlanLayout:
        """Return the layout with other values in some places."""
        return dataclasses.replace(self, **changes)

    @property
    def data(self) -> int:
        """Replicas that see different samples."""
        return self.replicate * self.shard

    @property
    def routed_ranks(self) -> int:
        """Ranks that share the parameters among which tokens are routed."""
        return self.expert

    @property
    def routed_shards(self) -> int:
        """Ranks that share the states of one rank's part of these parameters."""
        return min(max(1, self.shard * self.context // self.routed_ranks), self.shard)

    def shards(self, kind: Literal["states", "gradients", "parameters"]) -> bool:
        """Whether replicas hold shards of a kind; what stage 3 reduces once in a step is full until then."""
        accumulates = self.zero_stage == 3 and not self.reshard_after_forward and self.num_microbatches > 1
        return self.zero_stage >= {"states": 1, "gradients": 4 if accumulates else 2, "parameters": 3}[kind]

    @property
    def gathers(self) -> bool:
        """Whether layers run with parameters that are there for a moment."""
        return (self.shards("parameters") and self.shard > 1) or "parameters" in self.offload

    @property
    def reduces_by_layer(self) -> bool:
        """Whether full gradients are there for a moment."""
        return self.zero_stage >= 2 and self.shard > 1

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether stage 2 reduces the gradients of each microbatch, to hold no more than shards of them."""
        return self.zero_stage == 2 and self.reshard_after_forward and self.num_microbatches > 1

    @property
    def reduces_in_buckets(self) -> bool:
        """Whether gradients go through buckets to their shards, once in a step."""
        return self.zero_stage in (1, 2) and self.shard > 1 and not self.reduces_each_microbatch

    @property
    def elsewhere(self) -> set[str]:
        """Terms of memory that are not on the device; the optimizer's step runs where its states are."""
        kinds = {kind.replace("_", " ") for kind in self.offload}
        return {*kinds, "optimizer step"} if "optimizer states" in kinds else kinds

    @property
    def forwards(self) -> int:
        """How often the backward runs the forwards of layers that repeat."""
        return int(self.recompute == "full")

    @property
    def repeats_cheap(self) -> bool:
        """Whether the backward computes again what is cheap."""
        return self.recompute == "selective"

    @property
    def mesh(self) -> tuple[int, ...]:
        """Ranks of each kind of parallelism: pipeline, replicas, tensor, context, experts."""
        return self.pipeline, self.data, self.tensor, self.context, self.expert

    @property
    def copies(self) -> int:
        """Ranks over which gradients are reduced at the end of a step; of feature maps, the backward sums them."""
        return self.data if self.spatial else self.data * self.context

    @property
    def ranks(self) -> int:
        """Ranks of the layout."""
        return self.pipeline * self.data * self.tensor * self.context

    @property
    def has_replicas_alone(self) -> bool:
        """Whether there is no other kind of parallelism."""
        return sum(size > 1 for size in self.mesh) == (self.data > 1)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one replica in one step, at least 1."""
        return max(1, -(-self.batch // (self.data * self.microbatch)))

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.widths) or self.pipeline * self.stages_of_each_rank

    @property
    def stages_of_each_rank(self) -> int:
        """Stages that each pipeline rank holds under its schedule."""
        return stages_of_each_rank(self.schedule, self.stages_per_rank)


@dataclass(frozen=True)
class Allowed:
    """What the model and the run permit."""

    pipeline: bool = True  # whether the layers may be shared among pipeline ranks
    tensor: bool = True  # whether layers may be sharded over tensor ranks
    context: bool = True  # whether sequences may be sharded over context ranks
    positions_per_context_rank: int = 1024  # least positions of a context rank
    spatial: bool = True  # whether ranks may share the rows of images
    expert: bool = True  # whether ranks may share experts
    schedules: tuple[str, ...] = ("1f1b", "zero_bubble")  # of pipelines with one stage per rank
    largest_stages_per_rank: int = 4  # most stages of a pipeline rank
    widths: bool = True  # whether stages may have several ranks
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # stages of ZeRO
    recompute: tuple[str, ...] = RECOMPUTED  # kinds of recomputation, the most frugal last
    offload: bool = True  # whether the host may hold something
    chunked_loss: bool = False  # whether a loss over classes may be computed in chunks


_SIZE_OPTIONS = {
    "data_parallel_size": "data",
    "pipeline_parallel_size": "pipeline",
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
    "expert_parallel_size": "expert",
}
# Options of the strategy that name one field of a layout.
_FIELDS = {
    **_SIZE_OPTIONS,
    "spatial_parallel_size": "spatial",
    "stage_widths": "widths",
    **{name: name for name in ("schedule", "stages_per_rank", "zero_stage")},
    "shard_size": "shard",
    **{name: name for name in ("reshard_after_forward", "sequence_parallel", "recompute", "offload", "chunked_loss")},
}
_SHORT = dict(zip(_SIZE_OPTIONS, ("dp", "pp", "tp", "cp", "ep"), strict=True))
_SHORT |= {
    "spatial_parallel_size": "spatial",
    "stages_per_rank": "stages",
    "num_microbatches": "m",
    "zero_stage": "zero",
}
_OFF_BY_NONE = ("recompute", "offload", "stage_widths")  # None of the others is their default

# All options of the strategy that make a layout, with their short names.
LAYOUT_OPTIONS = {name: _SHORT.get(name, name) for name in (*_FIELDS, "num_microbatches")}
SIZES = tuple(_SIZE_OPTIONS)


def offloaded_beside(zero_stage: int | None) -> frozenset[str]:
    """Return what is on the host beside a stage of ZeRO."""
    return frozenset(OFFLOADABLE[: (1, 2, 2, 3)[zero_stage or 0]])


def strategy_options(layout: PlanLayout) -> dict[str, Any]:
    """Return the arguments of `Hybrid3DStrategy` that differ from its defaults; the number of replicas is left out."""
    options = {name: layout.fields[field] for name, field in _SIZE_OPTIONS.items() if field != "data"}
    options = {name: size for name, size in options.items() if size > 1}
    if layout.spatial:
        options["spatial_parallel_size"] = options.pop("context_parallel_size")
    if layout.widths:
        options["stage_widths"] = list(layout.widths)
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
    return ",".join(f"{_SHORT.get(name, name)}={spelled_value(value)}" for name, value in options.items())


def spelled_fields(fixed: Mapping[str, Any]) -> str:
    """Return what `fixed_fields` returns in the same spelling, such as "dp=3, zero=1"."""
    names = {field: _SHORT.get(name, name) for name, field in _FIELDS.items()}
    words = []
    if "spatial" in fixed:
        ranks = fixed["context"] if fixed["spatial"] else 1
        fixed = {name: value for name, value in fixed.items() if name != "context"} | {"spatial": ranks}
    for field, value in fixed.items():
        name = names.get(field, _SHORT.get(field, field))
        value = dict.fromkeys(sorted(value), "cpu") if isinstance(value, frozenset) else value
        words.append(f"{name}={spelled_value(value)}")
    return ", ".join(words)


def spelled_value(value: Any) -> str:
    """Return a value as ``--layout`` of the commands spells it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple) and all(isinstance(entry, int) for entry in value):
        return "+".join(map(str, value)) or "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def fixed_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what options that the user has set, by full names, fix of a layout; "auto" fixes nothing."""
    fixed: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        value = options.get(name, "auto")
        if value != "auto" and (value is not None or name in _OFF_BY_NONE):
            fixed[field] = _value(name, value, options)
    if fixed.get("widths"):
        fixed["pipeline"] = sum(fixed["widths"])
    if (ranks := fixed.get("spatial", 0)) > 1:  # they are the context ranks
        fixed["context"] = ranks
    if "spatial" in fixed:
        fixed["spatial"] = ranks > 1
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
    if name == "stage_widths":
        return tuple(value or ())
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


def kinds_of_parallelism(layout: PlanLayout) -> int:
    """Return how many kinds a layout combines besides replicas; gathers within stages and offload are one each."""
    in_stages = layout.pipeline > 1 and (layout.shards("parameters") or layout.reduces_each_microbatch)
    return sum(size > 1 for size in layout.mesh) - (layout.data > 1) + in_stages + bool(layout.offload)


def simplicity(layout: PlanLayout) -> tuple[float, ...]:
    """Return a key that orders layouts from the simplest: kinds of parallelism, ZeRO, recomputation, the rest."""
    return (
        kinds_of_parallelism(layout),
        bool(layout.offload),
        max(1, layout.zero_stage),  # states alone in shards cost less than what is computed again or in chunks
        layout.chunked_loss,
        RECOMPUTED.index(layout.recompute),
        layout.zero_stage,
        layout.replicate > 1 and layout.zero_stage > 0,
        bool(layout.widths),
        layout.stages_per_rank,
        layout.schedule != "1f1b",
        layout.sequence_parallel,
        layout.ranks // layout.data,
        not layout.reshard_after_forward,
        layout.num_microbatches,
    )
