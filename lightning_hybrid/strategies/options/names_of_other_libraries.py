"""Options by the names that Lightning's strategies, FSDP, accelerate and DeepSpeed give them, resolved to ours.

Each name means options of ``Hybrid3DStrategy``, or asks for what is always the case here, or is refused with what to
set instead. After `resolve_names` no code knows by which name an option was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import nn

from lightning_hybrid.strategies.options import keywords_of_deepspeed_and_accelerate as others_keywords


class OtherNames(others_keywords.AccelerateNames, others_keywords.DeepSpeedNames, total=False):
    """Keywords of other libraries that the strategy takes; None is as if they were left out."""

    activation_checkpointing: bool | type[nn.Module] | list[type[nn.Module]] | set[type[nn.Module]] | None
    activation_checkpointing_policy: type[nn.Module] | list[type[nn.Module]] | set[type[nn.Module]] | Any
    gradient_checkpointing: bool | None
    cpu_offload: Any
    offload_policy: Any
    offload_optimizer: bool | None
    offload_parameters: bool | None
    offload_params: bool | None
    sharding_strategy: Any
    device_id: Any
    device_mesh: Any
    stage: int | None
    state_dict_type: Any
    tp_size: int | None
    cp_size: int | None
    # always the case
    find_unused_parameters: bool | None
    static_graph: bool | None
    sync_module_states: bool | None
    use_orig_params: bool | None
    # of what does not exist here
    allgather_bucket_size: Any
    bucket_cap_mb: Any
    contiguous_gradients: bool | None
    fsdp_version: Any
    gradient_as_bucket_view: bool | None
    overlap_comm: bool | None
    reduce_bucket_size: Any
    # refused
    activation_checkpointing_offload: bool | None
    auto_wrap_policy: Any
    backward_prefetch: Any
    bf16: Any
    config: Any
    cpu_ram_efficient_loading: bool | None
    ddp_comm_hook: Any
    ddp_comm_state: Any
    ddp_comm_wrapper: Any
    dp_replicate_size: Any
    dp_shard_size: Any
    float8_all_gather: bool | None
    forward_prefetch: Any
    fp16: Any
    gradient_accumulation_steps: Any
    gradient_clipping: Any
    ignored_modules: Any
    ignored_states: Any
    limit_all_gathers: bool | None
    logging_batch_size_per_gpu: Any
    min_num_params: Any
    mixed_precision: Any
    mixed_precision_policy: Any
    model_averaging_period: Any
    mp_policy: Any
    nvme_path: Any
    offload_optimizer_device: Any
    offload_params_device: Any
    param_init_fn: Any
    partition_activations: bool | None
    pin_memory: bool | None
    process_group: Any
    remote_device: Any
    train_micro_batch_size_per_gpu: Any
    transformer_cls_names_to_wrap: Any
    transformer_layer_cls_to_wrap: Any
    zero_optimization: Any


def resolve_names(options: Mapping[str, Any], others: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the strategy, with what the names and values of other libraries mean.

    Args:
        options: The strategy's own options, by name.
        others: Further keywords; those of accelerate may have its prefix ``fsdp_``.
        defaults: Of the strategy's own options; one that has another value is set by the user.

    Raises:
        TypeError: A keyword is neither an option nor in `OtherNames`.
        ValueError: A keyword is refused, or contradicts another one.
    """
    resolved = {option: _own_value(option, value) for option, value in options.items()}
    for option, (meant, keyword) in _meant_options(others, defaults).items():
        if resolved[option] not in (defaults[option], meant):
            raise _contradiction(keyword, option, meant, f"{option}={options[option]!r}")
        resolved[option] = meant
    for name in ("sharding_strategy", f"{_PREFIX}sharding_strategy"):
        if "HYBRID" in _sharding_name(others.get(name)) and resolved["shard_size"] is None:
            raise ValueError(
                f"{name}={others[name]!r} shards over the ranks of a node, whose number is not known yet; set"
                " shard_size to it, or device_mesh=(copies, ranks of a copy)"
            )
    return resolved


def _own_value(option: str, value: Any) -> Any:
    """The value of one of our own options, where other libraries have another one that means it."""
    found = [meant for name, other, meant in _VALUES_OF_OTHERS if name == option and other is value]
    return found[0] if found else value


