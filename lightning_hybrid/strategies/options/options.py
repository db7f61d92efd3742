"""Options of the strategy, checked as soon as they are given, before any process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from lightning_hybrid.batch.split import BatchSplitter
from lightning_hybrid.errors import BatchError, LayoutError
from lightning_hybrid.layout import SIZE_OPTIONS, ParallelLayout, is_count
from lightning_hybrid.memory.amounts import SPELLINGS, parse_budget
from lightning_hybrid.memory.recompute.policies import Recompute, check_recompute
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.schedule import SCHEDULE_NAMES, make_schedule, stages_of_each_rank
from lightning_hybrid.strategies.options.widths import check_widths
from lightning_hybrid.text import counted, meant

if TYPE_CHECKING:
    from lightning_hybrid.layout import Objective
    from lightning_hybrid.techniques.technique import Technique


_SIZES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)
# What further options of "auto" are where nothing is planned.
_UNPLANNED: dict[str, Any] = {
    "schedule": "1f1b",
    "stages_per_rank": 1,
    "sequence_parallel": False,
    "zero_stage": 0,
    "offload": None,
    "recompute": None,
    "chunked_loss": False,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of ``Hybrid3DStrategy``, which explains the names, without arguments of Lightning's own strategies.

    Raises:
        LayoutError: A size that is no whole number of 1 or more.
        ValueError: An unknown schedule, style, backend or option of the compiler, or a count that is none.
        TypeError: Cuts that are no list of names, a plan that is none of names and styles, or a splitter that cannot be
            called.
    """

    sizes: Mapping[str, int | Literal["auto"]]
    num_microbatches: int | Literal["auto"]
    schedule: str
    stages_per_rank: int
    pipeline_cuts: Sequence[str] | None
    batch_splitter: BatchSplitter | None
    sequence_parallel: bool
    zero_stage: int
    shard_size: int | None
    reshard_after_forward: bool | Literal["auto"]
    offload: str | Mapping[str, str] | None
    recompute: Recompute | None
    microbatch_weight: MicrobatchWeight | None
    tensor_parallel_plan: dict[str, str] | None
    compile: Literal["units"] | dict[str, Any] | None
    example_batch: Any
    max_microbatches_in_flight: int | None = None
    microbatch: Literal["auto"] | None = None
    expert_chunks: int = 1
    spatial_parallel_size: int = 1
    stage_widths: Sequence[int] | Literal["auto"] | None = None
    optimizer_in_backward: bool = False
    chunked_loss: bool | int = False
    save_distributed_checkpoint: bool = False
    async_checkpoint: bool = False
    check_digests: bool = True
    verify_first_step: bool = False
    strict_layout: bool = False
    techniques: Sequence[Technique] | None = None
    process_group_backend: str | None = None
    timeout: timedelta | None = None
    start_method: Literal["popen", "fork"] = "popen"
    objective: Objective | None = None
    max_memory: str | None = None
    # Options besides sizes that the user has left at "auto"; they have the values that they have without a plan.
    unset: tuple[str, ...] = ()

    @classmethod
    def names(cls) -> list[str]:
        """The names of the strategy's arguments that are options."""
        return [*_SIZES, *(field.name for field in fields(cls) if field.name not in ("sizes", "unset"))]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Pick the options from all arguments of the strategy, by their names."""
        names = {*cls.names()} - {*_SIZES}
        unset = tuple(name for name in _UNPLANNED if _is_auto(arguments[name]))
        values = {name: _UNPLANNED[name] if name in unset else arguments[name] for name in names}
        values["schedule"] = _schedule_name(values["schedule"])
        if isinstance(values["compile"], bool):
            values["compile"] = "units" if values["compile"] else None
        if values["reshard_after_forward"] is None:
            values["reshard_after_forward"] = True
        return cls(sizes={name: arguments[name] for name in _SIZES}, unset=unset, **values)

    def changed(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options, by the names of the strategy's arguments, that the user has set, or that were planned.

        They are in the order of ``defaults``. An option that is set to its default is as if left out.
        """
        values = {**{field.name: getattr(self, field.name) for field in fields(self)}, **self.sizes}
        defaults = {name: _UNPLANNED[name] if name in self.unset else value for name, value in defaults.items()}
        options = {name: default for name, default in defaults.items() if name in values}
        # Values of one type alone are compared: a batch of tensors has no single truth value.
        return {n: values[n] for n, d in options.items() if type(values[n]) is not type(d) or values[n] != d}

    def __post_init__(self) -> None:
        """Refuse options that no number of devices can fulfil."""
        self._check_sizes()
        self._check_plan()
        self._check_zero()
        check_recompute(self.recompute)
        self._check_techniques()
        self._check_schedule()
        if self.num_microbatches != "auto" and not is_count(self.num_microbatches):
            raise ValueError(f"num_microbatches={self.num_microbatches!r}; use 'auto' or a whole number of 1 or more")
        if self.microbatch not in (None, "auto"):
            raise ValueError(
                f"microbatch={self.microbatch!r}; use 'auto' for the largest microbatch that fits into memory, or set"
                " num_microbatches"
            )
        cuts = self.pipeline_cuts
        if cuts is not None and (isinstance(cuts, str) or not all(isinstance(name, str) for name in cuts)):
            raise TypeError(
                f"pipeline_cuts={cuts!r}; use a list with the name of the first module of each stage but the"
                " first, such as ['model.layers.4']"
            )
        if self.batch_splitter is not None and not callable(self.batch_splitter):
            raise TypeError(
                f"batch_splitter={self.batch_splitter!r}; use function(batch, count) -> list of microbatches"
            )
        if self.microbatch_weight is not None and not callable(self.microbatch_weight):
            raise TypeError(f"microbatch_weight={self.microbatch_weight!r}; use function(microbatch) -> count")
        if self.tensor_parallel_plan is not None:
            from lightning_hybrid.tensor.search.requests import check_styles

            check_styles(self.tensor_parallel_plan)
        compile_options(self.compile)
        for field in fields(self):
            if field.type == "bool" and not isinstance(value := getattr(self, field.name), bool):
                raise TypeError(f"{field.name}={value!r}; use True or False")
        if not isinstance(self.chunked_loss, bool) and not (is_count(self.chunked_loss) and self.chunked_loss > 1):
            raise ValueError(f"chunked_loss={self.chunked_loss!r}; use True, False or a number of chunks of 2 or more")
        if not is_count(self.expert_chunks):
            raise ValueError(f"expert_chunks={self.expert_chunks!r}; use a whole number of 1 or more")
        if self.async_checkpoint and not self.save_distributed_checkpoint:
            raise ValueError(
                "async_checkpoint=True writes distributed checkpoints while training goes on, and"
                " save_distributed_checkpoint=False requests one file; set save_distributed_checkpoint=True, or pass"
                " Lightning's Trainer(plugins=[AsyncCheckpointIO()])"
            )
        _check_processes(self.process_group_backend, self.timeout, self.start_method)

    def _check_schedule(self) -> None:
        if self.schedule not in SCHEDULE_NAMES:
            near = meant(str(self.schedule), SCHEDULE_NAMES)
            raise ValueError(f"schedule={self.schedule!r} is unknown; use one of {', '.join(SCHEDULE_NAMES)}{near}")
        if not is_count(self.stages_per_rank):
            raise ValueError(f"stages_per_rank={self.stages_per_rank!r}; use a whole number of 1 or more")
        limit = self.max_microbatches_in_flight
        if limit is not None and not is_count(limit):
            raise ValueError(
                f"max_microbatches_in_flight={limit!r}; use a whole number of 1 or more, or None for the number of"
                " pipeline ranks"
            )
        # Refuses what the schedule cannot be with any number of ranks.
        make_schedule(self.schedule, 1, 1, self.stages_per_rank, max_in_flight=limit)
        check_widths(
            self.stage_widths,
            self.sizes["pipeline_parallel_size"],
            self.schedule,
            self.stages_per_rank,
            is_planned=self.asks_for_plan,
        )

    def _check_sizes(self) -> None:
        for name, size in self.sizes.items():
            if not is_count(size) and size != "auto":
                raise LayoutError(f"{name}={size!r}; use 'auto' or a whole number of 1 or more", entry="size-type")
        if not is_count(self.spatial_parallel_size):
            given = f"spatial_parallel_size={self.spatial_parallel_size!r}"
            raise LayoutError(f"{given}; use a whole number of 1 or more", entry="size-type")
        if self.spatial_parallel_size > 1:
            self._check_spatial()
        tensor = self.sizes["tensor_parallel_size"]
        if self.sequence_parallel and (tensor == 1 or (tensor == "auto" and not self.asks_for_plan)):
            raise ValueError(
                "sequence_parallel=True shards positions over the ranks of tensor parallelism, and"
                f" tensor_parallel_size={tensor!r}; set tensor_parallel_size=2 or more, or context_parallel_size to"
                " shard sequences alone"
            )

    def _check_spatial(self) -> None:
        given = {**self.sizes, "compile": self.compile}
        for name in ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "compile"):
            if given[name] not in (1, "auto", None):
                raise ValueError(
                    f"spatial_parallel_size={self.spatial_parallel_size} shards images, and layers under"
                    f" {name}={given[name]!r} would gather them; leave one of the two out"
                )

    def _check_plan(self) -> None:
        if self.objective not in (None, "throughput", "largest_batch"):
            raise ValueError(
                f"objective={self.objective!r}; use 'throughput' or 'largest_batch': a run uses all devices of its"
                " Trainer, and the command lightning-hybrid plan finds the fewest"
            )
        if self.max_memory is not None and parse_budget(self.max_memory) is None:
            raise ValueError(f"max_memory={self.max_memory!r}; use {SPELLINGS}")
        if not self.has_auto_sizes and (self.max_memory is not None or self.objective is not None):
            what = f"max_memory={self.max_memory!r}" if self.max_memory is not None else f"objective={self.objective!r}"
            raise ValueError(
                f"{what} is for sizes that are planned, and each of {', '.join(_SIZES[1:])} is a number; leave one of"
                " them out, or set it to 'auto'"
            )

    @property
    def has_auto_sizes(self) -> bool:
        """Whether a size beside the data axis is left to the planner, and not planned yet."""
        return any(self.sizes[name] == "auto" for name in _SIZES[1:])

    @property
    def asks_for_plan(self) -> bool:
        """Whether the user requests a plan for sizes that are "auto", which otherwise is made if memory is short."""
        return self.has_auto_sizes and (self.objective is not None or self.max_memory is not None)

    @property
    def may_be_planned(self) -> bool:
        """Whether sizes that are "auto" may become others than 1: a plan is requested, or no layout is set."""
        return self.has_auto_sizes and (self.asks_for_plan or not self.sets_layout)

    @property
    def sets_layout(self) -> bool:
        """Whether the user has set a size, or shards or offloads states."""
        sizes = any(size != "auto" for size in self.sizes.values())
        others = self.spatial_parallel_size > 1 or self.stage_widths is not None or self.offload is not None
        return sizes or others or bool(self.zero_stage)

    def with_planned(self, planned: Mapping[str, Any]) -> Options:
        """Return the options with the planned ones, by the names of the strategy's arguments."""
        sizes = {name: planned.get(name, size) for name, size in self.sizes.items()}
        others = {name: value for name, value in planned.items() if name not in sizes}
        return replace(self, sizes=sizes, objective=None, max_memory=None, **others)

    def _check_techniques(self) -> None:
        for each in self.techniques or ():
            if not callable(getattr(each, "build", None)) or isinstance(each, type):
                raise TypeError(
                    f"techniques has {each!r}; use objects of a class like lightning_hybrid.techniques.LayerTechnique"
                )
        if self.techniques and self.verify_first_step:
            raise ValueError(
                "verify_first_step=True compares the first step with one process, which does not know"
                f" {type(self.techniques[0]).__name__}; leave one of the two out"
            )

    def _check_zero(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3) or isinstance(self.zero_stage, bool):
            raise ValueError(
                f"zero_stage={self.zero_stage!r}; use 0 (replicas), 1 (optimizer states are sharded), 2 (gradients"
                " too) or 3 (parameters too)"
            )
        if self.shard_size is not None:
            if not is_count(self.shard_size):
                raise LayoutError(
                    f"shard_size={self.shard_size!r}; use None for all replicas, or a whole number", entry="shard-size"
                )
            if not self.zero_stage:
                raise ValueError(
                    f"shard_size={self.shard_size} is the number of replicas that one copy is sharded over, and"
                    " zero_stage=0 shards nothing; set zero_stage=1, 2 or 3"
                )
        self._check_reshard()
        for what, least, stages in (("parameters", 3, "3"), ("gradients", 1, "1, 2 or 3")):
            if isinstance(self.offload, Mapping) and what in self.offload and self.zero_stage < least:
                raise ValueError(
                    f"offload={dict(self.offload)!r}: {what} are offloaded while no layer needs them, which needs"
                    f" replicas that shard them; set zero_stage={stages}, or leave {what!r} out"
                )
        _ = self.offloaded

    def check_replicas(self, layout: ParallelLayout) -> None:
        """Refuse to shard over one replica; of a run that trains.

        Raises:
            LayoutError: Shards are of one replica.
        """
        if not self.zero_stage or layout.data_shard_size > 1:
            return
        ranks, others = layout.world_size, [layout.option(axis) for axis in SIZE_OPTIONS if layout.by_axis[axis] > 1]
        of = f" with {', '.join(others)}" if others else ""
        why = f"{counted(ranks, 'device')}{of} make{'s' * (ranks == 1)} 1 replica; use {2 * ranks} devices"
        if layout.data_parallel_size > 1:
            why = f"shard_size=1 makes shards of 1 replica of {layout.data_parallel_size}; leave shard_size out"
        raise LayoutError(
            f"zero_stage={self.zero_stage} shards the state of a model over replicas, and {why}, or set zero_stage=0",
            entry="zero-replicas",
        )

    def _check_reshard(self) -> None:
        given: Any = self.reshard_after_forward
        if isinstance(given, bool) or given == "auto":
            return
        if isinstance(given, int):
            raise ValueError(
                f"reshard_after_forward={given}: a layer is not sharded over fewer ranks between its forward and its"
                f" backward; set shard_size={given} to shard over so many at all times, and reshard_after_forward to"
                " True, False or 'auto'"
            )
        raise ValueError(f"reshard_after_forward={given!r}; use True, False, None (True) or 'auto'")

    @property
    def offloaded(self) -> dict[str, str]:
        """Storage of offloaded "parameters", "gradients" and "optimizer_states": "cpu" or "disk:PATH"."""
        given = self.offload
        if given is None:
            return {}
        if isinstance(given, str):
            given = {"optimizer_states": given}
            if self.offload == "cpu" and self.zero_stage:
                given["gradients"] = "cpu"
            if self.offload == "cpu" and self.zero_stage == 3:
                given["parameters"] = "cpu"
        for what, where in given.items() if isinstance(given, Mapping) else [(given, None)]:
            is_file = str(where).startswith("disk:") and len(where) > len("disk:")
            may_be_file = is_file and what != "gradients"
            if what not in ("parameters", "gradients", "optimizer_states") or (where != "cpu" and not may_be_file):
                raise ValueError(
                    f"offload={self.offload!r}; use 'cpu', 'disk:PATH', or a mapping such as"
                    " {'optimizer_states': 'cpu'} (lightning-hybrid explain-error offload-option)"
                )
        return dict(given)

    @property
    def stages_of_each_rank(self) -> int:
        """The stages per rank: two where the schedule always has two, and no other number is set."""
        return stages_of_each_rank(self.schedule, self.stages_per_rank)

    @property
    def mesh_sizes(self) -> dict[str, int | Literal["auto", "all"]]:
        """The sizes of the layout; those left to the planner are 1 unless it has set them."""
        sizes = {n: 1 if size == "auto" and n != "data_parallel_size" else size for n, size in self.sizes.items()}
        if not isinstance(self.stage_widths, str | None):
            sizes["pipeline_parallel_size"] = sum(self.stage_widths)
        if self.spatial_parallel_size > 1:  # its ranks read the same samples, as context ranks do
            sizes["context_parallel_size"] = self.spatial_parallel_size
        shard: int | Literal["all"] = 1
        if self.zero_stage:
            shard = "all" if self.shard_size is None else self.shard_size
        return {**sizes, "data_shard_size": shard}

    @property
    def microbatches(self) -> int | None:
        """The count that the user set; None for "auto"."""
        return None if self.num_microbatches == "auto" else self.num_microbatches


