"""The ranks of a run: process groups, collectives of user code, the world visible to user code, and failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.distributed import default_pg_timeout

from lightning_hybrid.errors import RanksDisagree
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import replace
from lightning_hybrid.pipeline.metrics import count_replicas_once, gather_over_replicas
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.strategies.world.anomalies import Anomalies
from lightning_hybrid.strategies.world.callbacks import EpochMetrics
from lightning_hybrid.strategies.world.evaluation import evaluate_each_sample_once
from lightning_hybrid.strategies.world.failures import NoFailures, RankFailures
from lightning_hybrid.strategies.world.first_step import FirstStep
from lightning_hybrid.strategies.world.lengths import EqualLengths
from lightning_hybrid.strategies.world.rendezvous import Rendezvous
from lightning_hybrid.strategies.world.user_world import ReplicaWorld, published


class RankWorld:
    """The ranks of one strategy, from the moment they have met.

    Ranks of one replica see the same batch, and count once in what user code reduces or gathers. To the code of the
    user the world is the ranks that see different data; to Lightning and to this package it is the launcher's.

    Attributes:
        layout: The sizes of the run.
        mesh: Its process groups.
        device: The device of this rank.
        timeout: Of collective operations.
        num_processes: Ranks on this node.
        num_nodes: Nodes.
        data_rank: Index of this rank's replica.
        until_end: Closed at the end of the run.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        mesh: Mesh,
        device: torch.device,
        timeout: timedelta | None,
        *,
        num_processes: int,
        num_nodes: int,
    ) -> None:
        self.layout, self.mesh, self.device = layout, mesh, device
        self.timeout = timeout or default_pg_timeout
        self.num_processes, self.num_nodes = num_processes, num_nodes
        self.data_rank = layout.data_rank(mesh.rank)
        self._user_world = ReplicaWorld(mesh)
        self._failures: RankFailures | NoFailures = NoFailures()
        self._in_step = False
        self._until_failure = contextlib.ExitStack()
        self._until_failure.callback(self._user_world.restore_loaders)
        self.until_end = contextlib.ExitStack()

    def connect(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Make user code in hooks of a trainer see its own world, and split its evaluation over replicas."""
        module._device_mesh = published(self.mesh.published(), self.as_launcher)
        for fqn, layer in module.named_modules():
            if (name_in_errors := getattr(layer, "name_in_errors", None)) is not None:  # an MoE layer
                name_in_errors(fqn)
        self._until_failure.callback(self._user_world.wrap_hooks(trainer))
        self.until_end.callback(evaluate_each_sample_once(trainer, self))
        if self.layout.world_size > 1:
            self.until_end.callback(_allow_skipped_steps(trainer))

    def watch_failures(self, trainer: pl.Trainer) -> None:
        """Watch for ranks that fail, from now on."""
        if trainer._detect_anomaly:
            anomalies = Anomalies(self.mesh)
            self.until_end.callback(anomalies.keep_frames())
            self.until_end.callback(anomalies.enter(trainer))
        if self.layout.world_size > 1:
            self._failures = failures = RankFailures(trainer, self.mesh, self.timeout)
            self.until_end.callback(failures.stop_watching)
            self.until_end.callback(EpochMetrics().enter(trainer))
            self.until_end.callback(FirstStep(self.mesh).enter(trainer))
            self.until_end.callback(EqualLengths(self.mesh, self.progress).enter(trainer))
            how = self.mesh.group("data"), self.rendezvous, self.as_launcher
            self.until_end.callback(gather_over_replicas(trainer.lightning_module, *how))

    def count_replicas_once(self, trainer: Any) -> None:
        """Let metrics that a run has updated count each replica once after it, too; collective."""
        replicas = self.mesh.group("data")
        if replicas.size() < self.layout.world_size and not (self.is_disconnected or self.any_failed()):
            with self.as_launcher():
                count_replicas_once([trainer.lightning_module, *trainer.callbacks], replicas)

    def close(self) -> None:
        """Restore the trainer's loops, and show its hooks the launcher's world."""
        self._until_failure.close()
        self.until_end.close()

    # -- user code ----------------------------------------------------------------------------------------------------

    @property
    def is_user_code(self) -> bool:
        """Whether code of the user runs now, and sees its own world."""
        return self._user_world.is_visible

    def as_user(self) -> AbstractContextManager[None]:
        """Enter the world that user code sees."""
        return self._user_world.visible()

    def as_launcher(self) -> AbstractContextManager[None]:
        """Enter the world of all ranks, below user code."""
        return self._user_world.hidden()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enter a step: other stages are not at the same line, so collectives of user code run over replicas only."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    def wrap_loader(self, dataloader: object) -> None:
        """Let the datasets, samplers and workers of a loader see the world of user code."""
        self._user_world.wrap_loader(dataloader)

    # -- failures -----------------------------------------------------------------------------------------------------

    @property
    def is_disconnected(self) -> bool:
        """Whether this rank has closed its connections after a failure."""
        return self._failures.is_disconnected

    def any_failed(self) -> bool:
        """Whether a rank of this run is known to have failed."""
        return self._failures.any_reported()

    def report(self, exception: BaseException) -> None:
        """Report to the other ranks that this one has failed."""
        self._until_failure.close()
        self._failures.report(exception)

    @property
    def progress(self) -> Rendezvous | NoFailures:
        """What this rank has done in the run, and waits for others to do."""
        return self._failures.rendezvous

    def rendezvous(
        self, what: str, group: dist.ProcessGroup | None = None, *, compares: bool = True, asks: bool = True
    ) -> None:
        """Wait until the ranks of a group (None: all) are about to make the call ``what``; as ``Rendezvous.meet``."""
        if not self.is_disconnected:
            ranks = None if group is None else dist.get_process_group_ranks(group)
            self.progress.meet(what, ranks, compares=compares, asks=asks)

    # -- collectives of user code -------------------------------------------------------------------------------------

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The ranks of a collective; None is the world."""
        return self.mesh.group("data") if self._in_step else None

    def barrier(self) -> None:
        """Wait for all ranks, unless one of them has failed and will not come."""
        if self.is_disconnected or not dist.is_initialized():
            return
        group = self._group
        with self.as_launcher():
            ids = [self.device.index] if dist.get_backend(group) == "nccl" else None
            dist.barrier(group, device_ids=ids)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank."""
        if not dist.is_initialized():
            return obj
        group = self._group
        if self.is_user_code and group is None:  # the first rank of that replica
            src = next(r for r in range(self.layout.world_size) if self.layout.data_rank(r) == src)
        box = [obj]
        with self.as_launcher():
            if group is not None:
                dist.broadcast_object_list(box, group=group, group_src=src)
            else:
                dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any | None, reduce_op: Any) -> Any:
        """Reduce a tensor of any shape over the data axes: the ranks of one replica hold one value and count once."""
        if not isinstance(tensor, Tensor) or (group is None and self.mesh.size("data") == 1):
            return tensor
        return _sync_ddp_if_available(tensor, group or self.mesh.group("data"), reduce_op=reduce_op)

    def decide(self, decision: bool, *, all_ranks: bool = True) -> bool:
        """Return whether all ranks (or any) decided so."""
        [votes] = self._votes(decision)
        return votes == self.mesh.size(self._axis) if all_ranks else bool(votes)

    def any_of(self, *decisions: bool) -> list[bool]:
        """Return for each decision whether any rank took it."""
        return [bool(votes) for votes in self._votes(*decisions)]

    @property
    def _axis(self) -> str:
        return "world" if self._group is None else "data"

    def _votes(self, *decisions: bool) -> list[int]:
        votes = torch.tensor([int(decision) for decision in decisions], device=self.device)
        return list(map(int, self.mesh.all_reduce(votes, self._axis).tolist()))

    def any_replica(self, decision: bool) -> bool:
        """Return whether any replica decided so; a collective over the data axes."""
        if self.mesh.size("data") == 1:
            return decision
        votes = torch.tensor(int(decision), device=self.device)
        return bool(self.mesh.all_reduce(votes, "data"))

    def first_reason(self, error: Exception | None) -> str:
        """Return the error of the first rank that has one, as the same text on every rank; "" if none has."""
        return next(filter(None, self._reasons(error)), "")

    def first_failure(self, error: Exception | None) -> tuple[int, str] | None:
        """Return the first rank that has an error, and that error as text, on every rank; None if none has."""
        return next(((rank, reason) for rank, reason in enumerate(self._reasons(error)) if reason), None)

    def _reasons(self, error: Exception | None) -> list[str]:
        """Return the error of each rank as text, "" where there is none."""
        return self._texts("" if error is None else f"{type(error).__name__}: {error}")

    def check_resumed(self, path: object) -> None:
        """Check that all ranks go on from a checkpoint, or that none does (None); a collective over the world.

        Raises:
            RanksDisagree: The file is on some nodes only; raised on every rank.
        """
        if all(self.any_of(path is None, path is not None)):
            found = self._texts("" if path is None else str(path))
            missing, first = [rank for rank, text in enumerate(found) if not text], next(filter(None, found))
            raise RanksDisagree(
                f"ranks {missing} find no checkpoint, and others go on from {first}; save where all nodes"
                " find it, or copy it to each of them",
                entry="resume-ranks",
            )

    def _texts(self, mine: str) -> list[str]:
        """Return the text of each rank; a collective over the world."""
        if self.layout.world_size == 1:
            return [mine]
        rows: list[Any] = [None] * self.layout.world_size
        with self.as_launcher():
            dist.all_gather_object(rows, mine)
        return rows

    def gather_group(self, tensor: Tensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """Return the ranks over which user code gathers a tensor; None where it stays as it is.

        Raises:
            ValueError: The tensors of the ranks have different shapes.
        """
        if self.mesh.size("data") == 1 and (group is None or group.size() == 1):
            return None
        group = group or self.mesh.group("data")
        _check_shapes(tensor, group)
        return group


def _check_shapes(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Check that all ranks gather tensors of one shape; collectives of other shapes may hang, or give garbage."""
    if group.size() == 1 or is_absent(tensor):
        return
    header = torch.zeros(16, dtype=torch.int64, device=tensor.device)
    header[: tensor.dim() + 1] = torch.tensor([tensor.dim(), *tensor.shape])
    headers = [torch.empty_like(header) for _ in range(group.size())]
    dist.all_gather(headers, header, group=group)
    shapes = [tuple(sizes[:dims]) for dims, *sizes in (h.tolist() for h in headers)]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"all_gather needs tensors of one shape, but the ranks have {shapes}; validation and test show each sample"
            " to one replica only, so that batches may differ in size: pad the tensor, gather a sum, or use a"
            " torchmetrics object"
        )


def _allow_skipped_steps(trainer: Any) -> Callable[[], None]:
    """Let the loop accept None from the strategy, which checks that all replicas returned it; return the undo."""
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization

    def training_step(kwargs: dict[str, Any]) -> Any:
        """Lightning's own method, without its check of the world size."""
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        return optimization.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)

    return replace(optimization, "_training_step", training_step, reason="skipped steps on several ranks")
