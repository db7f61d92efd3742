"""Samples over replicas: validation and test see each once, so replicas may have different numbers of batches.

No step may wait for another replica, then: the last batch of one may be no batch of the others. So what steps log is
kept per replica, and reduced once, when all of them have come to the end of a loader.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.pipeline.exchange import RanksDisagree

_EVALUATION = (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING)
_STEPS = ("validation_step", "test_step")
_JOINT = "_joint_results"  # on a loop; its hooks are wrapped by others too


def evaluate_each_sample_once(trainer: Any, mesh: Mesh) -> Callable[[], None]:
    """Let the trainer's validation and test see every sample once, whatever the number of replicas.

    Args:
        trainer: About to set up its loops.
        mesh: The ranks.

    Returns:
        What undoes it.
    """
    if mesh.size("data") == 1:
        return lambda: None
    # Lightning's advice to evaluate on one device is about samples that are repeated.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders.*")
    connector = trainer._data_connector
    loops = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]

    def undo() -> None:
        vars(connector).pop("_resolve_sampler", None)
        for loop in loops:
            vars(loop).pop("_store_dataloader_outputs", None)
            vars(loop).pop("on_run_end", None)
            vars(loop).pop("on_run_start", None)
            vars(loop).pop(_JOINT, None)

    undo()  # what a run that was cut short left behind
    connector._resolve_sampler = partial(_sampler_of_replica, connector._resolve_sampler)
    for loop in loops:
        joint = _JointResults(trainer, loop, mesh)
        loop._store_dataloader_outputs = joint.store
        loop.on_run_end = joint.end
        loop.on_run_start = joint.begin
        vars(loop)[_JOINT] = joint
    return undo


def alone_in_this_batch(trainer: Any) -> str | None:
    """Why no replica would answer: the batch that is evaluated now is one that some of them do not have.

    Args:
        trainer: That runs a step of validation or test.

    Returns:
        A sentence, or None if all replicas have such a batch, or it is not known how many they have.
    """
    loop = trainer._active_loop
    joint: _JointResults | None = vars(loop).get(_JOINT)
    counts = [] if joint is None else joint.counts
    loader = loop._results.dataloader_idx or 0
    if not counts or any(loader >= len(each) for each in counts):
        return None
    batches = [each[loader] for each in counts]
    batch = loop.batch_progress.current.ready - 1
    if batch < min(batches) or not loop._is_sequential:
        return None
    return (
        f"batch {batch} of loader {loader} is evaluated, but the replicas have {batches} batches, as each sample is"
        " evaluated once: those without this batch would be waited for"
    )


class _KeptBatchSampler(BatchSampler):
    """A batch sampler that the user built: of torch's own class Lightning would take the sampler alone."""


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

    def __init__(self, trainer: Any, loop: Any, mesh: Mesh) -> None:
        self._trainer, self._loop, self._mesh = trainer, loop, mesh
        self.counts: list[list[float]] = []  # batches that each replica has, by loader

    def begin(self) -> None:
        """Before Lightning's own: say how many batches there are."""
        self.counts = [[] for _ in range(self._mesh.size("data"))]
        dist.all_gather_object(self.counts, list(self._loop.max_batches), group=self._mesh.group("data"))
        type(self._loop).on_run_start(self._loop)

    def store(self) -> None:
        """In place of Lightning's own, which computes what a loader's steps logged once it has been read."""
        self._store_up_to(self._loop._results.dataloader_idx or 0)

    def end(self) -> Any:
        """Before Lightning's own."""
        self._store_up_to(self._loop.num_dataloaders - 1 if self._loop._is_sequential else 0)
        return type(self._loop).on_run_end(self._loop)

    def _store_up_to(self, loader: int) -> None:
        """Lightning never speaks of a loader that is empty for this replica; the others still wait for it there."""
        results, many = self._loop._results, self._loop._is_sequential and self._loop.num_dataloaders > 1
        for index in range(len(self._loop._logged_outputs), loader + 1):
            results.dataloader_idx = index if many else None
            self._join(index)
            type(self._loop)._store_dataloader_outputs(self._loop)

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
