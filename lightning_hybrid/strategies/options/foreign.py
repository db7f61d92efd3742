"""Keywords of other libraries: the strategy refuses each with what to set here."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from lightning_hybrid.text import meant

_ALWAYS = "leave it out: it is always so"
_COMPRESSION = "set Trainer(callbacks=[GradientCompression(method)]), such as 'fp16', 'bf16', 'powersgd' or 'int8'"
_COPIES = "set data_parallel_size=dp_replicate_size * dp_shard_size, shard_size=dp_shard_size and zero_stage=3"
_GATHERS = "leave it out: the strategy decides when layers are gathered, or reshard_after_forward"
_LAYERS = "leave it out: layers are found in the module, and sharded one by one"
_NO_EFFECT = "leave it out: there is no such buffer, file or message here"
_ON_DEVICE = "leave it out: what a recomputed layer saves stays on the device"
_PRECISION = (
    "set Trainer(precision='bf16-mixed') or another precision of Lightning's; for the dtypes of messages set"
    " Trainer(plugins=[HybridPrecision('bf16-mixed', reduce_dtype=..., gather_dtype=...)])"
)
_RECOMPUTE = "set recompute='full', 'selective', a list of classes, or names of layers"
_SCALER = "set precision_plugin=HybridPrecision('16-mixed', scaler=torch.amp.GradScaler({}))"
_STORAGE = "set offload={{{!r}: 'cpu'}} or 'disk:PATH'"
_META = "build the module inside trainer.init_module(empty_init=True)"
_PARAMETERS = _STORAGE.format("parameters") + ", with zero_stage=3"

# By library, as docs/reference/options.md names it. accelerate has those of FSDP too, with "fsdp_".
ADVICE: dict[str, dict[str, str]] = {
    "FSDP": {
        "activation_checkpointing": _RECOMPUTE,
        "activation_checkpointing_offload": _ON_DEVICE,
        "activation_checkpointing_policy": _RECOMPUTE,
        "auto_wrap_policy": _LAYERS,
        "backward_prefetch": _GATHERS,
        "cpu_offload": "set offload='cpu'",
        "cpu_ram_efficient_loading": _META,
        "device_id": "set Trainer(accelerator=..., devices=...)",
        "device_mesh": "set data_parallel_size to the product of (copies, ranks of a copy), shard_size to the second"
        " number, and zero_stage=3",
        "float8_all_gather": "leave it out: parameters are sent in their dtype",
        "forward_prefetch": _GATHERS,
        "ignored_modules": "leave it out: zero_stage shards all parameters",
        "ignored_states": "leave it out: zero_stage shards all parameters",
        "limit_all_gathers": _GATHERS,
        "min_num_params": _LAYERS,
        "mixed_precision": _PRECISION,
        "mixed_precision_policy": _PRECISION,
        "mp_policy": _PRECISION,
        "offload_params": "set offload='cpu'",
        "offload_policy": "set offload='cpu'",
        "param_init_fn": "leave it out: modules on the meta device are filled by their own reset_parameters",
        "process_group": "leave it out: process groups are built from the sizes, as data_parallel_size and shard_size",
        "sharding_strategy": "set zero_stage=3 for FULL_SHARD (1), with reshard_after_forward=False for SHARD_GRAD_OP"
        " (2), with shard_size (the ranks of a node) for HYBRID_SHARD (4); zero_stage=0 for NO_SHARD (3)",
        "state_dict_type": "set save_distributed_checkpoint=True for sharded, False for full",
        "sync_module_states": _ALWAYS,
        "transformer_layer_cls_to_wrap": _LAYERS,
        "use_orig_params": _ALWAYS,
    },
    "accelerate": {
        "cp_size": "set context_parallel_size",
        "dp_replicate_size": _COPIES,
        "dp_shard_size": _COPIES,
        "fsdp": "set data_parallel_size to the number of ranks, and zero_stage=3",
        "fsdp_reshard_after_forward": "set reshard_after_forward to the same value",
        "fsdp_version": "leave it out: there is one",
        "gradient_accumulation_steps": "set Trainer(accumulate_grad_batches=...), or num_microbatches for parts of a"
        " batch",
        "gradient_checkpointing": _RECOMPUTE,
        "tp_size": "set tensor_parallel_size",
        "transformer_cls_names_to_wrap": _LAYERS,
    },
    "DDP": {
        "bucket_cap_mb": _NO_EFFECT,
        "ddp_comm_hook": _COMPRESSION,
        "ddp_comm_state": "set Trainer(callbacks=[GradientCompression('powersgd', rank=..., start_step=...)])",
        "ddp_comm_wrapper": _COMPRESSION,
        "find_unused_parameters": "leave it out: replicas may use different layers",
        "gradient_as_bucket_view": _NO_EFFECT,
        "model_averaging_period": "set Trainer(callbacks=[LocalSGD(every=model_averaging_period)])",
        "static_graph": "leave it out: replicas may use different layers",
    },
    "DeepSpeed": {
        "allgather_bucket_size": _NO_EFFECT,
        "allgather_partitions": _NO_EFFECT,
        "bf16": "set Trainer(precision='bf16-mixed')",
        "block_size": _NO_EFFECT,
        "config": "run `lightning-hybrid migrate ds_config.json`, which prints the arguments: no file is read",
        "contiguous_gradients": _NO_EFFECT,
        "contiguous_memory_optimization": _NO_EFFECT,
        "cpu_checkpointing": _ON_DEVICE,
        "exclude_frozen_parameters": "remove the frozen ones in on_save_checkpoint: a checkpoint has all parameters",
        "fp16": "set Trainer(precision='16-mixed')",
        "gradient_clipping": "set Trainer(gradient_clip_val=...)",
        "hysteresis": "leave it out: a loss scale is halved after every overflow",
        "initial_scale_power": _SCALER.format("init_scale=2**initial_scale_power"),
        "load_full_weights": _NO_EFFECT,
        "logging_batch_size_per_gpu": "leave it out: only DeepSpeed's own timer reads it",
        "logging_level": _NO_EFFECT,
        "loss_scale": _SCALER.format("init_scale=loss_scale") + ", with a large growth_interval, which keeps it",
        "loss_scale_window": _SCALER.format("growth_interval=loss_scale_window"),
        "max_in_cpu": _NO_EFFECT,
        "min_loss_scale": "leave it out: a loss scale has no least value",
        "nvme_path": _STORAGE.format("optimizer_states"),
        "offload_optimizer": _STORAGE.format("optimizer_states"),
        "offload_optimizer_device": _STORAGE.format("optimizer_states"),
        "offload_parameters": _PARAMETERS,
        "offload_params_device": _PARAMETERS,
        "optimizer_buffer_count": _NO_EFFECT,
        "overlap_comm": _NO_EFFECT,
        "overlap_events": _NO_EFFECT,
        "params_buffer_count": _NO_EFFECT,
        "params_buffer_size": _NO_EFFECT,
        "partition_activations": "set sequence_parallel=True with tensor_parallel_size, or set context_parallel_size",
        "pin_memory": "leave it out: optimizer states that are offloaded alone are pinned, other tensors are not",
        "queue_depth": _NO_EFFECT,
        "reduce_bucket_size": _NO_EFFECT,
        "reduce_scatter": _NO_EFFECT,
        "remote_device": f"{_META}, and {_PARAMETERS}",
        "single_submit": _NO_EFFECT,
        "stage": "set zero_stage to the same number",
        "sub_group_size": _NO_EFFECT,
        "synchronize_checkpoint_boundary": _NO_EFFECT,
        "thread_count": _NO_EFFECT,
        "train_micro_batch_size_per_gpu": "set the batch size of the DataLoader, which is that of one replica",
        "zero_allow_untested_optimizer": "leave it out: any optimizer is sharded",
        "zero_optimization": "set zero_stage=0, 1, 2 or 3",
    },
}
ADVICE["accelerate"] |= {f"fsdp_{name}": advice for name, advice in ADVICE["FSDP"].items()}

# Keys of DeepSpeed's and accelerate's files that nothing here corresponds to.
_OTHERS = """
aio amp auto_cast autotuning bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow checkpoint
command_file commands comms_config comms_logger communication_data_type compile compression_training
consecutive_hysteresis cpuadam_cores_perc csv_monitor curriculum_learning data_efficiency data_sampling data_types
dataloader_drop_last deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter
deepspeed_moe_layer_cls_names deepspeed_multinode_launcher disable_allgather dump_state dynamo_backend dynamo_config
eigenvalue elastic_checkpoint elasticity enable_sanity_checks fast_init flops_profiler fp16_master_weights_and_grads
fp32_allreduce fp8_config gradient_predivide_factor graph_harvesting hybrid_engine ignore_unused_parameters
immediate_grad_update ipex_config leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings
megatron_lm_config memory_breakdown memory_efficient_linear mics_hierarchical_params_gather monitor_config
mpirun_config nebula override_module_apply parallelism_config_cp_comm_strategy pipeline pipeline_loading_checkpoint
pipeline_read pipeline_write prescale_gradients progressive_layer_drop quantize_training quantized_gradients
quantized_nontrainable_weights quantized_weights ratio round_robin_gradients seed sparse_attention sparse_gradients
super_offload tensorboard timers tp_plan use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce
use_node_local_storage vocabulary_size wandb weight_quantization zero3_init_flag zero3_save_16bit_model
zero_force_ds_cpu_optimizer zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
zeropp_loco_param
"""
WITHOUT_COUNTERPART = frozenset(_OTHERS.split())

# Other names of options: short ones, and Megatron's.
_SHORT = {
    **dict.fromkeys(
        ("pp", "pp_size", "pipeline_size", "pipeline_parallel", "pipeline_model_parallel_size"),
        "pipeline_parallel_size",
    ),
    **dict.fromkeys(("tp", "tensor_size", "tensor_parallel", "tensor_model_parallel_size"), "tensor_parallel_size"),
    **dict.fromkeys(("dp", "dp_size", "data_size", "data_parallel"), "data_parallel_size"),
    **dict.fromkeys(("cp", "context_size", "context_parallel"), "context_parallel_size"),
    **dict.fromkeys(
        ("ep", "ep_size", "expert_size", "expert_parallel", "expert_model_parallel_size"), "expert_parallel_size"
    ),
    **dict.fromkeys(("zero", "zero_level"), "zero_stage"),
    **dict.fromkeys(("m", "microbatches"), "num_microbatches"),
    "virtual_pipeline_model_parallel_size": "stages_per_rank",
}

if TYPE_CHECKING:

    class ForeignKeywords(TypedDict, total=False):
        """No keyword is right; type checkers find each."""

else:
    # A config file of LightningCLI may have declared keywords alone, and would else be refused without the advice.
    ForeignKeywords = TypedDict(
        "ForeignKeywords", {name: Any for names in (*ADVICE.values(), _SHORT) for name in names}, total=False
    )


def refuse_foreign(keywords: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuse keywords that are no options of the strategy.

    ``own`` are the names of options.

    Raises:
        TypeError: One is unknown; it names the nearest options.
        ValueError: Some are of another library; it names what to set here for each.
    """
    theirs = {name: library for library, advice in reversed(ADVICE.items()) for name in advice}
    found = [
        f"{name}={reprlib.repr(value)} is a keyword of {theirs[name]}: {ADVICE[theirs[name]][name]}"
        for name, value in keywords.items()
        if name in theirs and name not in _SHORT
    ]
    if found:
        raise ValueError("; ".join(found))
    for name, value in keywords.items():
        if name in _SHORT:
            raise TypeError(f"the strategy has no option {name!r}; set {_SHORT[name]}={reprlib.repr(value)}")
        raise TypeError(f"the strategy has no option {name!r}{meant(name, own)}")
