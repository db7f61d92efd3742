"""The ``hybrid3d`` strategy: Lightning's hooks, translated to calls of the objects that make up a run."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import reprlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_hybrid.batch.split import BatchSplitter
from lightning_hybrid.layout import Objective
from lightning_hybrid.memory.recompute.policies import Recompute
from lightning_hybrid.pipeline.stages.training import ActionRecorder
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.run.checkpointed import CheckpointedStrategy
from lightning_hybrid.run.execution.lifecycle import RunLifecycle
from lightning_hybrid.run.run import Run
from lightning_hybrid.run.setting import needs_runner
from lightning_hybrid.schedule import Action, Kind, Span
from lightning_hybrid.strategies.options.foreign import ForeignKeywords, refuse_foreign
from lightning_hybrid.strategies.options.options import MicrobatchWeight, Options
from lightning_hybrid.strategies.private_names import check_private_names
from lightning_hybrid.strategies.start.callbacks import check_callbacks
from lightning_hybrid.strategies.start.empty_init import move_to_device
from lightning_hybrid.techniques.technique import Technique

check_private_names()
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_OF_LIGHTNING = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")


class Hybrid3DStrategy(CheckpointedStrategy):
    """Trains an unmodified LightningModule over data-parallel replicas and pipeline stages.

    The user's ``training_step`` is recorded once, partitioned into stages of equal cost, and run on each rank with only
    its stage's arithmetic; losses, gradients and parameters match single-process training.

    Args:
        data_parallel_size: Replicas, each with its own batches; "auto" takes all remaining ranks.
        tensor_parallel_size: Ranks that share each layer. How to split a layer is worked out at the start; a split is
            used only after a numerical check. For this and the sizes below "auto" means 1, except when (a)
            ``objective`` or ``max_memory`` is set, or (b) you set no layout and the model's states would fill more than
            half a device. Then the planner chooses whatever is "auto": these sizes, ``zero_stage``, recomputation.
        pipeline_parallel_size: Ranks that the layers are divided over, as pipeline stages.
        context_parallel_size: Ranks that share the positions of each sequence in all of a layer.
        spatial_parallel_size: Ranks that share the rows of each image, volume and feature map.
        expert_parallel_size: Ranks that share a layer's experts and exchange token rows: context ranks, then replicas.
        expert_chunks: Chunks in which the experts of a rank run; the rows of one are sent while another is computed.
        sequence_parallel: Shards the sequence over tensor ranks between sharded regions. "auto": False unless planned.
        num_microbatches: Microbatches of each replica's batch. "auto" is 1 without stages, and at most four times the
            number of stages with them.
        microbatch: "auto" finds the largest microbatch that fits. A training step in which a rank runs out of memory is
            run again with twice as many microbatches, from ``num_microbatches`` on.
        schedule: Order of forwards and backwards in the pipeline: "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b",
            "zero_bubble", "zero_bubble_v", "dualpipe_v" or "zero_bubble_searched". "auto" is "1f1b" unless planned.
        stages_per_rank: Stages that each pipeline rank holds. More than one makes 1F1B interleaved; "zero_bubble_v" and
            "dualpipe_v" always have two. "auto" is 1 unless planned.
        max_microbatches_in_flight: Microbatches whose activations a rank may hold under "zero_bubble_searched". None is
            the number of pipeline ranks, as under 1F1B.
        pipeline_cuts: Names of the module that each stage but the first starts with. None balances them by cost.
        stage_widths: Ranks that take turns at each stage's microbatches, such as [3, 1], or "auto". None is one each.
        batch_splitter: ``function(batch, count) -> microbatches``, for batches that are no containers of tensors.
        zero_stage: What is sharded over replicas (ZeRO): 1 optimizer states, 2 gradients too, 3 parameters too, 0
            nothing. "auto" is 0 unless planned.
        shard_size: Replicas that one copy is sharded over; others hold further copies. None is all, unless planned.
        reshard_after_forward: When sharded parameters are gathered, as in FSDP2. True gathers each layer's for its
            forward and again for its backward, and reduces its gradients then, for each microbatch; False gathers and
            reduces all once per step. None is True; "auto" is False where enough memory is free.
        offload: What is kept off the device between uses: "cpu" for all that replicas shard, and the optimizer's states
            in any case; "disk:PATH" for optimizer states in files under a folder; or a mapping of any of "parameters",
            "gradients" and "optimizer_states" to these. None, and "auto" unless planned, is nothing.
        optimizer_in_backward: Steps a layer within the backward, once its gradients are averaged, and frees these.
        recompute: Layers that are recomputed in the backward: "full" for all, which save their inputs alone; n for
            every n-th; names with wildcards, or classes, of modules, each recomputed as one; "selective" for all, which
            save the results of expensive operations, or the share of bytes that these save, such as 0.3 ("selective" is
            0.4); or a mapping of names or classes to such policies or "keep". A budget such as "6GiB", or "50%" of the
            free memory, is what this rank may use in total; the least recomputation under it is chosen once the
            optimizer has stepped twice. None, and "auto" unless planned, is no layer.
        chunked_loss: Computes a cross entropy over the vocabulary in chunks of positions, without the logits of the
            full batch: True for chunks of 256 to 512 positions (on GPUs 1,024 to 2,048), by the width, or the number of
            chunks. "auto" is False unless planned.
        microbatch_weight: ``function(microbatch) -> count`` by which microbatches (and replicas) are weighted, such as
            the number of unmasked tokens. If None, means over tokens are those of each replica's full batch, and
            everything else is weighted by numbers of samples.
        tensor_parallel_plan: How linears are sharded, by patterns of their names. The others follow the model's own
            plan (``tp_plan`` of transformers) or are searched. Every split is checked numerically.
        compile: Runs each layer through ``torch.compile``: "units" or True, or a mapping of its options (``backend``,
            ``mode``, ``dynamic``, ``fullgraph``, ``options``).
        techniques: Your own techniques (`lightning_hybrid.techniques`), the outermost around a layer first.
        example_batch: A batch to record the step with, where drawing one from the loader before the run is unsafe.
        save_distributed_checkpoint: Writes checkpoints as folders, each rank its own bytes. If False, the first rank
            writes one ordinary file. Either is loaded under any layout.
        async_checkpoint: Goes on training while a distributed checkpoint is written.
        check_digests: Compares each file of a distributed checkpoint with the digest of its manifest when it is loaded.
        verify_first_step: Runs the first optimizer step in one process too, on the first rank, and stops before any
            parameter changes if a loss or gradient differs.
        strict_layout: Makes a step that cannot be run in stages, and a layer that tensor ranks do not divide, an error.
            Otherwise the ranks of a pipeline then hold shards of all parameters, gradients and optimizer states, and
            each runs the step on a share of the batch; the start table warns of such a layer.
        objective: What the planner seeks where sizes are "auto": "throughput", the most samples per second, or
            "largest_batch", the most samples that are computed at a time. None is "throughput", if memory is short.
        max_memory: Memory of each device that the planner may use where sizes are "auto", such as "20GiB" or "80%".
        process_group_backend: "nccl" or "gloo"; by device if None. gloo sends no tensors of a GPU.
        timeout: How long a collective may take before the run is aborted.
        start_method: How the ranks start: "popen" runs the script once per device; "fork" serves notebooks.
        accelerator: As in Lightning's own strategies, as are the next three; the Trainer sets it.
        parallel_devices: One device for each rank of the node.
        cluster_environment: How ranks find each other; found by the Trainer if None.
        checkpoint_io: How files of checkpoints are written and read.
        precision_plugin: The precision; converted to `HybridPrecision` if it is Lightning's own.
        **foreign: Keywords of FSDP, DDP, accelerate and DeepSpeed, each refused with what to set here.

    Raises:
        LayoutError: Sizes that do not multiply to the world size.
        TypeError: A keyword that is no option.
        ValueError: A keyword of another library, an unknown schedule, or an option that needs another which is not set.
    """

    strategy_name = "hybrid3d"

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "auto",
        stages_per_rank: int | Literal["auto"] = "auto",
        pipeline_cuts: Sequence[str] | None = None,
        batch_splitter: BatchSplitter | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        *,
        microbatch: Literal["auto"] | None = None,
        context_parallel_size: int | Literal["auto"] = "auto",
        spatial_parallel_size: int = 1,
        stage_widths: Sequence[int] | Literal["auto"] | None = None,
        expert_parallel_size: int | Literal["auto"] = "auto",
        expert_chunks: int = 1,
        max_microbatches_in_flight: int | None = None,
        sequence_parallel: bool | Literal["auto"] = "auto",
        zero_stage: Literal[0, 1, 2, 3, "auto"] = "auto",
        shard_size: int | None = None,
        reshard_after_forward: bool | Literal["auto"] | None = "auto",
        offload: str | dict[str, str] | Literal["auto"] | None = "auto",
        optimizer_in_backward: bool = False,
        recompute: Recompute | Literal["auto"] | None = "auto",
        chunked_loss: bool | int | Literal["auto"] = "auto",
        microbatch_weight: MicrobatchWeight | None = None,
        tensor_parallel_plan: dict[str, str] | None = None,
        compile: Literal["units"] | bool | dict[str, Any] | None = None,
        techniques: Sequence[Technique] | None = None,
        example_batch: Any = None,
        save_distributed_checkpoint: bool = False,
        async_checkpoint: bool = False,
        check_digests: bool = True,
        verify_first_step: bool = False,
        strict_layout: bool = False,
        objective: Objective | None = None,
        max_memory: str | None = None,
        start_method: Literal["popen", "fork"] = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **foreign: Unpack[ForeignKeywords],
    ) -> None:
        arguments = dict(locals())
        refuse_foreign(foreign, OPTION_DEFAULTS)
        super().__init__(Options.of(arguments), **{name: arguments[name] for name in _OF_LIGHTNING})
        self._lifecycle: RunLifecycle | None = None
        self._evaluated = itertools.count(1)  # numbers batches of evaluation over all runs

    def __repr__(self) -> str:
        """The class with the options that differ from their defaults; long values are shortened."""
        changed = self.options.changed(OPTION_DEFAULTS)
        return f"{type(self).__name__}({', '.join(f'{name}={_SHORT.repr(value)}' for name, value in changed.items())})"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the options and what a Trainer has connected, without process groups or a run."""
        return {**super().__getstate__(), "_lifecycle": None, "_evaluated": itertools.count(1)}

    # -- a run --------------------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The run under its present layout; a RuntimeError before `setup`."""
        return self._active.run

    @property
    def spans(self) -> list[Span]:
        """Actions of this rank in the latest training step, with their times; waits for a CUDA device.

        There it is empty unless an object in ``recorder.time_readers``, such as a `PipelineTimeline`, reads the step.
        """
        return self.recorder.spans(self.mesh.rank_in("pp"))

    @property
    def recorder(self) -> ActionRecorder:
        """Records the actions of training steps."""
        return self._active.execution.recorder

    @property
    def pipelined_batches(self) -> tuple[int, int | None]:
        """The first training batch in stages, and the first after them without; (0, None) while nothing changes."""
        return self._active.changes.pipelined_batches

    @property
    def _active(self) -> RunLifecycle:
        if self._lifecycle is None:
            self.check_not_forked("run")
            raise RuntimeError("no run has been set up; read it in on_fit_start() or later")
        return self._lifecycle

    def make_full(self, *, for_run: bool = True) -> None:
        """Gather the full module on every rank; collective. At the end it may stay on the host, or in shards."""
        if self._state is not None:
            self._state.make_full(for_run=for_run)

    def setup_environment(self) -> None:
        """Join the process groups, and start to watch for failures of ranks."""
        if self.options.asks_for_plan or needs_runner(self.options, self.layout):
            HybridPrecision.of(self.precision_plugin)  # refuses plugins that several ranks cannot run
        super().setup_environment()
        if (module := self.lightning_module) is None:
            return
        is_recorded = needs_runner(self.options, self.layout)
        self._lifecycle = None
        self.connect_state(module)
        if module._trainer is not None:
            check_callbacks(module._trainer, self.world.mesh, is_recorded=is_recorded)
            self.world.watch_failures(module._trainer)
            self._files.check(self._checkpoint_io)

    def setup(self, trainer: pl.Trainer) -> None:
        """Synchronize the ranks, record and partition the step, drop other stages, build optimizers."""
        module, state = self.lightning_module, self._state
        assert self.accelerator is not None and self.model is not None and module is not None and state is not None
        self.accelerator.setup(trainer)
        self._lifecycle = run = RunLifecycle(
            trainer, module, self, state=state, files=self._files, recompute=self._recompute, evaluated=self._evaluated
        )
        empty = self._adopt_empty_init()
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if run.begin(empty):
            self._empty = None
        if run.setting.is_fitting:
            run.connect_optimizers()
        self.setup_precision_plugin()
        run.move_optimizers()

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.lightning_module is not None
        move_to_device(self.lightning_module, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        """Report the error to the other ranks, and join no further collectives."""
        if self._state is not None:
            self._state.fail()
        if self._lifecycle is not None:
            self._lifecycle.explain(exception)
        super().on_exception(exception)
        # What is being written does not need the ranks that failed: it was all copied.
        self._files.finish_after_failure()

    def teardown(self) -> None:
        """Leave a full module behind on every rank."""
        if self._lifecycle is not None:
            self._lifecycle.end()
        self.close_world(moves_module=self._state is None or self._state.can_be_moved)
        self._files.close(in_shards=self._state is not None and not (self._state.is_full or self._state.has_failed))

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Check the run's schedules and searches before its first batch."""
        self._active.on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Change the layout, after hooks of the user, if this batch requires another."""
        self._active.changes.on_train_batch_start(batch, batch_idx)

    def on_train_end(self) -> None:
        """Announce the layout of a run that was too short to try the step again."""
        self._active.changes.on_train_end()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the full schedule, forward and backward; the later ``backward`` hands the gradients over."""
        if self._lifecycle is None:  # used without a run
            return super().training_step(*args, **kwargs)
        return self._lifecycle.execution.training_step([*args, *kwargs.values()])

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward-only schedule."""
        return self._evaluate("validation_step", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward-only schedule."""
        return self._evaluate("test_step", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward-only schedule; the predictions reach every rank of the pipeline."""
        return self._evaluate("predict_step", super().predict_step, args, kwargs)

    def _evaluate(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._lifecycle is None:
            return plain(*args, **kwargs)
        return self._lifecycle.execution.evaluate(name, [*args, *kwargs.values()])

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run Lightning's backward of a scalar loss; gradients are averaged before hooks see them, as in DDP."""
        if self._lifecycle is None:
            return super().backward(*args, **kwargs)
        return self._lifecycle.execution.backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step, with the training step inside."""
        if self._lifecycle is None:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        closure = self._lifecycle.checked_closure(optimizer, closure)
        step = partial(super().optimizer_step, optimizer, closure, *args, **kwargs)
        result = self._lifecycle.changes.optimizer_step(step)
        self.recorder.add_since_last(Action(Kind.OPTIMIZER, 0))
        return result

    def block_backward_sync(self) -> Any:
        """Accumulate local gradients inside, without averaging them."""
        return contextlib.nullcontext() if self._lifecycle is None else self._lifecycle.execution.accumulating()


_PARAMETERS = inspect.signature(Hybrid3DStrategy.__init__).parameters.values()
OPTION_DEFAULTS = {
    parameter.name: parameter.default for parameter in _PARAMETERS if parameter.default is not parameter.empty
}
