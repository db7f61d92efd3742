"""Evaluation over replicas that uses each sample once, with different numbers of batches per replica.

No step may wait for another replica, then: the last batch of one may have no counterpart on the others. So logged
values are kept per replica, and reduced once, when all replicas have reached the end of a loader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid.collectives.arrivals import store_of_run, wait_until
from lightning_hybrid.collectives.forbidden import collectives_forbidden
from lightning_hybrid.errors import RanksDisagree
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around, ignore_warnings, reduced_as, replace, switch_class

_EVALUATION = (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING)
_STEPS = ("validation_step", "test_step")
_RESULTS = "_joint_results"  # attribute of a loop
_REASON = "each sample is evaluated once"


def evaluate_each_sample_once(trainer: Any, world: Any) -> Callable[[], None]:
    """Evaluate every sample once in the trainer's validation and test, for any number of replicas; return the undo."""
    mesh = world.mesh
    if mesh.size("data") == 1:
        return lambda: None
    connector = trainer._data_connector
    undo = contextlib.ExitStack()
    # Lightning's advice to evaluate on one device is about samples that are repeated.
    undo.callback(ignore_warnings("Using `DistributedSampler` with the dataloaders.*", reason=_REASON))
    undo.callback(around(connector, "_resolve_sampler", partial(_replica_sampler, undo), reason=_REASON))
    arrivals = _LoaderProgress(world)
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        joint = _LoopResults(trainer, loop, world, arrivals)
        undo.callback(replace(loop, "_store_dataloader_outputs", joint.store, reason=_REASON))
        undo.callback(around(loop, "on_run_end", joint.end, reason=_REASON))
        undo.callback(around(loop, "on_run_start", joint.begin, reason=_REASON))
        undo.callback(replace(loop, _RESULTS, joint, reason=_REASON))
    return undo.close


def have_equal_batches(loop: Any) -> bool:
    """Whether all replicas have as many batches of each loader of a loop that has begun."""
    joint: _LoopResults | None = vars(loop).get(_RESULTS)
    return joint is not None and joint.has_equal_counts


def forbid_unmatched_collectives(trainer: Any, mesh: Mesh, step: str) -> AbstractContextManager[None]:
    """Allow collectives over replicas in a step only in batches that all replicas have: others would wait for ever.

    Raises:
        RanksDisagree: Inside, where the step communicates in a batch that some replicas do not have.
    """
    loop = trainer._active_loop
    joint: _LoopResults | None = vars(loop).get(_RESULTS)
    if joint is None or not joint.counts or not loop._is_sequential:  # steps are recorded before a loop has loaders
        return nullcontext()
    loader, batch = loop._results.dataloader_idx or 0, joint.batches_read - 1
    if any(loader >= len(each) for each in joint.counts):
        return nullcontext()
    counts = [each[loader] for each in joint.counts]
    if batch < min(counts) and math.inf not in counts:
        return nullcontext()

    def refusal(called: str) -> RanksDisagree | None:
        known = joint.meet(loader, batch) if math.inf in counts else counts
        if batch < min(known):
            return None
        batches = [has if has < math.inf else "more" for has in known]
        return RanksDisagree(
            f"{step} communicates with other replicas ({called}) while batch {batch} of loader {loader} is evaluated,"
            f" but the replicas have {batches} batches, as each sample is evaluated once: those without this batch"
            " would be waited for; log with self.log or a torchmetrics object, which are joined at the end, gather in"
            " on_validation_epoch_end, or give every replica as many batches",
            entry="eval-collective",
        )

    world = dist.group.WORLD
    assert world is not None
    return collectives_forbidden(refusal, [mesh.group("data"), world])


class _UserBatchSampler(BatchSampler):
    """A batch sampler that the user built: of torch's own class Lightning would keep only the inner sampler."""

    __reduce_ex__ = reduced_as(BatchSampler)


def _replica_sampler(
    undo: contextlib.ExitStack, resolve: Callable[..., Any], dataloader: DataLoader[Any], *args: Any, **kw: Any
) -> Any:
    """Lightning's sampler, which in validation and test repeats no sample to make the replicas even.

    Raises:
        ValueError: There are fewer samples than replicas.
    """
    sampler = resolve(dataloader, *args, **kw)
    mode = kw.get("mode")
    if dataloader.batch_size is None and type(dataloader.batch_sampler) is BatchSampler:
        undo.callback(switch_class(dataloader.batch_sampler, _UserBatchSampler, reason="the user built it"))
    if sampler is dataloader.sampler or not isinstance(sampler, DistributedSampler) or mode not in _EVALUATION:
        return sampler
    samples: int = len(sampler.dataset)  # type: ignore[arg-type]
    if 0 < samples < sampler.num_replicas:
        raise ValueError(
            f"a {mode.dataloader_prefix} loader has {samples} samples (or batches, where its sampler draws those) for"
            f" {sampler.num_replicas} replicas, each of which needs one of its own; use more samples, or fewer replicas"
        )
    sampler.total_size = samples
    sampler.num_samples = len(range(sampler.rank, samples, sampler.num_replicas))
    return sampler


