"""The ``hybrid3d`` strategy: Lightning's hooks, translated to the floors below."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision

from lightning_hybrid.memory.recompute import Recompute
from lightning_hybrid.step.batch.microbatch import BatchSplitter
from lightning_hybrid.strategies.layout_changes import ChangingStrategy
from lightning_hybrid.strategies.options.microbatch_weights import MicrobatchWeight
from lightning_hybrid.strategies.options.strategy_options import Options
from lightning_hybrid.strategies.run_setup import SetUpStrategy


class Hybrid3DStrategy(ChangingStrategy):
    """Trains an unmodified LightningModule over data-parallel replicas and pipeline stages.

    The user's ``training_step`` is recorded once without parameters, cut into stages of equal cost, and run on each
    rank with only its stage's arithmetic; losses, gradients and parameters are those of one process.

    Args:
        data_parallel_size: Replicas that see different batches; "auto" takes all ranks that are left.
        tensor_parallel_size: Ranks that share each layer; how layers are cut is found, and proved, at the start.
        pipeline_parallel_size: Ranks that share the layers.
        context_parallel_size: Ranks that share the positions of each sequence, layer by layer; each of them may be
            several tensor ranks.
        expert_parallel_size: Ranks that share the experts of each layer that has some, and send each other the rows of
            their tokens: context ranks first, then replicas; divides ``data_parallel_size * context_parallel_size``.
        expert_chunks: Parts in which the experts of a rank are run, so that rows of one travel while another is
            computed.
        sequence_parallel: Between the parts that tensor ranks share, each works on its own positions of the sequence,
            or of what its context rank has of it.
        num_microbatches: Parts that each replica's batch is split into; "auto" is 1 without stages and at most
            four times the number of stages with them.
        schedule: "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b" or "zero_bubble".
        stages_per_rank: Stages that each pipeline rank holds; more than one makes 1F1B interleaved.
        pipeline_cuts: FQNs of the first unit of each stage but the first; balanced by cost if None.
        batch_splitter: ``function(batch, count) -> list of microbatches`` for batches that are no trees of tensors.
        zero_stage: What replicas share out instead of each holding all of it (ZeRO): 1 optimizer states, 2 gradients
            too, 3 parameters too; 0 nothing.
        shard_size: Replicas that share one copy; others hold further copies. All of them if None.
        reshard_after_forward: Whether each layer's parameters are gathered for its forward and its backward alone, and
            its gradients reduced for each microbatch, or all of them once per step; "auto" by the memory that is free.
        offload: What is not on the device while no step needs it: "cpu" for all that replicas share out, and the
            optimizer's states in any case; "disk:PATH" for optimizer states in files under a folder; or a mapping of
            any of "parameters", "gradients" and "optimizer_states" to these.
        recompute: Layers that are computed again in the backward: "full" for all, which keep their inputs alone; n for
            every n-th; names with wildcards; "selective" for all, which keep what is dear to compute, or the share of
            bytes that these keep, such as 0.3 ("selective" is 0.4); or a mapping of names to such policies or "keep".
        microbatch_weight: ``function(microbatch) -> count`` by which microbatches (and replicas) are weighted, such as
            the number of unmasked tokens. If None, means over tokens are those of each replica's whole batch, and
            everything else is weighted by numbers of samples.
        tensor_parallel_plan: How linears are cut, by patterns of their names, such as
            ``{"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}``; what it does not
            name goes by the model's own plan (``tp_plan`` of transformers) or is searched, and all is proved.
        compile: "units" runs each layer through ``torch.compile``; a mapping does too, with its options (``backend``,
            ``mode``, ``dynamic``, ``fullgraph``, ``options``), such as ``{"backend": "inductor", "dynamic": False}``.
        example_batch: A batch to record the step with, where drawing one from the loader before the run is unsafe.
        save_distributed_checkpoint: Checkpoints are folders in which every rank writes its own bytes; one ordinary
            file, written by the first rank, if False. Either is loaded under any layout.
        async_checkpoint: Training goes on while a distributed checkpoint is written.
        verify_first_step: Runs the first optimizer step in one process too, on the first rank, and stops before any
            parameter changes if a loss or gradient is another one there.
        strict_layout: A step that cannot be run by stages is an error; otherwise the ranks of a pipeline then hold
            shards of all parameters, gradients and optimizer states, and each runs the step on a share of the batch.
        process_group_backend: "nccl" or "gloo"; by device if None.
        timeout: Of collective operations.
        start_method: "popen" runs the script once per device; "fork" serves notebooks.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in Lightning's own.

    Raises:
        LayoutError: Sizes that do not multiply to the world size.
        ValueError: An unknown schedule, or an option that needs what is not there.
    """

    strategy_name = "hybrid3d"

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "1f1b",
        stages_per_rank: int = 1,
        pipeline_cuts: Sequence[str] | None = None,
        batch_splitter: BatchSplitter | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        *,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        expert_chunks: int = 1,
        sequence_parallel: bool = False,
        zero_stage: Literal[0, 1, 2, 3] = 0,
        shard_size: int | None = None,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        offload: str | dict[str, str] | None = None,
        recompute: Recompute | None = None,
        microbatch_weight: MicrobatchWeight | None = None,
        tensor_parallel_plan: dict[str, str] | None = None,
        compile: Literal["units"] | dict[str, Any] | None = None,
        example_batch: Any = None,
        save_distributed_checkpoint: bool = False,
        async_checkpoint: bool = False,
        verify_first_step: bool = False,
        strict_layout: bool = False,
        start_method: Literal["popen", "fork"] = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        options = Options(
            sizes={
                "data_parallel_size": data_parallel_size,
                "tensor_parallel_size": tensor_parallel_size,
                "pipeline_parallel_size": pipeline_parallel_size,
                "context_parallel_size": context_parallel_size,
                "expert_parallel_size": expert_parallel_size,
            },
            num_microbatches=num_microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            pipeline_cuts=pipeline_cuts,
            batch_splitter=batch_splitter,
            sequence_parallel=sequence_parallel,
            zero_stage=zero_stage,
            shard_size=shard_size,
            reshard_after_forward=reshard_after_forward,
            offload=offload,
            recompute=recompute,
            microbatch_weight=microbatch_weight,
            tensor_parallel_plan=tensor_parallel_plan,
            compile=compile,
            example_batch=example_batch,
            expert_chunks=expert_chunks,
            save_distributed_checkpoint=save_distributed_checkpoint,
            async_checkpoint=async_checkpoint,
            strict_layout=strict_layout,
        )
        super().__init__(
            options=options,
            verify_first_step=verify_first_step,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def __getstate__(self) -> dict[str, Any]:
        """What was asked for, and what a Trainer has connected; process groups, and the rest of a run, stay here."""
        state: dict[str, Any] = super().__getstate__()
        asked = SetUpStrategy(
            options=self.options,
            verify_first_step=self._verify_first_step,
            process_group_backend=self._process_group_backend,
            timeout=self._timeout,
            start_method=self._start_method,
        )
        return state | {name: value for name, value in vars(asked).items() if name not in self._connected | {"_empty"}}
