"""`PlanLayout`: one candidate of the planner, and `NumberFormat`: bytes of parameters, gradients and states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_hybrid.schedule.generators import stages_of_each_rank

Balance = Literal["layers", "flops"]


@dataclass(frozen=True)
class NumberFormat:
    """Bytes per element under one precision and optimizer.

    Attributes:
        name: As the Trainer's ``precision`` spells it, with what matters besides.
        products: The number format of matrix products, a key of ``Hardware.product_flops``.
        activation: Bytes of an activation.
        parameter: Bytes of the parameter that the optimizer, or the layers, hold all the time.
        compute_copy: Bytes of a further copy in the compute format that is held all the time, as by mixed precision of
            Megatron and DeepSpeed; 0 where autocast makes it for a layer.
        gradient: Bytes of a gradient.
        state: Bytes of the optimizer's states per parameter, a copy of master weights included.
        gathered: Bytes in which ZeRO gathers parameters.
        reduced: Bytes in which gradients are reduced.
        step: Bytes that the optimizer's step takes for a moment, per parameter whose states a rank holds, such as
            32-bit copies of 16-bit gradients.
        casts_weights_once: Whether weights are cast to 8 bits once per step, as Transformer Engine does (its argument
            ``is_first_microbatch``), and not for each microbatch.
    """

    name: str
    products: str
    activation: int = 2
    parameter: int = 4
    compute_copy: int = 0
    gradient: int = 4
    state: float = 8
    gathered: int = 4
    reduced: int = 4
    step: float = 0
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


OFFLOADABLE = ("optimizer_states", "gradients", "parameters")
RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class PlanLayout:
    """How a model would be laid out over the ranks of a cluster.

    Attributes:
        pipeline: Ranks that share the layers.
        replicate: Replicas that hold full copies of what is sharded over ``shard`` ranks.
        shard: Replicas that one copy of states (gradients, parameters) is sharded over.
        tensor: Ranks that share each layer.
        context: Ranks that share the positions of a sequence.
        microbatch: Samples of one microbatch on one replica.
        batch: Samples of one optimizer step over all replicas.
        balanced_by: What stages have about the same of: "flops" (the strategies), or "layers" (Megatron-LM).
        fused_attention: Whether attention scores stay in the kernel (FlashAttention).
        expert: Ranks that share the experts of each layer, among replicas and context ranks.
        schedule: Name of the pipeline's schedule.
        stages_per_rank: Stages on each pipeline rank.
        zero_stage: What is sharded over replicas: 1 is states, 2 gradients too, 3 parameters too.
        reshard_after_forward: Whether stage 3 gathers parameters again for each backward, and stage 2 reduces gradients
            after each.
        sequence_parallel: Whether tensor ranks divide the positions between sharded regions.
        overlapped_tensor_ranks: Whether the collectives of tensor ranks run beside the products.
        recompute: What the backward computes again: "none", "selective" (what is cheap) or "full" (layers).
        offload: What is on the host, of `OFFLOADABLE` and "activations".
        chunked_loss: Whether the loss over the vocabulary is computed in chunks.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    microbatch: int = 1
    batch: int = 1
    balanced_by: Balance = "layers"
    fused_attention: bool = True
    expert: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    zero_stage: int = 0
    reshard_after_forward: bool = True
    sequence_parallel: bool = False
    overlapped_tensor_ranks: bool = False
    recompute: str = "none"
    offload: frozenset[str] = frozenset()
    chunked_loss: bool = False

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
    def mesh(self) -> tuple[int, ...]:
        """Ranks of each kind of parallelism: pipeline, replicas, tensor, context, experts."""
        return self.pipeline, self.data, self.tensor, self.context, self.expert

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
        return self.pipeline * self.stages_of_each_rank

    @property
    def stages_of_each_rank(self) -> int:
        """Stages that each pipeline rank holds under its schedule."""
        return stages_of_each_rank(self.schedule, self.stages_per_rank)


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
