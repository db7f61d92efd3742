"""Log once per step what its microbatches and replicas logged: the same number on every rank."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.exchange import RanksDisagree
from lightning_hybrid.pipeline.logs import Entry


def ask_for_no_sync() -> None:
    """Silence Lightning's advice to say ``sync_dist=True``: what steps log is the same on every rank already."""
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")


def log_for_all(module: pl.LightningModule, logged: Sequence[tuple[Entry, float]], mesh: Mesh) -> None:
    """Reduce logged values over the replicas, as each entry's ``reduce_fx`` says, and log them on this rank.

    Lightning leaves that to ``sync_dist=True``; without it every replica would show, and monitor, its own number.

    Raises:
        RanksDisagree: The replicas log different keys.
    """
    begin_logs(module, logged, mesh)()


def begin_logs(module: pl.LightningModule, logged: Sequence[tuple[Entry, float]], mesh: Mesh) -> Callable[[], None]:
    """Start what ``log_for_all`` does, and return what finishes it: a backward in between hides the reduction."""
    values = [value for _, value in logged]
    reduced = _over_replicas(logged, mesh) if mesh.size("data") > 1 and logged else lambda: values

    def finish() -> None:
        for (entry, _), value in zip(logged, reduced(), strict=True):
            kwargs = {**entry.total_kwargs(), "sync_dist": False}
            if entry.metric is None:
                module.log(entry.name, torch.tensor(value, dtype=entry.dtype, device=module.device), **kwargs)
                continue
            cache = None if math.isnan(value) else torch.tensor(value, device=module.device)
            entry.metric._forward_cache = cache  # type: ignore[assignment]
            module.log(entry.name, entry.metric, **kwargs)

    return finish


def _over_replicas(logged: Sequence[tuple[Entry, float]], mesh: Mesh) -> Callable[[], list[float]]:
    """One collective for means and sums, one more where a maximum or minimum is logged; returns what waits."""
    count, group = mesh.size("data"), mesh.group("data")
    names = float(zlib.crc32("|".join(entry.name for entry, _ in logged).encode()))
    device = mesh.device_mesh.device_type
    values = [value for _, value in logged]
    # As many numbers whatever is logged, so that replicas that log different keys meet, and find out.
    row = torch.zeros(64 * math.ceil((len(values) + 1) / 64), dtype=torch.float64)
    row[: len(values) + 1] = torch.tensor([names, *values], dtype=torch.float64)
    row = row.to(device)
    works = [dist.all_reduce(row, group=group, async_op=True)]
    hows = [entry.how for entry, _ in logged]
    signs = [-1.0 if how == "min" else 1.0 for how in hows]
    signed = torch.tensor([sign * value for sign, value in zip(signs, values, strict=True)], dtype=torch.float64)
    signed = signed.to(device)
    if "max" in hows or "min" in hows:
        works.append(dist.all_reduce(signed, dist.ReduceOp.MAX, group=group, async_op=True))

    def wait() -> list[float]:
        for work in works:
            work.wait()
        found, *sums = row.tolist()
        if found != names * count:
            raise RanksDisagree(f"replicas log different keys; this one logs {[entry.name for entry, _ in logged]}")
        reduced = {"sum": sums, "max": signed.tolist(), "min": [-largest for largest in signed.tolist()]}
        means = [total / count for total in sums]
        return [reduced.get(how, means)[place] for place, how in enumerate(hows)]

    return wait