def _meant_options(others: Mapping[str, Any], own: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Return the options that keywords of other libraries mean: the value, and the text of the keyword that sets it."""
    meant: dict[str, tuple[Any, str]] = {}
    for name, value in others.items():
        plain = name if name in _MEANINGS else name.removeprefix(_PREFIX)
        if plain not in _MEANINGS and (plain == name or plain not in own):
            near = difflib.get_close_matches(plain, [*own, *_MEANINGS], n=3)
            advice = f"; the nearest are {', '.join(near)}" if near else ""
            raise TypeError(f"the strategy has no option {name!r}{advice}")
        if value is None:
            continue
        keyword = f"{name}={_shown(value)}"
        meaning = _MEANINGS.get(plain, partial(_renamed, plain))
        for option, new in meaning(name, value).items():
            if option in meant:
                old, other = meant[option]
                if isinstance(old, dict) and isinstance(new, dict):  # offloads of different states
                    meant[option] = {**old, **new}, f"{other}, {keyword}"
                    continue
                if old != new:
                    raise _contradiction(keyword, option, new, f"{other}, which means {option}={old!r},")
            meant[option] = new, keyword
    return meant


def _contradiction(keyword: str, option: str, meant: Any, other: str) -> ValueError:
    return ValueError(f"{keyword} means {option}={meant!r}, but {other} is set too; leave one of the two out")


# -- what each name means ----------------------------------------------------------------------------------------------


def _renamed(option: str, name: str, value: Any) -> dict[str, Any]:
    return {option: _own_value(option, value)}


def _recompute(name: str, value: Any) -> dict[str, Any]:
    """Layers that FSDP wraps in checkpoints: a flag, module classes, or a policy of classes."""
    if isinstance(value, bool):
        return {"recompute": "full" if value else None}
    classes = getattr(value, "_module_classes", value)  # of torch's ModuleWrapPolicy
    classes = [classes] if isinstance(classes, type) else classes
    if not isinstance(classes, Collection) or not all(isinstance(each, type) for each in classes):
        raise ValueError(
            f"{name}={value!r}; use True or module classes, or set recompute to 'full', 'selective', or names of layers"
        )
    return {"recompute": sorted(classes, key=lambda each: (each.__module__, each.__qualname__))}


def _offload_everything(name: str, value: Any) -> dict[str, Any]:
    """The flag and the policies by which FSDP keeps parameters, gradients and optimizer states on the host."""
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if isinstance(value, CPUOffload):
        value = value.offload_params
    elif isinstance(value, OffloadPolicy):
        value = isinstance(value, CPUOffloadPolicy)
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; use True or False, or set offload='cpu'")
    return {"offload": "cpu" if value else None}


def _offload_one(state: str, name: str, value: Any) -> dict[str, Any]:
    """DeepSpeed's flag for one kind of state; False leaves the others as they are."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; use True or False, or set offload={{{state!r}: 'cpu'}} or 'disk:PATH'")
    return {"offload": {state: "cpu"}} if value else {}


def _sharding_strategy(name: str, value: Any) -> dict[str, Any]:
    """A member of FSDP's ``ShardingStrategy``, its name, or its number."""
    found = _SHARDING_STRATEGIES.get(_sharding_name(value))
    if found is None:
        listed = ", ".join(_SHARDING_STRATEGIES)
        raise ValueError(f"{name}={value!r} is unknown; use {listed}, or set zero_stage=0, 1, 2 or 3")
    return found


def _sharding_name(value: Any) -> str:
    """The name of a member of ``ShardingStrategy``, of which accelerate takes the number too."""
    name = _member_name(value)
    return _SHARDING_NUMBERS.get(name, name)


def _member_name(value: Any) -> str:
    """The name of a member of one of torch's enumerations, or a string that may be one."""
    return str(getattr(value, "name", value)).upper()


_SHARDING_STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"zero_stage": 3},
    "SHARD_GRAD_OP": {"zero_stage": 3, "reshard_after_forward": False},
    "HYBRID_SHARD": {"zero_stage": 3},
    "HYBRID_SHARD_ZERO2": {"zero_stage": 3, "reshard_after_forward": False},
    "NO_SHARD": {"zero_stage": 0},
}
_SHARDING_NUMBERS = {
    **{"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"},
    "_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2",  # as torch names it
}


