"""What `microbatch="auto"` costs on two CPU ranks: the message of a step, and a guarded collective.

    python benchmarks/memory_guard.py

CPU time and wall time of each, medians of seven rounds in turns. Nothing must be reached.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.run.execution.guard import MemoryGuard

ROUNDS, TIMES = 7, 100


def microseconds(call: Callable[[], object]) -> tuple[float, float]:
    """CPU time and wall time of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(TIMES):
        call()
    return (time.process_time() - cpu) / TIMES * 1e6, (time.perf_counter() - wall) / TIMES * 1e6


def measure(rank: int, port: int) -> None:
    """Measure on one rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = Mesh.build(ParallelLayout(data_replicate_size=2), "cpu")
    world: Any = SimpleNamespace(mesh=mesh, timeout=timedelta(minutes=1), any_failed=lambda: False)
    guard, tensor = MemoryGuard(world), torch.ones(1000)
    guard.largest(1.0)
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        found.setdefault("message of a step", []).append(microseconds(lambda: guard.largest(1.0)))
        found.setdefault("all-reduce", []).append(microseconds(lambda: dist.all_reduce(tensor)))
        guarded = guard.run(lambda: microseconds(lambda: dist.all_reduce(tensor)))
        found.setdefault("guarded all-reduce", []).append(guarded)
    for name, times in found.items() if rank == 0 else ():
        cpu, wall = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{name:20} {cpu:6.0f} us CPU {wall:6.0f} us wall")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    mp.spawn(measure, (number,), nprocs=2)
