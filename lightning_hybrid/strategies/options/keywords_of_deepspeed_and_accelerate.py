"""Keywords of Lightning's ``DeepSpeedStrategy``, and those of accelerate with its prefix, with the answers to them.

They are declared one by one, since a YAML file of LightningCLI takes declared keywords only.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class AccelerateNames(TypedDict, total=False):
    """The keys of ``fsdp_config`` in files of accelerate; without the prefix they are keywords of FSDP."""

    fsdp_activation_checkpointing: Any
    fsdp_activation_checkpointing_offload: bool | None
    fsdp_auto_wrap_policy: Any
    fsdp_backward_prefetch: Any
    fsdp_cpu_ram_efficient_loading: bool | None
    fsdp_float8_all_gather: bool | None
    fsdp_forward_prefetch: bool | None
    fsdp_ignored_modules: Any
    fsdp_min_num_params: Any
    fsdp_mixed_precision_policy: Any
    fsdp_offload_params: bool | None
    fsdp_reshard_after_forward: bool | str | None
    fsdp_sharding_strategy: int | str | None
    fsdp_state_dict_type: str | None
    fsdp_sync_module_states: bool | None
    fsdp_transformer_layer_cls_to_wrap: Any
    fsdp_use_orig_params: bool | None
    fsdp_version: Any


class DeepSpeedNames(TypedDict, total=False):
    """Keywords of ``DeepSpeedStrategy`` that other libraries do not have."""

    allgather_partitions: bool | None
    block_size: Any
    contiguous_memory_optimization: bool | None
    cpu_checkpointing: bool | None
    exclude_frozen_parameters: bool | None
    hysteresis: Any
    initial_scale_power: Any
    load_full_weights: bool | None
    logging_level: Any
    loss_scale: Any
    loss_scale_window: Any
    max_in_cpu: Any
    min_loss_scale: Any
    optimizer_buffer_count: Any
    overlap_events: bool | None
    params_buffer_count: Any
    params_buffer_size: Any
    queue_depth: Any
    reduce_scatter: bool | None
    single_submit: bool | None
    sub_group_size: Any
    synchronize_checkpoint_boundary: bool | None
    thread_count: Any
    zero_allow_untested_optimizer: bool | None


# Of buffers, files, messages and logs that do not exist here; any optimizer is sharded, any checkpoint is loaded.
WITHOUT_EFFECT = (
    *("allgather_partitions", "block_size", "contiguous_memory_optimization", "load_full_weights", "logging_level"),
    *("max_in_cpu", "optimizer_buffer_count", "overlap_events", "params_buffer_count", "params_buffer_size"),
    *("queue_depth", "reduce_scatter", "single_submit", "sub_group_size", "synchronize_checkpoint_boundary"),
    *("thread_count", "zero_allow_untested_optimizer"),
)
_LOSS_SCALE = "set precision_plugin=HybridPrecision('16-mixed', scaler=torch.amp.GradScaler(...)) with {} instead"
_OFFLOADED_ACTIVATIONS = "what a recomputed layer saves stays on the device; leave it out"
REFUSED = {
    "activation_checkpointing_offload": _OFFLOADED_ACTIVATIONS,
    "cpu_checkpointing": _OFFLOADED_ACTIVATIONS,
    "exclude_frozen_parameters": "a checkpoint has all parameters; remove the frozen ones in on_save_checkpoint",
    "float8_all_gather": "parameters are sent in their dtype; leave it out",
    "hysteresis": "a loss scale is halved after every overflow; leave it out",
    "initial_scale_power": _LOSS_SCALE.format("init_scale=2**initial_scale_power"),
    "loss_scale": "set precision_plugin=HybridPrecision('16-mixed', scaler=torch.amp.GradScaler(...)) with"
    " init_scale=loss_scale and a large growth_interval, which keeps it",
    "loss_scale_window": _LOSS_SCALE.format("growth_interval=loss_scale_window"),
    "min_loss_scale": "a loss scale has no least value; leave it out",
}
