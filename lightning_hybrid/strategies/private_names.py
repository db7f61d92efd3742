"""The private names of Lightning and torch that this package uses, and the check that the installed versions have them.

Lightning has no public hook for these: seeing which batches accumulate, joining the results of an evaluation over
ranks, stopping all ranks after one batch. Nor has torch for modes, hooks and process groups. Each is checked when the
strategy is imported, so that another version is refused there and not in the middle of a run; what is imported
by its name (``from torch.x import _y``) needs no check.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import torch

# Private names by module (below `lightning.pytorch`), and by class where they are attributes.
PYTORCH: dict[str, tuple[str, ...]] = {
    "callbacks.throughput_monitor:ThroughputMonitor": ("_compute", "_module_has_flops", "_throughputs", "_update"),
    "callbacks.weight_averaging:WeightAveraging": ("_average_model", "_copy_average_to_current", "_swap_models"),
    "core.module:LightningModule": ("_current_fx_name", "_device_mesh", "_on_before_batch_transfer", "_trainer"),
    "core.optimizer": ("_init_optimizers_and_lr_schedulers",),
    "core.optimizer:LightningOptimizer": ("_optimizer",),
    "loops.evaluation_loop:_EvaluationLoop": (
        *("_combined_loader", "_data_fetcher", "_data_source", "_evaluation_step", "_is_sequential"),
        *("_logged_outputs", "_results", "_stage", "_store_dataloader_outputs"),
    ),
    "loops.fetchers": ("_DataFetcher",),
    "loops.fit_loop:_FitLoop": (
        *("_combined_loader", "_data_fetcher", "_data_source", "_results", "_should_accumulate", "_skip_backward"),
    ),
    "loops.optimization.automatic:_AutomaticOptimization": ("_training_step",),
    "loops.training_epoch_loop:_TrainingEpochLoop": (
        *("_batches_that_stepped", "_broadcast_sigterm_tensor", "_on_after_fetch", "_on_before_fetch"),
    ),
    "strategies.launchers.multiprocessing:_MultiProcessingLauncher": ("_wrapping_function",),
    "strategies.launchers.subprocess_script:_SubprocessScriptLauncher": ("_call_children_scripts",),
    "strategies.launchers": ("_MultiProcessingLauncher", "_SubprocessScriptLauncher"),
    "strategies.parallel:ParallelStrategy": ("_layer_sync",),
    "strategies.strategy:Strategy": (
        *("_accelerator", "_checkpoint_io", "_lightning_module", "_lightning_optimizers", "_model", "_optimizers"),
        "_precision_plugin",
    ),
    "trainer.call": (
        *("_call_callback_hooks", "_call_configure_model", "_call_lightning_datamodule_hook"),
        *("_call_lightning_module_hook", "_call_setup_hook", "_call_strategy_hook"),
    ),
    "trainer.configuration_validator": ("_verify_loop_configurations",),
    "trainer.connectors.accelerator_connector": ("_AcceleratorConnector",),
    "trainer.connectors.accelerator_connector:_AcceleratorConnector": ("_precision_flag",),
    "trainer.connectors.callback_connector:_CallbackConnector": (
        *("_attach_model_callbacks", "_attach_model_logging_functions"),
    ),
    "trainer.connectors.checkpoint_connector:_CheckpointConnector": (
        *("_get_lightning_module_state_dict", "_loaded_checkpoint"),
    ),
    "trainer.connectors.data_connector": ("_get_distributed_sampler", "_request_dataloader"),
    "trainer.connectors.data_connector:_DataConnector": ("_prepare_dataloader", "_resolve_sampler"),
    "trainer.connectors.logger_connector.result": ("_Metadata", "_ResultMetric", "_Sync"),
    "trainer.connectors.signal_connector:_SignalConnector": ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    "trainer.trainer:Trainer": (
        *("_accelerator_connector", "_active_loop", "_callback_connector", "_checkpoint_connector", "_data_connector"),
        *("_detect_anomaly", "_logger_connector", "_loggers", "_results", "_signal_connector"),
    ),
    "tuner.batch_size_scaling": ("_try_loop_run",),
    "tuner.lr_finder": ("_LRCallback",),
    "tuner.tuning": ("_check_scale_batch_size_configuration",),
    "utilities.combined_loader:CombinedLoader": ("_mode", "_spec"),
    "utilities.data": ("_update_dataloader",),
}
# The same below `lightning.fabric`.
FABRIC: dict[str, tuple[str, ...]] = {
    "utilities.cloud_io": ("_is_local_file_protocol",),
    "utilities.data": ("_set_sampler_epoch",),
    "utilities.device_dtype_mixin": ("_update_properties",),
    "utilities.distributed": (
        *("_destroy_dist_connection", "_distributed_is_initialized", "_get_default_process_group_backend_for_device"),
        *("_init_dist_connection", "_set_num_threads_if_needed", "_sync_ddp_if_available"),
    ),
    "utilities.optimizer": ("_optimizer_to_device", "_optimizers_to_device"),
}
# The same below `torch`, of modules that are loaded with it.
TORCH: dict[str, tuple[str, ...]] = {
    "_C": (
        *("_DisableTorchDispatch", "_EnableTorchFunction", "_SetExcludeDispatchKeyGuard"),
        *("_are_functorch_transforms_active", "_autograd", "_current_autograd_node", "_current_graph_task_id"),
        *("_dispatch_has_kernel_for_dispatch_key", "_is_torch_function_enabled", "_is_torch_function_mode_enabled"),
        *("_len_torch_function_stack", "_nn", "_swap_tensor_impl"),
    ),
    "_C._autograd": ("_get_sequence_nr", "_top_saved_tensors_default_hooks"),
    "": ("_foreach_copy_", "_foreach_norm", "_pack_padded_sequence", "_scaled_mm"),
    "_functorch.eager_transforms": ("_wrap_for_grad",),
    "autograd": ("_engine_run_backward", "_get_sequence_nr", "_profiler_enabled", "_unsafe_preserve_version_counter"),
    "autograd:Variable": ("_execution_engine",),
    "autograd.forward_ad": ("_current_level",),
    "autograd.function": ("_SingleLevelFunction",),
    "cuda.memory": ("_dump_snapshot",),
    "distributed:ProcessGroup": ("_device_types", "_get_backend"),
    "distributed.checkpoint.filesystem": ("_StorageInfo",),
    "distributed.device_mesh:DeviceMesh": ("_flatten",),
    "distributed.distributed_c10d": (
        *("_get_default_store", "_get_process_group_store", "_register_process_group", "_set_pg_timeout"),
        *("_unregister_process_group", "_update_default_pg", "_world"),
    ),
    "distributions:Distribution": ("_validate_args",),
    "nn:Module": ("_apply", "_buffers", "_load_from_state_dict", "_modules", "_parameters"),
    "nn.modules._functions:BackwardHookFunction": ("_backward_cls",),
    "nn.modules.batchnorm": ("_BatchNorm", "_NormBase"),
    "nn.modules.conv": ("_ConvNd", "_ConvTransposeNd"),
    "overrides": ("_get_current_function_mode_stack", "_pop_mode", "_push_mode"),
    "serialization": ("_get_layout",),
    ":Tensor": ("_backward_hooks", "_base", "_make_wrapper_subclass", "_nnz", "_version"),
    "utils._python_dispatch": ("_disable_current_modes", "_get_current_dispatch_mode_stack"),
    "utils.checkpoint": ("_CheckpointFrame",),
    "utils.data:DataLoader": ("_get_iterator",),
}


def check_private_names() -> None:
    """Check that Lightning and torch have every private name that is used."""
    missing = [*_missing_names("lightning.pytorch", PYTORCH), *_missing_names("lightning.fabric", FABRIC)]
    if missing:
        version = getattr(pl, "__version__", "of unknown version")
        raise ImportError(
            f"lightning_hybrid uses private names that {pl.__name__} {version} does not have: {', '.join(missing)};"
            " install a version that pyproject.toml names: pip install 'lightning>=2.6,<2.7'"
        )
    loaded = {path: names for path, names in TORCH.items() if _module_of("torch", path) in sys.modules}
    if missing := list(_missing_names("torch", loaded)):
        raise ImportError(
            f"lightning_hybrid uses private names that torch {torch.__version__} does not have: {', '.join(missing)};"
            " install a version that pyproject.toml names"
        )


def _module_of(package: str, path: str) -> str:
    return f"{package}.{path.partition(':')[0]}".rstrip(".")


def _missing_names(package: str, table: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for path, names in table.items():
        class_name = path.partition(":")[2]
        try:
            owner: Any = importlib.import_module(_module_of(package, path))
            owner = getattr(owner, class_name) if class_name else owner
        except (ImportError, AttributeError):
            yield f"{package}.{path}"
            continue
        where = f"{package}.{path}".rstrip(".")
        yield from (f"{where}.{name}" for name in names if not _has_name(owner, name))


def _has_name(owner: Any, name: str) -> bool:
    """Whether a module or a class defines a name, or a method of the class mentions it as an attribute."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    members = [value for base in owner.__mro__ for value in vars(base).values()]
    accessors = [f for value in members if isinstance(value, property) for f in (value.fget, value.fset)]
    functions = [inspect.unwrap(value) for value in (*members, *accessors) if callable(value)]
    annotated = any(name in vars(base).get("__annotations__", {}) for base in owner.__mro__)
    return annotated or any(name in f.__code__.co_names for f in functions if isinstance(f, FunctionType))