def _device_mesh(name: str, value: Any) -> dict[str, Any]:
    """FSDP's mesh for hybrid sharding: numbers of copies, and of ranks that share one."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(isinstance(size, int) for size in value):
        raise ValueError(
            f"{name}={value!r}; use (copies, ranks of a copy), or set data_parallel_size to their product, shard_size"
            " to the second, and zero_stage=3"
        )
    copies, shards = value
    return {"data_parallel_size": copies * shards, "shard_size": shards, "zero_stage": 3}


def _state_dict_type(name: str, value: Any) -> dict[str, Any]:
    """Lightning's "full" or "sharded", or a member of torch's ``StateDictType``, or its name."""
    kind = _member_name(value).removesuffix("_STATE_DICT")
    if kind not in ("FULL", "SHARDED"):
        raise ValueError(
            f"{name}={value!r}; use 'full' or 'sharded', or set save_distributed_checkpoint to False or True"
        )
    return {"save_distributed_checkpoint": kind == "SHARDED"}


def _always(name: str, value: Any) -> dict[str, Any]:
    """What is the case in any run, whatever the flag says."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; use True or False: it changes nothing here")
    return {}


def _nothing(name: str, value: Any) -> dict[str, Any]:
    """What no value changes, since it does not exist here: buckets of gradients, or versions."""
    return {}


def _refused(advice: str, name: str, value: Any) -> dict[str, Any]:
    if value is False:
        return {}
    raise ValueError(f"{name}={_shown(value)}: {advice}")


def _comm_hook(name: str, value: Any) -> dict[str, Any]:
    """A hook of DDP's reducer, whose buckets do not exist here: the callback that does the same."""
    hook = getattr(value, "__name__", type(value).__name__)
    callback = _COMM_HOOKS.get(hook)
    if callback is not None:
        raise ValueError(f"{name}={hook}: set Trainer(callbacks=[{callback}])")
    raise ValueError(
        f"{name}={hook}: set Trainer(callbacks=[GradientCompression(method)]), with one of powersgd, fp16, bf16, int8,"
        " topk and 1bit"
    )


def _comm_state(name: str, value: Any) -> dict[str, Any]:
    """The state of such a hook; that of PowerSGD has its arguments."""
    rank = getattr(value, "matrix_approximation_rank", None)
    start = getattr(value, "start_powerSGD_iter", getattr(value, "start_localSGD_iter", 0))
    callback = f"GradientCompression('powersgd', rank={rank}, start_step={start})"
    if rank is None:
        callback = f"LocalSGD(every=..., warmup_steps={start})" if start else "GradientCompression(method)"
    raise ValueError(f"{name}={type(value).__name__}: set Trainer(callbacks=[{callback}])")


def _averaging_period(name: str, value: Any) -> dict[str, Any]:
    """Steps between averages of parameters."""
    raise ValueError(f"{name}={value!r}: set Trainer(callbacks=[LocalSGD(every={value!r})])")


def _shown(value: Any) -> str:
    """A value in a message; a mapping, such as the content of a file, by its size."""
    if isinstance(value, Mapping):
        return f"{{... {len(value)} {'entry' if len(value) == 1 else 'entries'}}}"
    return repr(value)