@dataclasses.dataclass(frozen=True)
class _ReplicaLog:
    """Values that the steps of one replica logged under one key."""

    meta: dict[str, Any]  # Lightning's description of the key, without what refers to this process
    value: torch.Tensor | None  # the sum, maximum or minimum so far; None for a Metric object, which syncs itself
    weight: torch.Tensor | None  # sum of the batch sizes, for means


class _LoopResults:
    """The results of one evaluation loop, reduced over the replicas loader by loader."""

    def __init__(self, trainer: Any, loop: Any, world: Any, arrivals: _LoaderProgress) -> None:
        self._trainer, self._loop, self._world, self._mesh = trainer, loop, world, world.mesh
        self._arrivals, self._read_before = arrivals, 0
        self._store_own = loop._store_dataloader_outputs  # Lightning's
        self._last_meeting: tuple[int, int] | None = None  # loader and batch at which all replicas were last
        self.counts: list[list[float]] = []  # batches that each replica has, by loader; inf where that is not known

    def begin(self, original: Callable[[], None]) -> None:
        """Before Lightning's own: say how many batches there are."""
        loaders = zip(self._loop._combined_loader.flattened, self._loop.max_batches, strict=True)
        local_counts = [math.inf if sized_len(loader) is None else batches for loader, batches in loaders]
        self.counts = [[] for _ in range(self._mesh.size("data"))]
        dist.all_gather_object(self.counts, local_counts, group=self._mesh.group("data"))
        self._arrivals.begin()
        self._last_meeting = None
        self._read_before = self._loop.batch_progress.current.ready
        original()

    @property
    def has_equal_counts(self) -> bool:
        """Whether replicas have as many batches; the length of an iterable dataset may be wrong."""
        is_exact = not any(map(has_iterable_dataset, self._loop._combined_loader.flattened))
        return is_exact and all(each == self.counts[0] and math.inf not in each for each in self.counts)

    @property
    def batches_read(self) -> int:
        """Batches read of the present loader; Lightning counts the batches of all loaders together."""
        read: int = self._loop.batch_progress.current.ready - self._read_before
        return read

    def meet(self, loader: int, batch: int) -> list[float]:
        """Wait until each replica has reached a batch, or the end of its loader; return their numbers of batches."""
        counts = [each[loader] for each in self.counts]
        if self._last_meeting != (loader, batch):  # a batch may ask several times, and in several microbatches
            counts = self._arrivals.meet(loader, batch, counts)
            for each, count in zip(self.counts, counts, strict=True):
                each[loader] = count
            self._last_meeting = loader, batch
        return counts

    def store(self) -> None:
        """Replaces Lightning's own method, which computes what a loader's steps logged once it has been read."""
        read, self._read_before = self.batches_read, self._loop.batch_progress.current.ready
        self._store_up_to(self._loop._results.dataloader_idx or 0, read)

    def end(self, original: Callable[[], Any]) -> Any:
        """Before Lightning's own."""
        self._store_up_to(self._loop.num_dataloaders - 1 if self._loop._is_sequential else 0, 0)
        return original()

    def _store_up_to(self, loader: int, read: int) -> None:
        """Reduce the results of loaders, also empty ones of this replica, which Lightning skips and others wait for."""
        results, many = self._loop._results, self._loop._is_sequential and self._loop.num_dataloaders > 1
        for index in range(len(self._loop._logged_outputs), loader + 1):
            if any(each[index] == math.inf for each in self.counts):
                self._arrivals.end(index, read if index == loader else 0)
            results.dataloader_idx = index if many else None
            self._reduce(index)
            self._store_own()

    def _reduce(self, loader: int) -> None:
        """Reduce the logged values over the replicas.

        Raises:
            RanksDisagree: Metric objects are logged by some replicas only.
        """
        results = self._loop._results
        self._world.progress.passes(in_all_replicas=True)  # a rank that waits in a hook of a batch waits for none
        local_logs = {k: _replica_log(m) for k, m in results.valid_items() if m.meta.fx.split(".")[0] in _STEPS}
        all_logs: list[dict[str, _ReplicaLog]] = [{} for _ in range(self._mesh.size("data"))]
        dist.all_gather_object(all_logs, local_logs, group=self._mesh.group("data"))
        objects = [[key for key, entry in logs.items() if entry.value is None] for logs in all_logs]
        if any(names != objects[0] for names in objects):
            raise RanksDisagree(
                f"replicas log different metric objects for loader {loader} of {self._loop._stage.value}: {objects};"
                " log the same ones on every rank, and give every replica a batch",
                entry="eval-metrics",
            )
        for key in dict.fromkeys(key for logs in all_logs for key in logs):
            logged = [logs[key] for logs in all_logs if key in logs]
            if logged[0].value is None:
                continue
            if key not in results:
                results[key] = self._new_metric(logged[0])
            _set_reduced(results[key], logged)

    def _new_metric(self, entry: _ReplicaLog) -> _ResultMetric:
        """Make the result of a key that the steps of this replica did not log."""
        meta = _Metadata(**entry.meta)
        meta.sync = _Sync(fn=self._trainer.strategy.reduce)
        return _ResultMetric(meta, is_tensor=True).to(self._trainer.strategy.root_device)


