"""Evaluation over replicas that sees each sample once, with different numbers of batches.

No step may wait for another replica, then: the last batch of one may be no batch of the others. So what steps log is
kept per replica, and reduced once, when all of them have come to the end of a loader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid.collectives.rank_agreement import RanksDisagree
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import around, reduced_as, replace
from lightning_hybrid.replicate.forbid_communication import collectives_forbidden
from lightning_hybrid.strategies.world.rendezvous import pauses

_EVALUATION = (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING)
_STEPS = ("validation_step", "test_step")
_JOINT = "_joint_results"  # attribute of a loop
_REASON = "each sample is evaluated once"


def evaluate_each_sample_once(trainer: Any, mesh: Mesh, is_over: Callable[[], bool]) -> Callable[[], None]:
    """Let the trainer's validation and test see every sample once, whatever the number of replicas.

    Args:
        trainer: About to set up its loops.
        mesh: The ranks.
        is_over: Whether a rank has failed; then nobody is waited for.

    Returns:
        What undoes it.
    """
    if mesh.size("data") == 1:
        return lambda: None
    # Lightning's advice to evaluate on one device is about samples that are repeated.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders.*")
    connector = trainer._data_connector
    undo = contextlib.ExitStack()
    undo.callback(around(connector, "_resolve_sampler", _sampler_of_replica, reason=_REASON))
    arrivals = _Arrivals(mesh, is_over)
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        joint = _JointResults(trainer, loop, mesh, arrivals)
        undo.callback(replace(loop, "_store_dataloader_outputs", joint.store, reason=_REASON))
        undo.callback(around(loop, "on_run_end", joint.end, reason=_REASON))
        undo.callback(around(loop, "on_run_start", joint.begin, reason=_REASON))
        undo.callback(replace(loop, _JOINT, joint, reason=_REASON))
    return undo.close


def asked_in_common_batches(trainer: Any, mesh: Mesh, step: str) -> AbstractContextManager[None]:
    """Where a step may ask other replicas: in batches that all of them have; in another one nobody would answer.

    Args:
        trainer: That runs a step of validation or test.
        mesh: The ranks.
        step: Name of the step, for the message.

    Raises:
        RanksDisagree: Inside, where the step communicates in a batch that some replicas do not have.
    """
    loop = trainer._active_loop
    joint: _JointResults | None = vars(loop).get(_JOINT)
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
            " on_validation_epoch_end, or give every replica as many batches"
        )

    world = dist.group.WORLD
    assert world is not None
    return collectives_forbidden(refusal, [mesh.group("data"), world])


class _KeptBatchSampler(BatchSampler):
    """A batch sampler that the user built: of torch's own class Lightning would take the sampler alone."""

    __reduce_ex__ = reduced_as(BatchSampler)


def _sampler_of_replica(resolve: Callable[..., Any], dataloader: DataLoader[Any], *args: Any, **kw: Any) -> Any:
    """Lightning's sampler, which in validation and test deals no sample twice to make the replicas even.

    Raises:
        ValueError: There are fewer samples than replicas.
    """
    sampler = resolve(dataloader, *args, **kw)
    mode = kw.get("mode")
    if dataloader.batch_size is None and type(dataloader.batch_sampler) is BatchSampler:
        dataloader.batch_sampler.__class__ = _KeptBatchSampler
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
class _Part:
    """What the steps of one replica logged under one key.

    Attributes:
        meta: Lightning's description of the key, without what refers to this process.
        value: The sum, maximum or minimum so far; None for a Metric object, which syncs itself.
        weight: Sum of the batch sizes, for means.
    """

    meta: dict[str, Any]
    value: torch.Tensor | None
    weight: torch.Tensor | None