_PRECISION = (
    "set Trainer(precision='bf16-mixed') or another precision of Lightning's; for the dtypes of messages set"
    " Trainer(plugins=[HybridPrecision('bf16-mixed', reduce_dtype=..., gather_dtype=...)])"
)
_LAYERS = "layers are found in the module, and sharded one by one; leave it out"
_GATHERS = "the strategy decides when layers are gathered; leave it out, or set reshard_after_forward"
_ALL_SHARDED = "zero_stage shards all parameters; leave it out"
# Methods of the callback by names of torch's DDP hooks.
_COMM_HOOKS = {
    "fp16_compress_hook": "GradientCompression('fp16')",
    "bf16_compress_hook": "GradientCompression('bf16')",
    "powerSGD_hook": "GradientCompression('powersgd')",
    "batched_powerSGD_hook": "GradientCompression('powersgd')",
    "quantization_pertensor_hook": "GradientCompression('int8')",
    "quantization_perchannel_hook": "GradientCompression('int8')",
    "post_localSGD_hook": "LocalSGD(every=...)",
}
_COPIES = "set data_parallel_size=dp_replicate_size * dp_shard_size, shard_size=dp_shard_size and zero_stage=3"
_STORAGE = "set offload={'optimizer_states': 'cpu'} or 'disk:PATH'; 'parameters' in the same way, with zero_stage=3"
_REFUSED = {
    "auto_wrap_policy": _LAYERS,
    "backward_prefetch": _GATHERS,
    "bf16": "set Trainer(precision='bf16-mixed')",
    "config": "no file of DeepSpeed's is read; set zero_stage, offload and recompute, and the Trainer's own arguments",
    "cpu_ram_efficient_loading": "build the module inside trainer.init_module(empty_init=True), and leave it out",
    "device_id": "set Trainer(accelerator=..., devices=...)",
    "ddp_comm_wrapper": "set Trainer(callbacks=[GradientCompression('fp16')]), or another method",
    "dp_replicate_size": _COPIES,
    "dp_shard_size": _COPIES,
    "forward_prefetch": _GATHERS,
    "fp16": "set Trainer(precision='16-mixed')",
    "gradient_accumulation_steps": "set Trainer(accumulate_grad_batches=...), or num_microbatches for parts of a batch",
    "gradient_clipping": "set Trainer(gradient_clip_val=...)",
    "ignored_modules": _ALL_SHARDED,
    "ignored_states": _ALL_SHARDED,
    "limit_all_gathers": _GATHERS,
    "logging_batch_size_per_gpu": "only DeepSpeed's own timer reads it; leave it out",
    "min_num_params": _LAYERS,
    "mixed_precision": _PRECISION,
    "mixed_precision_policy": _PRECISION,
    "mp_policy": _PRECISION,
    "nvme_path": _STORAGE,
    "offload_optimizer_device": _STORAGE,
    "offload_params_device": _STORAGE,
    "param_init_fn": "modules on the meta device are filled by their own reset_parameters; leave it out",
    "partition_activations": "set sequence_parallel=True with tensor_parallel_size, or set context_parallel_size",
    "pin_memory": "what is offloaded is not in pinned memory; leave it out",
    "process_group": "process groups are built from the sizes, such as data_parallel_size and shard_size; leave it out",
    "remote_device": "build the module inside trainer.init_module(empty_init=True), and set offload={'parameters':"
    " 'cpu'} or 'disk:PATH', with zero_stage=3",
    "train_micro_batch_size_per_gpu": "set the batch size of the DataLoader, which is that of one replica",
    "transformer_cls_names_to_wrap": _LAYERS,
    "transformer_layer_cls_to_wrap": _LAYERS,
    "zero_optimization": "set zero_stage=0, 1, 2 or 3",
    **others_keywords.REFUSED,
}

_MEANINGS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "activation_checkpointing": _recompute,
    "activation_checkpointing_policy": _recompute,
    "gradient_checkpointing": _recompute,
    "cpu_offload": _offload_everything,
    "offload_params": _offload_everything,
    "offload_policy": _offload_everything,
    "offload_optimizer": partial(_offload_one, "optimizer_states"),
    "offload_parameters": partial(_offload_one, "parameters"),
    "sharding_strategy": _sharding_strategy,
    "device_mesh": _device_mesh,
    "ddp_comm_hook": _comm_hook,
    "ddp_comm_state": _comm_state,
    "model_averaging_period": _averaging_period,
    "state_dict_type": _state_dict_type,
    "stage": partial(_renamed, "zero_stage"),
    "tp_size": partial(_renamed, "tensor_parallel_size"),
    "cp_size": partial(_renamed, "context_parallel_size"),
    **dict.fromkeys(("find_unused_parameters", "static_graph", "sync_module_states", "use_orig_params"), _always),
    **dict.fromkeys(("allgather_bucket_size", "bucket_cap_mb", "contiguous_gradients", "fsdp_version"), _nothing),
    **dict.fromkeys(("gradient_as_bucket_view", "overlap_comm", "reduce_bucket_size"), _nothing),
    **dict.fromkeys(others_keywords.WITHOUT_EFFECT, _nothing),
    **{name: partial(_refused, advice) for name, advice in _REFUSED.items()},
}
_PREFIX = "fsdp_"  # of accelerate's names
# Values of our own options that mean in another library what another value means here.
_VALUES_OF_OTHERS = (
    ("compile", True, "units"),
    ("compile", False, None),
    ("reshard_after_forward", None, True),
)
