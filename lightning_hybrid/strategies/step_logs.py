"""Log once per step what its microbatches and replicas logged: the same number on every rank."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.exchange import RanksDisagree
from lightning_hybrid.pipeline.logs import Entry
from lightning_hybrid.same_host.rows import begin_to_gather


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


def log_for_replica(module: pl.LightningModule, logged: Sequence[tuple[Entry, float]], mesh: Mesh) -> None:
    """Log values of this replica; in validation and test they are reduced at the end of a loader.

    Raises:
        RanksDisagree: The ranks of the replica log different keys.
    """
    _begin_to_compare_copies(logged, mesh)()
    _log_each(module, logged)


def _log_each(module: pl.LightningModule, logged: Sequence[tuple[Entry, float]]) -> None:
    for entry, value in logged:
        _log(module, entry, value, entry.total_kwargs())


def begin_logs(
    module: pl.LightningModule, logged: Sequence[tuple[Entry, float]], mesh: Mesh, *, skipped: bool = False
) -> Callable[[], None]:
    """Start what ``log_for_all`` does, and return what finishes it: a backward in between hides the reduction.

    Args:
        module: The user's.
        logged: What this replica logged, with its values.
        mesh: The ranks.
        skipped: Whether this replica's step returned no loss, which all replicas must do alike.
    """
    compare = _begin_to_compare_copies(logged, mesh)
    if mesh.size("data") == 1:

        def finish_alone() -> None:
            compare()
            _log_each(module, logged)

        return finish_alone
    sizes = [_batch_size(module, entry) for entry, _ in logged]
    reduced = _over_replicas(logged, sizes, mesh, skipped=skipped)

    def finish() -> None:
        compare()
        values, totals = reduced()
        for (entry, _), value, size, total in zip(logged, values, sizes, totals, strict=True):
            known = {} if size is None else {"batch_size": round(total)}
            _log(module, entry, value, {**entry.total_kwargs(), **known})

    return finish


def _begin_to_compare_copies(logged: Sequence[tuple[Entry, float]], mesh: Mesh) -> Callable[[], None]:
    """Start to compare the logged keys of ranks that compute the same numbers; returns what waits for the outcome.

    A pipeline compares its own when it exchanges what was logged.
    """
    axes = [axis for axis in ("cp", "tp") if mesh.size(axis) > 1]
    if not axes:
        return lambda: None
    digest = float(_digest(logged))
    mine = torch.tensor([digest], dtype=torch.float64, device=mesh.device_mesh.device_type)
    gathered = {axis: begin_to_gather(mine, mesh.group(axis)) for axis in axes}

    def wait() -> None:
        for axis, rows in gathered.items():
            if any(row.item() != digest for row in rows()):
                raise RanksDisagree(
                    f"the {mesh.size(axis)} {_NAMES[axis]} ranks of one replica log different keys; this one logs"
                    f" {[entry.name for entry, _ in logged]}. They compute the same numbers: log the same keys on every"
                    " rank (without `if trainer.is_global_zero:` around the call)"
                )

    return wait


_NAMES = {"cp": "context", "tp": "tensor"}


def _digest(logged: Sequence[tuple[Entry, float]]) -> int:
    return zlib.crc32("|".join(entry.name for entry, _ in logged).encode())


def _log(module: pl.LightningModule, entry: Entry, value: float, kwargs: dict[str, Any]) -> None:
    kwargs = {**kwargs, "sync_dist": False}
    if not entry.is_number:
        module.log(entry.name, entry.other, **kwargs)
        return
    if entry.metric is None:
        module.log(entry.name, torch.tensor(value, dtype=entry.dtype, device=module.device), **kwargs)
        return
    cache = None if math.isnan(value) else torch.tensor(value, device=module.device)
    entry.metric._forward_cache = cache  # type: ignore[assignment]
    module.log(entry.name, entry.metric, **kwargs)


def _batch_size(module: pl.LightningModule, entry: Entry) -> int | None:
    """By what Lightning weights this replica's value in the mean over the epoch; None if it takes none."""
    given: int | None = entry.total_kwargs().get("batch_size")
    results = module.trainer._results
    if given is not None or results is None or entry.metric is not None:
        return given
    # In training on_epoch is off unless it is asked for.
    if entry.how != "mean" or not entry.kwargs.get("on_epoch") or results.batch is None:
        return None
    return extract_batch_size(results.batch) if results.batch_size is None else results.batch_size


def _over_replicas(
    logged: Sequence[tuple[Entry, float]], sizes: Sequence[int | None], mesh: Mesh, *, skipped: bool
) -> Callable[[], tuple[list[float], list[float]]]:
    """One collective for means and sums, one more for maxima and minima; returns what waits for values and sizes."""
    count, group = mesh.size("data"), mesh.group("data")
    names = float(_digest(logged))
    device = mesh.device_mesh.device_type
    values = [value for _, value in logged]
    # As many numbers whatever is logged, so that replicas that log different keys meet, and find out.
    numbers = [float(skipped), names, *values, *(size or 0 for size in sizes)]
    row = torch.zeros(128 * math.ceil(len(numbers) / 128), dtype=torch.float64)
    row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    row = row.to(device)
    works = [dist.all_reduce(row, group=group, async_op=True)]
    hows = [entry.how for entry, _ in logged]
    signs = [-1.0 if how == "min" else 1.0 for how in hows]
    signed = torch.tensor([sign * value for sign, value in zip(signs, values, strict=True)], dtype=torch.float64)
    signed = signed.to(device)
    if "max" in hows or "min" in hows:
        works.append(dist.all_reduce(signed, dist.ReduceOp.MAX, group=group, async_op=True))

    def wait() -> tuple[list[float], list[float]]:
        for work in works:
            work.wait()
        num_skipped, found, *sums = row.tolist()
        if num_skipped not in (0, count):
            raise RanksDisagree(
                f"training_step returned None on {num_skipped:.0f} of {count} replicas, this one"
                f" {'included' if skipped else 'not among them'}; a step is skipped by all replicas or by none: return"
                " a loss of zero that depends on the model (0.0 * output.sum()) instead"
            )
        if found != names * count:
            raise RanksDisagree(
                f"replicas log different keys; this one logs {[entry.name for entry, _ in logged]}. Log the same keys"
                " on every rank and for every batch: values are reduced over the replicas for you"
            )
        totals = sums[len(values) : 2 * len(values)]
        reduced = {"sum": sums, "max": signed.tolist(), "min": [-largest for largest in signed.tolist()]}
        means = [total / count for total in sums]
        return [reduced.get(how, means)[place] for place, how in enumerate(hows)], totals

    return wait
