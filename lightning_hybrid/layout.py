"""The layout of a parallel run: the number of ranks on each axis, and the arithmetic of ranks and coordinates.

A `ParallelLayout` is computed from its sizes only, without process groups, so a laptop can compute the layout of a
thousand ranks. `mesh.py` makes the process groups of a layout.

Ranks are numbered with the last axis fastest. For `pipeline_parallel_size=2, data_shard_size=2,
tensor_parallel_size=2`:

    pp=0   dp_shard=0: 0 1   dp_shard=1: 2 3
    pp=1   dp_shard=0: 4 5   dp_shard=1: 6 7
                     tp ->            tp ->
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from lightning_hybrid.errors import LayoutError

Objective = Literal["throughput", "fewest_devices", "largest_batch"]  # of the search for a layout
# Outermost first: tensor ranks are neighbours (they talk most, so they share a node), pipeline ranks are far apart.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# By axis, the option of the strategy that sets its size.
SIZE_OPTIONS = {
    "pp": "pipeline_parallel_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of one rank: its index on every axis, outermost axis first."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The number of ranks on each axis.

    Args:
        pipeline_parallel_size: ranks over which the stages of the model are split.
        data_replicate_size: copies of the model (or of its shards) that receive different batches.
        data_shard_size: ranks that receive different batches and shard one copy of the model.
        context_parallel_size: ranks over which the sequences of one batch are sharded.
        tensor_parallel_size: ranks over which each layer is sharded.
        expert_parallel_size: ranks over which the experts are sharded; a view over the data and context axes.

    Raises:
        LayoutError: a size is no int >= 1, or expert_parallel_size does not fit the data and context axes.
    """

    pipeline_parallel_size: int = 1
    data_replicate_size: int = 1
    data_shard_size: int = 1
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Check every size."""
        for field in fields(self):
            _check_size(field.name, getattr(self, field.name))
        room = self.data_parallel_size * self.context_parallel_size
        if room % self.expert_parallel_size:
            shared = math.gcd(room, self.expert_parallel_size)
            replicas = self.data_parallel_size * self.expert_parallel_size // shared
            raise LayoutError(
                f"experts are sharded over dp*cp = {self.data_parallel_size}*{self.context_parallel_size} = {room}"
                f" ranks, which expert_parallel_size={self.expert_parallel_size} does not divide; set"
                f" expert_parallel_size={shared}, or data_parallel_size={replicas} (dp={replicas})",
                entry="expert-size",
            )
        smaller, larger = sorted((self.data_shard_size, self.expert_replicas))
        if larger % smaller:
            raise LayoutError(
                f"shards of {self.data_shard_size} replicas and experts over {self.expert_replicas} of them"
                f" (expert_parallel_size={self.expert_parallel_size}) do not fit: neither number is a multiple of the"
                f" other; set expert_parallel_size={math.gcd(smaller, larger) * self.expert_contexts}",
                entry="expert-shards",
            )

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        pipeline_parallel_size: int,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        data_shard_size: int | Literal["all"] = 1,
        expert_parallel_size: int = 1,
    ) -> ParallelLayout:
        """Make the layout that fills a world of `world_size` ranks.

        Args:
            world_size: number of ranks.
            pipeline_parallel_size: ranks on the pipeline axis.
            data_parallel_size: ranks that receive different batches (replicate x shard); "auto" uses all remaining.
            tensor_parallel_size: ranks on the tensor axis.
            context_parallel_size: ranks on the context axis.
            data_shard_size: number of data-parallel ranks that shard one copy, the rest replicate; or "all".
            expert_parallel_size: ranks over which the experts are sharded.

        Raises:
            LayoutError: the sizes do not multiply to `world_size`; the message says what to set instead.
        """
        _check_size("world_size", world_size)
        sizes = {
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
            "context_parallel_size": context_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
        }
        for name, size in sizes.items():
            if name != "data_parallel_size" or size != "auto":
                _check_size(name, size)
        if data_shard_size != "all":
            _check_size("data_shard_size", data_shard_size)

        data_parallel_size = _resolve_data_parallel({n: s for n, s in sizes.items() if isinstance(s, int)}, world_size)
        if data_shard_size == "all":
            data_shard_size = data_parallel_size
        if data_parallel_size % data_shard_size:
            raise LayoutError(
                f"shard_size={data_shard_size} does not divide data_parallel_size={data_parallel_size}; "
                f"set shard_size={math.gcd(data_parallel_size, data_shard_size)}",
                entry="shard-size",
            )
        return cls(
            pipeline_parallel_size=pipeline_parallel_size,
            data_replicate_size=data_parallel_size // data_shard_size,
            data_shard_size=data_shard_size,
            context_parallel_size=context_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            expert_parallel_size=expert_parallel_size,
        )

    @property
    def shards_layers(self) -> bool:
        """Whether layers are sharded: over tensor ranks, or over context ranks along the sequence."""
        return self.tensor_parallel_size > 1 or self.context_parallel_size > 1

    @property
    def joins_replicas(self) -> bool:
        """Whether ranks with different batches meet inside of a step, to exchange rows of experts that they share."""
        return self.expert_parallel_size > 1

    @property
    def shards_replicas(self) -> bool:
        """Whether ranks with different batches hold different parameters."""
        return self.data_shard_size > 1 or self.joins_replicas

    @property
    def replicas_of_copy(self) -> int:
        """Number of ranks with different batches that hold one copy of the parameters between them."""
        return max(self.data_shard_size, self.expert_replicas)

    def option(self, axis: str) -> str:
        """The option that sets the size of an axis, as in "expert_parallel_size=2"."""
        return f"{SIZE_OPTIONS[axis]}={self.by_axis[axis]}"

    @property
    def by_axis(self) -> dict[str, int]:
        """The size of each axis, and of the view "ep"."""
        return {**dict(zip(AXES, self.sizes, strict=True)), "ep": self.expert_parallel_size}

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The size of each axis, in the order of `AXES`."""
        return (
            self.pipeline_parallel_size,
            self.data_replicate_size,
            self.data_shard_size,
            self.context_parallel_size,
            self.tensor_parallel_size,
        )

    @property
    def data_parallel_size(self) -> int:
        """The number of different batches per step: replicate x shard."""
        return self.data_replicate_size * self.data_shard_size

    @property
    def expert_contexts(self) -> int:
        """Number of context ranks among the ranks that shard one set of experts: as many as possible."""
        return math.gcd(self.context_parallel_size, self.expert_parallel_size)

    @property
    def expert_replicas(self) -> int:
        """Number of ranks with different batches among the ranks that shard one set of experts."""
        return self.expert_parallel_size // self.expert_contexts

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a global rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is not in a world of {self.world_size} ranks (0 to {self.world_size - 1})",
                entry="rank-range",
            )
        indices = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            indices.append(index)
        return Coordinates(*reversed(indices))

    def data_rank(self, rank: int) -> int:
        """The index of the rank's batch among the batches of a step: 0 to `data_parallel_size` - 1."""
        place = self.coordinates(rank)
        return place.dp_replicate * self.data_shard_size + place.dp_shard


