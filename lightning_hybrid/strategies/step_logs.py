"""Log once per step what its microbatches and replicas logged: the same number on every rank."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import lightning.pytorch as pl
import torch

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.exchange import RanksDisagree
from lightning_hybrid.pipeline.logs import Entry


def log_for_all(module: pl.LightningModule, logged: Sequence[tuple[Entry, float]], mesh: Mesh) -> None:
    """Reduce logged values over the replicas, as each entry's ``reduce_fx`` says, and log them on this rank.

    Lightning leaves that to ``sync_dist=True``; without it every replica would show, and monitor, its own number.

    Raises:
        RanksDisagree: The replicas log different keys.
    """
    values = [value for _, value in logged]
    if mesh.size("data") > 1 and logged:
        values = _over_replicas(logged, mesh)
    for (entry, _), value in zip(logged, values, strict=True):
        kwargs = {**entry.total_kwargs(), "sync_dist": False}
        if entry.metric is None:
            module.log(entry.name, torch.tensor(value, dtype=entry.dtype, device=module.device), **kwargs)
            continue
        known = not math.isnan(value)
        cache = torch.tensor(value, device=module.device) if known else None
        entry.metric._forward_cache = cache  # type: ignore[assignment]
        module.log(entry.name, entry.metric, **kwargs)


def _over_replicas(logged: Sequence[tuple[Entry, float]], mesh: Mesh) -> list[float]:
    """One collective for means and sums, one more where a maximum or minimum is logged."""
    count = mesh.size("data")
    names = float(zlib.crc32("|".join(entry.name for entry, _ in logged).encode()))
    device = mesh.device_mesh.device_type
    values = [value for _, value in logged]
    # As many numbers whatever is logged, so that replicas that log different keys meet, and find out.
    size = 64 * math.ceil((len(values) + 1) / 64)
    row = torch.zeros(size, dtype=torch.float64, device=device)
    row[: len(values) + 1] = torch.tensor([names, *values], dtype=torch.float64)
    sums = mesh.all_reduce(row, "data").tolist()
    if sums[0] != names * count:
        raise RanksDisagree(f"replicas log different keys; this one logs {[entry.name for entry, _ in logged]}")
    hows = [entry.how for entry, _ in logged]
    result = [total if how == "sum" else total / count for how, total in zip(hows, sums[1:], strict=False)]
    if "max" in hows or "min" in hows:
        signs = [-1.0 if how == "min" else 1.0 for how in hows]
        signed = torch.tensor([s * v for s, v in zip(signs, values, strict=True)], dtype=torch.float64, device=device)
        largest = mesh.all_reduce(signed, "data", "max").tolist()
        result = [
            sign * best if how in ("max", "min") else value
            for how, sign, best, value in zip(hows, signs, largest, result, strict=True)
        ]
    return result
