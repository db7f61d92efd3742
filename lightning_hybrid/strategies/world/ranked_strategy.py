"""A Lightning strategy on a mesh of ranks: how processes start and meet, and Lightning's questions about ranks."""

from __future__ import annotations

import atexit
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
)
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.memory.recompute.policies import Recompute
from lightning_hybrid.memory.saved_activations.requests import ActivationRequests, Compression, Offload
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.patching import ignore_warnings
from lightning_hybrid.precision.capability import check_device_precision, check_one_precision
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.precision.scaler import MeshGradScaler
from lightning_hybrid.strategies.options.auto_sizes import (
    agreed_plan,
    is_check_of_batch_size_search,
    needs_plan,
    plan_options,
)
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.strategies.options.widths import check_ranks
from lightning_hybrid.strategies.world.before_ranks import check_call
from lightning_hybrid.strategies.world.failures import check_connections
from lightning_hybrid.strategies.world.interface import name_interface
from lightning_hybrid.strategies.world.launchers import ForkedRanksLauncher, ScriptLauncher
from lightning_hybrid.strategies.world.ranks import RankWorld
from lightning_hybrid.strategies.world.samplers import set_next_epoch, split_sampler_over_replicas
from lightning_hybrid.strategies.world.traces import shorten

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hybrid.predict.plans import Plan


# Objects of Lightning that users pass, which Lightning does not check.
_KINDS: dict[str, tuple[type, str]] = {
    "cluster_environment": (ClusterEnvironment, "SLURMEnvironment()"),
    "checkpoint_io": (CheckpointIO, "AsyncCheckpointIO()"),
    "precision_plugin": (Precision, "HybridPrecision('bf16-mixed'), or set Trainer(precision='bf16-mixed')"),
}


