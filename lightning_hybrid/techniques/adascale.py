"""AdaScale and GoodputMonitor observe gradients before and after their average over replicas, or are refused."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.callbacks.adascale import GradientNoise
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.techniques.reducers import Reducers
from lightning_hybrid.techniques.technique import Active


def connect_adascale(
    trainer: Any,
    mesh: Mesh,
    counted: tuple[set[int], set[int]],
    reducers: Reducers,
    active: Active,
) -> None:
    """Let AdaScale or GoodputMonitor observe gradients before and after their average.

    ``counted`` has the ids of the parameters whose gradients this rank counts before the average, and after it.
    """
    observers = [callback for callback in trainer.callbacks if isinstance(callback, GradientNoise)]
    if len(observers) > 1:
        names = " and ".join(type(observer).__name__ for observer in observers)
        raise ValueError(f"{names} would both observe the gradients before their average; leave one of them out")
    for observer in observers:
        observer.connect_mesh(mesh, counted, each_batch=active.reduces_gradients)
        for reducer in reducers.every:
            reducer.observe(observer)
        for group in active.groups:
            group.observe(observer)


def has_adascale(trainer: Any) -> bool:
    """Whether a callback of the user observes gradients before their average: AdaScale or GoodputMonitor."""
    return any(isinstance(callback, GradientNoise) for callback in trainer.callbacks)


def check_adascale(layout: ParallelLayout, parts: LocalShards) -> None:
    """Refuse AdaScale and GoodputMonitor where they cannot observe gradients before and after their average, each once.

    Raises:
        ValueError: They cannot.
    """
    if layout.joins_replicas:
        raise ValueError(
            "AdaScale and GoodputMonitor compare the gradients of replicas, and those of experts are summed over"
            f" {layout.option('ep')} of them before any replica has them; set"
            " expert_parallel_size=1"
        )
    if parts.has_repeated_shards:
        raise ValueError(
            "AdaScale and GoodputMonitor cannot count gradients of which several of the"
            f" {layout.tensor_parallel_size} tensor ranks hold the same shard (fewer key heads than ranks); set a"
            " smaller tensor_parallel_size"
        )