def _check_processes(backend: Any, timeout: Any, start_method: Any) -> None:
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"process_group_backend={backend!r}; use 'nccl', 'gloo' or None")
    known = dist.Backend.backend_list
    unknown = [part for part in (backend or "").split(",") if part and part.split(":")[-1].lower() not in known]
    if unknown or backend == "":
        raise ValueError(f"process_group_backend={backend!r} is unknown; use 'nccl', 'gloo' or None (by device)")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r}; use datetime.timedelta(minutes=30), say, or None for torch's own")
    if timeout is not None and timeout <= timedelta():
        raise ValueError(f"timeout={timeout!r} is not positive; use more than 0 seconds")
    if start_method not in ("popen", "fork"):
        raise ValueError(
            f"start_method={start_method!r} is unknown; use 'popen' (the script runs once per device) or 'fork' (for"
            " notebooks)"
        )


def compile_options(compile: Any) -> dict[str, Any] | None:
    """Return the options of ``torch.compile`` for the argument ``compile``; None where nothing is compiled.

    Raises:
        ValueError: It is neither "units", a mapping nor None, or has options that ``torch.compile`` does not know.
    """
    if compile is None:
        return None
    if compile == "units":
        return {}
    if not isinstance(compile, Mapping):
        raise ValueError(
            f"compile={compile!r}; use None, 'units', or a mapping with options of torch.compile for the units:"
            f" {', '.join(_COMPILE_OPTIONS)}"
        )
    if unknown := sorted(str(name) for name in compile if name not in _COMPILE_OPTIONS):
        raise ValueError(
            f"compile={dict(compile)!r} has {', '.join(unknown)}; allowed are {', '.join(_COMPILE_OPTIONS)}"
        )
    options = {name: value for name, value in compile.items() if value is not None}
    allowed: dict[str, list[Any]] = {"dynamic": [True, False], "fullgraph": [True, False]}
    if isinstance(options.get("backend"), str):
        allowed["backend"] = torch.compiler.list_backends(())
    if options.get("backend", "inductor") == "inductor" and "mode" in options:
        allowed["mode"] = list(torch._inductor.list_mode_options())
    for name, values in allowed.items():
        if name in options and options[name] not in values:
            raise ValueError(f"compile={{{name!r}: {options[name]!r}}} is unknown; allowed are {_listed(values)}")
    if "mode" in options and "options" in options:
        raise ValueError("compile has both a mode and options; torch.compile takes one of them")
    return options