def _resolve_data_parallel(fixed_sizes: Mapping[str, int], world_size: int) -> int:
    """The data-parallel size: the fixed one, or as many ranks as the others leave of the world."""
    needed = math.prod(fixed_sizes.values())
    automatic = "data_parallel_size" not in fixed_sizes
    if world_size % needed or not (automatic or needed == world_size):
        raise LayoutError(_mismatch_message(fixed_sizes, world_size), entry="world-size")
    return world_size // needed if automatic else fixed_sizes["data_parallel_size"]


def is_count(value: object) -> bool:
    """Whether a value is a whole number of 1 or more; True is an int to Python, and here always a mistake."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_size(name: str, size: object) -> None:
    if not is_count(size):
        raise LayoutError(
            f"{name} must be an int >= 1 but is {size!r}; set {name}=1 to leave it unused", entry="size-type"
        )


def _mismatch_message(fixed_sizes: Mapping[str, int], world_size: int) -> str:
    """Say which number of ranks the sizes need, and which single change makes them fit the world."""
    needed = math.prod(fixed_sizes.values())
    factors = [f"{name}={size}" for name, size in fixed_sizes.items() if size > 1]
    product = " * ".join(factors) + (f" = {needed}" if len(factors) > 1 else "")
    automatic = "data_parallel_size" not in fixed_sizes
    amount = "a multiple of " if automatic else ""
    fewer = world_size // needed * needed if automatic else 0
    devices = fewer + needed
    advice = [f"devices={fewer} or {devices}" if fewer else f"devices={devices}"]
    # Ranks left over: more data parallelism is free. Too few ranks: first shrink the axis that communicates most.
    order = ["tensor_parallel_size", "data_parallel_size", "context_parallel_size", "pipeline_parallel_size"]
    if needed < world_size:
        order.sort(key="data_parallel_size".__ne__)
    for name in order:
        if name not in fixed_sizes or (needed > world_size and fixed_sizes[name] == 1):
            continue
        room, remainder = divmod(world_size, needed // fixed_sizes[name])
        if automatic:
            if not remainder:
                advice.insert(0, f"{name}={_nearest_divisors(room, fixed_sizes[name])}")
                break
        elif room >= 1 and not remainder:
            advice.insert(0, f"{name}={room}")
            break
    return f"layout needs {amount}{product} ranks but the world has {world_size}; set {', or '.join(advice)}"


def _nearest_divisors(number: int, size: int) -> str:
    """The next lower and the next higher divisor of a number, as text."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    near = [*[each for each in divisors if each < size][-1:], *[each for each in divisors if each > size][:1]]
    return " or ".join(map(str, near))