class _LoaderProgress:
    """Progress of replicas in loaders of unknown length, published in the store by which they met.

    No replica waits for it except in a step that is about to communicate with the others.
    """

    def __init__(self, world: Any) -> None:
        self._mesh, self._is_over, self._seconds = world.mesh, world.any_failed, world.timeout.total_seconds()
        self._store = store_of_run("evaluated", world.mesh.rank)
        self._evaluation = 0

    def begin(self) -> None:
        """Begin an evaluation, on all replicas."""
        self._evaluation += 1

    def end(self, loader: int, count: int) -> None:
        """Publish that this replica has read a loader to its end."""
        self._publish(f"end-{loader}", count)

    def meet(self, loader: int, batch: int, counts: Sequence[float]) -> list[float]:
        """Wait until each replica has reached a batch of a loader, or its end; return their numbers of batches."""
        self._publish(f"at-{loader}", batch)
        known = list(counts)
        ranks = dist.get_process_group_ranks(self._mesh.group("data"))

        def has_come(position: int) -> bool:
            end = self._published(f"end-{loader}", ranks[position])
            known[position] = math.inf if end < 0 else end
            return end >= 0 or self._published(f"at-{loader}", ranks[position]) >= batch

        unknown = [position for position, count in enumerate(counts) if count == math.inf]
        wait_until(lambda: all(map(has_come, unknown)), self._seconds, self._is_over)
        return known

    def _publish(self, what: str, number: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            self._store.set(f"{what}-{self._mesh.rank}", f"{self._evaluation} {number}")

    def _published(self, what: str, rank: int) -> int:
        """Return the number that a rank has published in this evaluation; -1 if it has not."""
        key = f"{what}-{rank}"
        if not self._store.check([key]):
            return -1
        evaluation, number = map(int, self._store.get(key).split())
        return number if evaluation == self._evaluation else -1


def _replica_log(metric: _ResultMetric) -> _ReplicaLog:
    names = [field.name for field in dataclasses.fields(metric.meta) if field.name != "_sync"]
    meta = {name: getattr(metric.meta, name) for name in names}
    if not metric.is_tensor:
        return _ReplicaLog(meta, None, None)
    weight = metric.cumulated_batch_size.cpu() if metric.meta.is_mean_reduction else None
    return _ReplicaLog(meta, metric.value.detach().cpu(), weight)


def _set_reduced(metric: _ResultMetric, logs: list[_ReplicaLog]) -> None:
    device = metric.value.device
    values = torch.stack([entry.value.double() for entry in logs if entry.value is not None])
    dtype = max((entry.value.dtype for entry in logs if entry.value is not None), key=lambda dtype: dtype.itemsize)
    joined = {"max": values.max(), "min": values.min()}.get(metric.meta.reduce_fx.__name__, values.sum())
    metric.value = joined.to(device=device, dtype=dtype)
    if metric.meta.is_mean_reduction:
        metric.cumulated_batch_size = torch.stack([p.weight for p in logs if p.weight is not None]).sum().to(device)
    metric.has_reset, metric._computed = False, None
    metric._update_count = max(metric._update_count, 1)
