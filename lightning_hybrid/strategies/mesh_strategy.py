"""A Lightning strategy whose ranks are laid out on a mesh: how they meet, and what user code may ask of them."""

from __future__ import annotations

import atexit
import contextlib
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid.experts.moe.moe_layer import name_layers
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.strategies.options.strategy_options import check_processes
from lightning_hybrid.strategies.world.device_mesh import published
from lightning_hybrid.strategies.world.distributed_samplers import deal_to_replicas
from lightning_hybrid.strategies.world.replica_world import UserWorld
from lightning_hybrid.strategies.world.skipped_steps import allow_skipped_steps
from lightning_hybrid.strategies.world.uneven_evaluation import evaluate_each_sample_once


class MeshStrategy(ParallelStrategy):
    """Ranks on a mesh; those of one replica see the same batch and count once in what users reduce or gather."""

    def __init__(
        self,
        *,
        sizes: dict[str, int | Literal["auto"]],
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: Literal["popen", "fork"],
        **lightning: Any,
    ) -> None:
        """Args: sizes: as ``ParallelLayout.resolve``. lightning: arguments of Lightning's own strategies."""
        super().__init__(**lightning)
        check_processes(process_group_backend, timeout, start_method)
        self.num_nodes = 1
        self._connected = frozenset(vars(self))  # names of what a Trainer, and a copy of this object, keeps
        self._sizes = sizes
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._layout: ParallelLayout | None = None
        self._mesh: Mesh | None = None
        self._wider_mesh: Mesh | None = None  # where the ranks of a pipeline hold shards
        self._user_world: UserWorld | None = None
        self._in_step = False
        self._shown_world = contextlib.ExitStack()
        self._changed_loops = contextlib.ExitStack()

    # -- the world ----------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def local_rank(self) -> int:
        """This rank on its node."""
        return 0 if self._is_one_process else super().local_rank

    @property
    def node_rank(self) -> int:
        """This node."""
        return 0 if self._is_one_process else super().node_rank

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _is_one_process(self) -> bool:
        """Whether this process is the whole world; no environment is asked then, of which parts may be missing."""
        return self.num_nodes * self.num_processes == 1

    @property
    def process_group_backend(self) -> str | None:
        """The backend of ``torch.distributed``."""
        return self._process_group_backend

    @property
    def layout(self) -> ParallelLayout:
        """The sizes of this run, as soon as a Trainer has said how many devices there are."""
        return self._resolve_layout() if self._layout is None else self._layout

    def _resolve_layout(self) -> ParallelLayout:
        if not self.num_processes:
            raise RuntimeError("the layout depends on the number of devices; ask when a Trainer has this strategy")
        return ParallelLayout.resolve(self._num_ranks, **self._sizes)  # type: ignore[arg-type]

    @property
    def mesh(self) -> Mesh:
        """The process groups of this run."""
        if self._mesh is None:
            raise RuntimeError("the mesh is there once the processes run; ask in setup() or later")
        return self._mesh

    @property
    def _shard_mesh(self) -> Mesh:
        """The ranks as parameters lie on them."""
        return self._wider_mesh or self.mesh

    @property
    def is_distributed(self) -> bool:
        """Whether samplers must be split: with one replica the user's order of samples stands."""
        return self.layout.data_parallel_size > 1

    @property
    def global_rank(self) -> int:
        """This rank in the launcher's world; to the user's code its place among those that see other data."""
        rank = self._launcher_rank
        return self.layout.data_rank(rank) if self._is_shown_to_user else rank

    @property
    def world_size(self) -> int:
        """Ranks in the launcher's world; to the user's code those that see different data."""
        return self.layout.data_parallel_size if self._is_shown_to_user else self._num_ranks

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the one rank that writes files, whoever asks."""
        return self._launcher_rank == 0

    @property
    def _launcher_rank(self) -> int:
        if self._mesh is not None:  # environments may read RANK, which is another one while the user's code runs
            return self._mesh.rank
        known = self.cluster_environment is not None and not self._is_one_process
        return self.cluster_environment.global_rank() if known else 0  # type: ignore[union-attr]

    @property
    def _num_ranks(self) -> int:
        known = self.cluster_environment is not None and not self._is_one_process
        return self.cluster_environment.world_size() if known else 1  # type: ignore[union-attr]

    @property
    def _is_shown_to_user(self) -> bool:
        return self._user_world is not None and self._user_world.is_shown

    @property
    def _everyone(self) -> dist.ProcessGroup | None:
        """Whom a collective asks; None is the world. Inside a step other stages are not at the same line."""
        return self.mesh.group("data") if self._in_step else None

    def user_world(self) -> AbstractContextManager[None]:
        """The user's own code runs inside: to it the world is those that see other data."""
        return contextlib.nullcontext() if self._user_world is None else self._user_world.shown()

    def launcher_world(self) -> AbstractContextManager[None]:
        """What needs all ranks runs inside, though the user's code called it."""
        return contextlib.nullcontext() if self._user_world is None else self._user_world.hidden()

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica."""
        return self.layout.data_rank(self._launcher_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers are split over the data axes only; all ranks of a replica draw the same batch."""
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.data_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method != "popen":
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)
        elif not self._is_one_process and not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the environment, where it has no ranks of its own, which one this is; the Trainer asks when it is made.

        Raises:
            RuntimeError: The environment of a cluster lacks a variable.
        """
        if self._is_one_process:
            return
        assert self.cluster_environment is not None
        try:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        except KeyError as error:
            raise RuntimeError(
                f"{type(self.cluster_environment).__name__} finds no variable {error} for the rank of this process, one"
                f" of {self.num_nodes * self.num_processes}; start the script as the cluster starts its tasks (srun),"
                " or set Trainer(plugins=[LightningEnvironment()])"
            ) from error

    def setup_environment(self) -> None:
        """Join the world and build the mesh."""
        super().setup_environment()
        assert self.cluster_environment is not None
        if isinstance(self.cluster_environment, LightningEnvironment) and not self._is_one_process:
            # Lightning's launcher shares the cores out on the first rank alone; each other rank would take them all.
            _set_num_threads_if_needed(self.num_processes)
        self.set_world_ranks()
        self._layout = self._resolve_layout()
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        self._process_group_backend = backend
        # See [Note: groups bound to a device].
        in_stages = self._layout.pipeline_parallel_size > 1
        device_id = None if in_stages or self.root_device.type == "cpu" else self.root_device
        if self._is_one_process and not _distributed_is_initialized():
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=self._timeout, device_id=device_id
            )
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        if in_stages and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise ValueError(
                "pipeline_parallel_size > 1 needs a process group whose pairs of ranks have channels of their own, but"
                " init_process_group was called with device_id=...; leave device_id out, or let the Trainer call it"
            )
        # Groups that are still there when the interpreter collects its garbage can keep the process from ending;
        # Lightning sees to that for NCCL alone.
        atexit.unregister(_destroy_dist_connection)
        atexit.register(_destroy_dist_connection)
        if self._mesh is None or self._mesh.layout != self._layout:
            self._mesh = Mesh.build(self._layout, self.root_device.type)
        self._shown_world.close()
        self._changed_loops.close()
        trainer = self._connected_trainer
        if trainer is None:
            return
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = published(self._mesh.published(), self.launcher_world)
        name_layers(self.lightning_module)
        self._user_world = UserWorld(self._mesh)
        self._shown_world.callback(self._user_world.show_to_hooks(trainer))
        self._changed_loops.callback(evaluate_each_sample_once(trainer, self._mesh, self._has_failed))
        if not self._is_one_process:
            self._changed_loops.callback(allow_skipped_steps(trainer))

    @property
    def _connected_trainer(self) -> Any:
        """The Trainer of this run; None where the strategy is used by hand."""
        return None if self.lightning_module is None else self.lightning_module._trainer

    def _has_failed(self) -> bool:
        """Whether a rank of this run is known to have failed."""
        return False

    def teardown(self) -> None:
        """Leave the trainer's loops as they were, and its hooks with the launcher's world."""
        self._shown_world.close()
        self._changed_loops.close()
        if self._leaves_whole:
            super().teardown()
            return
        assert self.cluster_environment is not None and self.accelerator is not None
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()

    @property
    def _leaves_whole(self) -> bool:
        """Whether the module can be moved at the end; after a failure it may be in parts."""
        return True

    def process_dataloader(self, dataloader: object) -> object:
        """Make loaders alike within a replica: samplers built by hand, and worker seeds (Lightning's are by rank)."""
        self.deal_to_replicas(dataloader)
        if self._user_world is not None:
            self._user_world.show_to_loader(dataloader)
        if (
            isinstance(dataloader, DataLoader)
            and dataloader.worker_init_fn is None
            and int(os.environ.get("PL_SEED_WORKERS", 0))
        ):
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_rank)
        return dataloader

    def deal_to_replicas(self, dataloader: object) -> None:
        """See that a hand-built ``DistributedSampler`` deals to replicas, not to ranks."""
        replicas, ranks = self.layout.data_parallel_size, self.layout.world_size
        deal_to_replicas(dataloader, replicas=replicas, replica=self.data_rank, world_size=ranks)

    # -- collectives that user code asks for --------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not _distributed_is_initialized():
            return
        group = self._everyone
        with self.launcher_world():
            if dist.get_backend(group) == "nccl":
                dist.barrier(group, device_ids=[self.root_device.index])
            else:
                dist.barrier(group)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src`` on every rank."""
        if not _distributed_is_initialized():
            return obj
        group = self._everyone
        if self._is_shown_to_user and group is None:  # the first rank of that replica
            src = next(r for r in range(self.layout.world_size) if self.layout.data_rank(r) == src)
        box = [obj]
        with self.launcher_world():
            if group is not None:
                dist.broadcast_object_list(box, group=group, group_src=src)
            else:
                dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data axes: the ranks of one replica hold the same value and count once."""
        if not isinstance(tensor, Tensor) or self._mesh is None or (group is None and self._mesh.size("data") == 1):
            return tensor
        return _sync_ddp_if_available(tensor, group or self.mesh.group("data"), reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks of the world decided so."""
        if self._mesh is None:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        axis = "world" if self._everyone is None else "data"
        self.mesh.all_reduce(votes, axis)
        return int(votes) == self.mesh.size(axis) if all else bool(votes)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data axes; a leading dimension of the data-parallel size is added if that is not 1.

        Raises:
            ValueError: The tensors have different shapes.
        """
        if self._mesh is None or (self._mesh.size("data") == 1 and (group is None or group.size() == 1)):
            return tensor
        _check_shapes(tensor, group or self.mesh.group("data"))
        return super().all_gather(tensor, group=group or self.mesh.group("data"), sync_grads=sync_grads)


# [Note: groups bound to a device] NCCL makes the communicators of a group that is bound to a device at once, and has
# only that one for all transfers between its ranks: they are carried out one after the other, and a receive that is
# posted early keeps back what others wait for. An interleaved schedule over three ranks would wait for ever. Without
# the device each pair of ranks gets a communicator of its own, as programs are made for (`schedule/program.py`).


def _check_shapes(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """See that all ranks gather tensors of one shape; collectives of other shapes may hang, or give garbage."""
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