_COMPILE_OPTIONS = ("backend", "mode", "dynamic", "fullgraph", "options")


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _schedule_name(schedule: Any) -> Any:
    """Return the schedule that is meant, also where it is written as in papers and in torch: 1F1B, Interleaved1F1B."""
    plain = str(schedule).lower().replace("_", "").replace("-", "")
    return next((name for name in SCHEDULE_NAMES if name.replace("_", "") == plain), schedule)


MicrobatchWeight = Callable[[Any], float]


def weigh_by_count(microbatches: Sequence[Any], count: MicrobatchWeight, mesh: Mesh) -> list[float]:
    """Return weights that make the mean over microbatches and replicas the mean over what ``count`` counts.

    Gradients are averaged over the replicas afterwards, so a replica's weights sum to its share of the count times the
    number of replicas. ``count`` returns a number or a tensor of one element.

    Raises:
        BatchError: The full batch counts 0, or a count is negative or not finite.
    """
    counts = torch.tensor([float(count(microbatch)) for microbatch in microbatches], dtype=torch.float64)
    if not bool(torch.isfinite(counts).all()) or bool((counts < 0).any()):
        raise BatchError(
            f"microbatch_weight gave {counts.tolist()}; each must be a finite number of 0 or more",
            entry="microbatch-weight",
        )
    total = mesh.all_reduce(counts.sum().to(mesh.device_mesh.device_type), "data")
    if float(total) == 0:
        raise BatchError(
            f"microbatch_weight gave 0 for all {len(microbatches)} microbatches; nothing is left to average",
            entry="microbatch-weight",
        )
    weights: list[float] = (counts * mesh.size("data") / float(total)).tolist()
    return weights