class _JointResults:
    """The results of one evaluation loop, joined over the replicas loader by loader."""

    def __init__(self, trainer: Any, loop: Any, mesh: Mesh, arrivals: _Arrivals) -> None:
        self._trainer, self._loop, self._mesh = trainer, loop, mesh
        self._arrivals, self._read_before = arrivals, 0
        self._store_own = loop._store_dataloader_outputs  # Lightning's
        self._met: tuple[int, int] | None = None  # loader and batch at which all replicas were last
        self.counts: list[list[float]] = []  # batches that each replica has, by loader; inf where that is not known

    def begin(self, original: Callable[[], None]) -> None:
        """Before Lightning's own: say how many batches there are."""
        loaders = zip(self._loop._combined_loader.flattened, self._loop.max_batches, strict=True)
        mine = [math.inf if sized_len(loader) is None else batches for loader, batches in loaders]
        self.counts = [[] for _ in range(self._mesh.size("data"))]
        dist.all_gather_object(self.counts, mine, group=self._mesh.group("data"))
        self._arrivals.begin()
        self._met = None
        self._read_before = self._loop.batch_progress.current.ready
        original()

    @property
    def batches_read(self) -> int:
        """Of the loader that is read now; Lightning counts those of all loaders together."""
        read: int = self._loop.batch_progress.current.ready - self._read_before
        return read

    def meet(self, loader: int, batch: int) -> list[float]:
        """Wait until each replica has come to a batch, or to the end of its loader; how many batches each has."""
        counts = [each[loader] for each in self.counts]
        if self._met != (loader, batch):  # a batch may ask several times, and in several microbatches
            counts = self._arrivals.meet(loader, batch, counts)
            for each, count in zip(self.counts, counts, strict=True):
                each[loader] = count
            self._met = loader, batch
        return counts

    def store(self) -> None:
        """In place of Lightning's own, which computes what a loader's steps logged once it has been read."""
        read, self._read_before = self.batches_read, self._loop.batch_progress.current.ready
        self._store_up_to(self._loop._results.dataloader_idx or 0, read)

    def end(self, original: Callable[[], Any]) -> Any:
        """Before Lightning's own."""
        self._store_up_to(self._loop.num_dataloaders - 1 if self._loop._is_sequential else 0, 0)
        return original()

    def _store_up_to(self, loader: int, read: int) -> None:
        """Lightning never speaks of a loader that is empty for this replica; the others still wait for it there."""
        results, many = self._loop._results, self._loop._is_sequential and self._loop.num_dataloaders > 1
        for index in range(len(self._loop._logged_outputs), loader + 1):
            if any(each[index] == math.inf for each in self.counts):
                self._arrivals.end(index, read if index == loader else 0)
            results.dataloader_idx = index if many else None
            self._join(index)
            self._store_own()

    def _join(self, loader: int) -> None:
        """Let each replica have the values of all.

        Raises:
            RanksDisagree: Metric objects are logged by some replicas only.
        """
        results = self._loop._results
        mine = {k: _part_of(m) for k, m in results.valid_items() if m.meta.fx.split(".")[0] in _STEPS}
        all_parts: list[dict[str, _Part]] = [{} for _ in range(self._mesh.size("data"))]
        dist.all_gather_object(all_parts, mine, group=self._mesh.group("data"))
        objects = [[key for key, part in parts.items() if part.value is None] for parts in all_parts]
        if any(names != objects[0] for names in objects):
            raise RanksDisagree(
                f"replicas log different metric objects for loader {loader} of {self._loop._stage.value}: {objects};"
                " log the same ones on every rank, and see that every replica gets a batch"
            )
        for key in dict.fromkeys(key for parts in all_parts for key in parts):
            logged = [parts[key] for parts in all_parts if key in parts]
            if logged[0].value is None:
                continue
            if key not in results:
                results[key] = self._metric_like(logged[0])
            _set_joined(results[key], logged)

    def _metric_like(self, part: _Part) -> _ResultMetric:
        """For a key that the steps of this replica did not log."""
        meta = _Metadata(**part.meta)
        meta.sync = _Sync(fn=self._trainer.strategy.reduce)
        return _ResultMetric(meta, is_tensor=True).to(self._trainer.strategy.root_device)


class _Arrivals:
    """How far replicas are in loaders that do not say how long they are, told through the store by which they met.

    Nobody waits for it but a step that is about to ask the others.
    """

    def __init__(self, mesh: Mesh, is_over: Callable[[], bool]) -> None:
        self._mesh, self._is_over = mesh, is_over
        self._store = dist.distributed_c10d._get_default_store()
        self._prefix = f"hybrid3d/evaluated-{self._store.add(f'hybrid3d/evaluated-by-rank-{mesh.rank}', 1)}/"
        self._evaluation = 0

    def begin(self) -> None:
        """All replicas begin an evaluation."""
        self._evaluation += 1

    def end(self, loader: int, count: int) -> None:
        """This replica has read a loader to its end."""
        self._tell(f"end-{loader}", count)

    def meet(self, loader: int, batch: int, counts: Sequence[float]) -> list[float]:
        """Wait until each replica has come to a batch of a loader, or to its end; how many batches each has by now."""
        self._tell(f"at-{loader}", batch)
        found = list(counts)
        ranks = dist.get_process_group_ranks(self._mesh.group("data"))
        waited_for = [place for place, count in enumerate(counts) if count == math.inf]
        pause = pauses()
        while waited_for and not self._is_over():
            for place in list(waited_for):
                end = self._told(f"end-{loader}", ranks[place])
                if end is not None:
                    found[place] = end
                at = self._told(f"at-{loader}", ranks[place])
                if end is not None or (at is not None and at >= batch):
                    waited_for.remove(place)
            if waited_for:
                next(pause)
        return found

    def _tell(self, what: str, number: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosts it
            self._store.set(f"{self._prefix}{what}-{self._mesh.rank}", f"{self._evaluation} {number}")

    def _told(self, what: str, rank: int) -> int | None:
        """What a rank has said in this evaluation."""
        key = f"{self._prefix}{what}-{rank}"
        if not self._store.check([key]):
            return None
        evaluation, number = map(int, self._store.get(key).split())
        return number if evaluation == self._evaluation else None


def _part_of(metric: _ResultMetric) -> _Part:
    names = [field.name for field in dataclasses.fields(metric.meta) if field.name != "_sync"]
    meta = {name: getattr(metric.meta, name) for name in names}
    if not metric.is_tensor:
        return _Part(meta, None, None)
    weight = metric.cumulated_batch_size.cpu() if metric.meta.is_mean_reduction else None
    return _Part(meta, metric.value.detach().cpu(), weight)


def _set_joined(metric: _ResultMetric, parts: list[_Part]) -> None:
    device = metric.value.device
    values = torch.stack([part.value.double() for part in parts if part.value is not None])
    dtype = max((part.value.dtype for part in parts if part.value is not None), key=lambda dtype: dtype.itemsize)
    joined = {"max": values.max(), "min": values.min()}.get(metric.meta.reduce_fx.__name__, values.sum())
    metric.value = joined.to(device=device, dtype=dtype)
    if metric.meta.is_mean_reduction:
        metric.cumulated_batch_size = torch.stack([p.weight for p in parts if p.weight is not None]).sum().to(device)
    metric.has_reset, metric._computed = False, None
    metric._update_count = max(metric._update_count, 1)