class RankedStrategy(ParallelStrategy):
    """Answers what Lightning asks about ranks, and makes the `RankWorld` of a run.

    Attributes:
        options: The arguments of the strategy.
        predicted_plan: The plan of sizes that were "auto", on the first rank; None if there was none.
    """

    _may_plan = True  # sizes that are "auto"

    def __init__(self, options: Options, **lightning: Any) -> None:
        self.options = self._requested = options
        for name, (kind, such_as) in _KINDS.items():
            if not isinstance(given := lightning.get(name), kind | None):
                raise TypeError(f"{name}={given!r}; use an object such as {such_as}")
        super().__init__(**lightning)
        self.num_nodes = 1
        self._requested_recompute: Recompute | None = None  # by a callback
        self.saved_activations = ActivationRequests()
        self._backend = options.process_group_backend
        self._world: RankWorld | None = None
        self.predicted_plan: Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle no ranks, and nothing that a Trainer's callbacks request."""
        requested = {"_requested_recompute": None, "saved_activations": ActivationRequests()}
        return {**super().__getstate__(), "_world": None, **requested}

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def local_rank(self) -> int:
        """Index of this rank on its node."""
        return 0 if self._is_one_process else super().local_rank

    @property
    def node_rank(self) -> int:
        """Index of this node."""
        return 0 if self._is_one_process else super().node_rank

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _is_one_process(self) -> bool:
        """Whether this process is the whole world; environments, which may lack variables, are not read then."""
        return self.num_nodes * self.num_processes == 1

    @property
    def precision_plugin(self) -> Precision:
        """The precision: `HybridPrecision` for Lightning's own; a user's plugin where each rank runs full steps."""
        self._precision_plugin = self._precision_plugin or HybridPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not HybridPrecision.is_other(plugin):
            plugin = HybridPrecision.of(plugin)
        self._precision_plugin = plugin

    def request_recomputation(self, recompute: Recompute) -> None:
        """Set the recomputation that a callback requests; a ValueError if the user's option requests another."""
        option = None if "recompute" in self.options.unset else self.options.recompute  # planned, if unset
        present = self._requested_recompute or option
        if present not in (None, recompute):
            raise ValueError(f"recompute={present!r} and recompute={recompute!r} are both requested; set one of them")
        self._requested_recompute = recompute

    @property
    def _recompute(self) -> Recompute | None:
        """The recomputation of a run: what a callback requests, or the option, which may be planned."""
        return self._requested_recompute or self.options.recompute

    def request_saved_activations(self, request: Offload | Compression) -> None:
        """Set how saved activations are offloaded or compressed; a ValueError if there is another request."""
        self.saved_activations = self.saved_activations.adding(request)

    @property
    def process_group_backend(self) -> str | None:
        """The backend of ``torch.distributed``."""
        return self._backend

    @property
    def layout(self) -> ParallelLayout:
        """The sizes of this run, once a Trainer has set the number of devices."""
        if self._world is not None:
            return self._world.layout
        if self.options.asks_for_plan:
            raise RuntimeError("the layout is planned when the processes meet; read it in setup() or later")
        return self._resolve_layout()

    def _resolve_layout(self) -> ParallelLayout:
        if not self.num_processes:
            raise RuntimeError("the layout depends on the number of devices; read it once a Trainer has this strategy")
        check_ranks(self.options.stage_widths, self.options.mesh_sizes, self._num_ranks)
        return ParallelLayout.resolve(self._num_ranks, **self.options.mesh_sizes)  # type: ignore[arg-type]

    @property
    def world(self) -> RankWorld:
        """The ranks of this run; a RuntimeError before they have met."""
        if self._world is None:
            self.check_not_forked("mesh")
            raise RuntimeError("the mesh exists once the processes run; read it in setup() or later")
        return self._world

    @property
    def forked_ranks_ended(self) -> bool:
        """Whether this process has forked the ranks of a run, which have ended."""
        return isinstance(self._launcher, ForkedRanksLauncher) and self._launcher.has_run and self._world is None

    def check_not_forked(self, what: str) -> None:
        """Check that this is not the process that has forked the ranks of a run, which have ended."""
        if self.forked_ranks_ended:
            raise RuntimeError(
                f"there is no {what}: the forked processes of start_method='fork' have ended; do this in a callback,"
                " such as in on_train_end(), or run a script with start_method='popen'. This process has the trained"
                " module, the logged values, trainer.global_step and current_epoch, and the paths of ModelCheckpoint"
            )

    @property
    def mesh(self) -> Mesh:
        """The process groups of this run."""
        return self.world.mesh

    @property
    def is_distributed(self) -> bool:
        """Whether samplers must be split: with one replica the user's order of samples stays."""
        return not is_check_of_batch_size_search() and self.layout.data_parallel_size > 1

    @property
    def global_rank(self) -> int:
        """The launcher's rank; in user code its index among the ranks that see other data."""
        rank = self._launcher_rank
        return self.layout.data_rank(rank) if self._is_user_code else rank

    @property
    def world_size(self) -> int:
        """The launcher's number of ranks; in user code the number of ranks that see different data."""
        return self.layout.data_parallel_size if self._is_user_code else self._num_ranks

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the one rank that writes files, for user code too."""
        return self._launcher_rank == 0

    @property
    def _is_user_code(self) -> bool:
        return self._world is not None and self._world.is_user_code

    @property
    def _launcher_rank(self) -> int:
        if self._world is not None:  # environments may read RANK, which is another one while user code runs
            return self._world.mesh.rank
        return self._environment.global_rank() if self._has_ranks else 0

    @property
    def _num_ranks(self) -> int:
        return self._environment.world_size() if self._has_ranks else 1

    @property
    def _environment(self) -> ClusterEnvironment:
        assert self.cluster_environment is not None  # once a Trainer has this strategy
        return self.cluster_environment

    @property
    def _has_ranks(self) -> bool:
        return self.cluster_environment is not None and not self._is_one_process

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica."""
        return self.layout.data_rank(self._launcher_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers are split over the data axes only; all ranks of a replica draw the same batch."""
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.data_rank}

    # -- processes ----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        if self.options.start_method != "popen":
            self._launcher = ForkedRanksLauncher(self, start_method=self.options.start_method)
        elif not self._is_one_process and not self._environment.creates_processes_externally:
            self._launcher = ScriptLauncher(self, self._environment)

    def check_before_ranks(self, function: Any, *args: Any, **kwargs: Any) -> None:
        """Check sizes, precision, and the method of the Trainer that ranks are about to be started for."""
        # A process that has asked a GPU for its arithmetic cannot fork ranks that use it.
        if self.options.start_method == "popen" or self.root_device.type == "cpu":
            self._check_precision(kwargs.get("trainer"))
        if not self.options.asks_for_plan:
            layout = self._resolve_layout()
            if "trainer" in kwargs and kwargs["trainer"].state.fn == "fit":
                self.options.check_replicas(layout)
        check_call(self.options, function, *args, **kwargs)

    def _check_precision(self, trainer: pl.Trainer | None) -> None:
        precision = getattr(self.precision_plugin, "precision", "")
        if trainer is not None:
            check_one_precision(precision, trainer)
        check_device_precision(precision, self.root_device)
        if isinstance(scaler := getattr(self.precision_plugin, "scaler", None), MeshGradScaler):
            scaler.check_device(self.root_device.type)
        if float8 := getattr(self.precision_plugin, "float8", None):
            float8.check_device()

    def set_world_ranks(self) -> None:
        """Set this rank in an environment that has no ranks of its own; the Trainer calls this when it is made.

        Raises:
            RuntimeError: The environment of a cluster lacks a variable.
        """
        if self._is_one_process:
            return
        try:
            self._environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self._environment.set_world_size(self.num_nodes * self.num_processes)
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        except KeyError as error:
            raise RuntimeError(
                f"{type(self.cluster_environment).__name__} finds no variable {error} for the rank of this process, one"
                f" of {self.num_nodes * self.num_processes}; start the script as the cluster starts its tasks (srun),"
                " or set Trainer(plugins=[LightningEnvironment()])"
            ) from error

    def setup_environment(self) -> None:
        """Join the process groups, and build the mesh."""
        check_connections()
        if self._has_ranks and self._environment.creates_processes_externally:
            self._environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._check_precision(None if self.lightning_module is None else self.lightning_module._trainer)
        requested = self.options.process_group_backend
        if requested == "gloo" and self.root_device.type == "cuda":
            raise ValueError(f"process_group_backend='gloo': gloo sends no tensor on {self.root_device}; leave it out")
        super().setup_environment()
        if isinstance(self._environment, LightningEnvironment) and not self._is_one_process:
            # Lightning's launcher divides the cores on the first rank alone; each other rank would take them all.
            _set_num_threads_if_needed(self.num_processes)
        self.set_world_ranks()
        rank, timeout = self._launcher_rank, self.options.timeout
        may_plan = self._may_plan and self.options.may_be_planned
        is_planned = may_plan and needs_plan(self)
        # One process plans, which has no process groups; the others wait for it where they meet.
        planned: dict[str, Any] | Exception = {}
        if is_planned and rank == 0:
            planned, self.predicted_plan = plan_options(self)
        self._backend = backend = requested or _get_default_process_group_backend_for_device(self.root_device)
        # See [Note: groups bound to a device].
        in_stages = is_planned or self._resolve_layout().pipeline_parallel_size > 1
        is_bound = not in_stages and "nccl" in backend
        device_id = self.root_device if is_bound else None
        if self._is_one_process and not _distributed_is_initialized():
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)
        if not _distributed_is_initialized():
            name_interface(self._environment.main_address, self.num_nodes)
        _init_dist_connection(self._environment, backend, timeout=timeout, device_id=device_id)
        if may_plan and (agreed := agreed_plan(planned, rank)):
            self.options = self.options.with_planned(agreed)
        layout = self._resolve_layout()
        if layout.pipeline_parallel_size > 1 and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise ValueError(
                "pipeline_parallel_size > 1 needs a process group whose pairs of ranks have separate channels, but"
                " init_process_group was called with device_id=..., by you or by an earlier fit without stages; leave"
                " device_id out, or begin this fit in a process of its own"
            )
        # Groups that are still there when the interpreter collects its garbage can keep the process from ending;
        # Lightning sees to that for NCCL alone.
        atexit.unregister(_destroy_dist_connection)
        atexit.register(_destroy_dist_connection)
        mesh = None
        if self._world is not None:
            self._world.close()
            mesh = self._world.mesh if self._world.layout == layout else None
        mesh = mesh or Mesh.build(layout, self.root_device.type, timeout)
        sizes = {"num_processes": self.num_processes, "num_nodes": self.num_nodes}
        self._world = RankWorld(layout, mesh, self.root_device, timeout, **sizes)
        # Lightning tests tree specs as torch has deprecated; each rank would say so.
        deprecated, reason = r".isinstance\(treespec, LeafSpec\). is deprecated", "Lightning calls it"
        self._world.until_end.callback(ignore_warnings(deprecated, FutureWarning, reason=reason))
        module = self.lightning_module
        if module is not None and module._trainer is not None:  # None where the strategy is used without a Trainer
            self._world.connect(module._trainer, module)

    def on_exception(self, exception: BaseException) -> None:
        """Report the error to the other ranks."""
        super().on_exception(exception)
        if self._world is None:
            shorten(exception)
        else:
            self._world.report(exception)

    def close_world(self, *, moves_module: bool) -> None:
        """Close the world and the plugins at the end of a run; move the module to the host unless it is in shards."""
        if self._world is not None:
            self._world.close()
        if moves_module:
            super().teardown()
            return
        assert self.accelerator is not None
        for plugin in (self._environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            plugin.teardown()

    def process_dataloader(self, dataloader: object) -> object:
        """Give all ranks of a replica one order of samples: split users' samplers, seed workers by replica."""
        self.split_over_replicas(dataloader)
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None and trainer.training:
            set_next_epoch(trainer, dataloader)
        if self._world is not None:
            self._world.wrap_loader(dataloader)
        if (
            isinstance(dataloader, DataLoader)
            and dataloader.worker_init_fn is None
            and int(os.environ.get("PL_SEED_WORKERS", 0))
        ):
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_rank)
        return dataloader

    def split_over_replicas(self, dataloader: object) -> None:
        """Let a ``DistributedSampler`` that the user built split samples over replicas, not over ranks."""
        replicas, ranks = self.layout.data_parallel_size, self.layout.world_size
        split_sampler_over_replicas(dataloader, replicas=replicas, replica=self.data_rank, world_size=ranks)

    # -- collectives of user code -------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, unless one of them has failed and will not come."""
        if self._world is not None:
            self._world.rendezvous(f"the barrier {name!r}", asks=False)
            self._world.barrier()
        elif _distributed_is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank."""
        if self._world is not None:
            self._world.rendezvous(f"a broadcast of rank {src}", asks=False)
            return self._world.broadcast(obj, src)
        box = [obj]
        if _distributed_is_initialized():
            dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor of any shape over the data axes: the ranks of one replica count once."""
        return tensor if self._world is None else self._world.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks of the world (or any) decided so."""
        if self._world is None:
            return decision
        self._world.rendezvous("a common decision", asks=False)
        return self._world.decide(decision, all_ranks=all)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of shape ``(...)`` as ``(data_parallel_size, ...)``; as it is with one replica.

        Raises:
            ValueError: The tensors have different shapes.
        """
        ranks = None if self._world is None else self._world.gather_group(tensor, group)
        return tensor if ranks is None else super().all_gather(tensor, group=ranks, sync_grads=sync_grads)


# [Note: groups bound to a device] NCCL makes the communicators of a group that is bound to a device at once, and has
# only that one for all transfers between its ranks: they are carried out one after the other, and a receive that is
# posted early keeps back what others wait for. An interleaved schedule over three ranks would wait for ever. Without
# the device each pair of ranks gets a communicator of its own, as programs are made for (`schedule/program.py`).
