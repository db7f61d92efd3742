"""The command ``lightning-hybrid migrate ds_config.json``: the arguments that do what another library's file says."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.command import OK, UsageError, add_command, print_json
from lightning_hybrid.text import WIDTH, meant, wrapped

_EXAMPLE = """example:
  lightning-hybrid migrate ds_config.json
  lightning-hybrid migrate ~/.cache/huggingface/accelerate/default_config.yaml

exit status: 0 ok; 2 the file cannot be read, is of no library that is known, or contradicts itself"""


@dataclass
class Arguments:
    """What a file becomes: arguments of strategy, Trainer and GradScaler; what is left to do, and what is left out."""

    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    by_hand: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)  # modules that lines to write by hand use

    def move(self, part: str, device: Any, folder: Any = None) -> None:
        """Offload a part of the state to "cpu" or "nvme"."""
        if device in ("cpu", "nvme"):
            place = "cpu" if device == "cpu" else f"disk:{folder or 'PATH'}"
            self.strategy.setdefault("offload", {})[part] = place

    def leave_out(self, name: str, reason: str) -> None:
        """Leave a key out, in one line with the others that have the same reason."""
        for number, line in enumerate(self.left_out):
            names, _, other = line.partition(": ")
            if other == reason:
                together = dict.fromkeys([*names.split(", "), name])  # a key may stand in several sections
                self.left_out[number] = f"{', '.join(together)}: {reason}"
                return
        self.left_out.append(f"{name}: {reason}")


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "migrate",
        run,
        text="the arguments that a DeepSpeed or accelerate file becomes",
        description="Reads a file of DeepSpeed (JSON) or accelerate (YAML), and prints the arguments of the strategy"
        " and the Trainer that do the same, what is left to do by hand, and what is left out and why.",
        example=_EXAMPLE,
    )
    parser.add_argument("file", type=Path)


def run(parsed: argparse.Namespace) -> int:
    """Print the arguments, and return the exit status."""
    found = migrate(_read(parsed.file))
    if parsed.json:
        print_json(vars(found))
    else:
        print(_text(found))
    return OK


def migrate(config: Mapping[str, Any]) -> Arguments:
    """Return the arguments that the content of a file becomes.

    Raises:
        UsageError: The file is of no library that is known, or has values that no run takes.
    """
    found, config = Arguments(), _typed(config)
    if "compute_environment" in config or "distributed_type" in config or "fsdp_config" in config:
        _walk(config, _ACCELERATE, found)
    elif config.keys() & {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16"}:
        _walk(config, _DEEPSPEED, found)
    else:
        raise UsageError("the file has neither keys of DeepSpeed nor of accelerate's configuration")
    if "parameters" in found.strategy.get("offload", ()):
        found.strategy.setdefault("zero_stage", 3)
    return found


def _typed(value: Any) -> Any:
    """Return the content of a file with numbers and truth values in place of their spellings, such as "3"."""
    if isinstance(value, Mapping):
        return {name: _typed(each) for name, each in value.items()}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            typed = json.loads(value.lower())
            return typed if isinstance(typed, bool | int | float) else value
    return value


Rule = Callable[[Any, Arguments], None]


def _walk(config: Mapping[str, Any], rules: Mapping[str, Rule | Mapping[str, Any]], found: Arguments) -> None:
    from lightning_hybrid.strategies.options.foreign import ADVICE, WITHOUT_COUNTERPART

    advice = {name: text for names in ADVICE.values() for name, text in names.items()}
    for name, value in config.items():
        rule = rules.get(name)
        if isinstance(rule, Mapping):
            if isinstance(value, Mapping):
                _walk(value, rule, found)
        elif value in ("auto", None, False, "none", "no", "NO") and rule is not _resharding:
            continue
        elif rule is not None:
            rule(value, found)
        elif name.startswith("stage3_"):
            found.leave_out(name, "there is no such buffer here; see reshard_after_forward")
        elif name in advice:
            found.leave_out(name, advice[name].removeprefix("leave it out: "))
        elif name in WITHOUT_COUNTERPART:
            found.leave_out(name, "no counterpart")
        else:
            known = [*rules, *sorted(WITHOUT_COUNTERPART | advice.keys())]
            found.leave_out(name, f"unknown key{meant(name, known)}")


def _strategy(option: str, value: Any = None) -> Rule:
    """Set an option of the strategy to the file's value, or to another one."""
    return lambda given, found: found.strategy.update({option: given if value is None else value})


def _trainer(option: str, value: Any = None) -> Rule:
    return lambda given, found: found.trainer.update({option: given if value is None else value})


def _stage(given: Any, found: Arguments) -> None:
    if isinstance(given, bool) or given not in (0, 1, 2, 3):
        raise UsageError(f"the stage of ZeRO is {given!r}, and must be 0, 1, 2 or 3")
    found.strategy["zero_stage"] = given


def _secondary_shards(size: Any, found: Arguments) -> None:
    """Read ``zero_hpz_partition_size``; 1 is its default, without such shards."""
    if size == 1:
        return
    found.strategy["shard_size"] = size
    found.by_hand.append(
        f"shard_size={size}: each group of {size} ranks holds a copy of everything, gradients and optimizer states"
        " too; zero_hpz_partition_size copies the weights alone. That takes more memory: leave shard_size out to shard"
        " over all replicas"
    )


def _enabled(precision: str) -> Rule:
    """Read a section that switches a precision on; one that does not has no effect."""
    rules = {
        "enabled": _trainer("precision", precision),
        "loss_scale": _constant_scale,
        "initial_scale_power": lambda power, found: found.scaler.update(init_scale=2.0**power),
        "loss_scale_window": lambda window, found: found.scaler.update(growth_interval=window),
    }

    def read(given: Any, found: Arguments) -> None:
        if isinstance(given, Mapping) and given.get("enabled") is True:
            if found.trainer.get("precision", precision) != precision:
                raise UsageError("fp16 and bf16 are both enabled, and a run has one precision; disable one of them")
            _walk(given, rules, found)

    return read


def _constant_scale(scale: Any, found: Arguments) -> None:
    found.scaler |= {"init_scale": float(scale), "growth_interval": 10**9}
    found.by_hand.append(f"loss scale {scale}: the growth_interval keeps it from growing, but an overflow halves it")


def _by_hand(text: str) -> Rule:
    return lambda given, found: found.by_hand.append(text.format(given))


def _left_out(name: str, reason: str) -> Rule:
    return lambda given, found: found.leave_out(name, reason)


def _nothing(given: Any, found: Arguments) -> None:
    """Leave it out without a word: it changes no result and no place."""


def _moved(part: str) -> Rule:
    def move(given: Any, found: Arguments) -> None:
        found.move(part, given.get("device"), given.get("nvme_path"))
        _walk(given, _OFFLOAD, found)

    return move


def _checkpointed(given: Any, found: Arguments) -> None:
    found.strategy["recompute"] = "full"
    _walk(given, _CHECKPOINTING, found)


def _schedule(given: Any, found: Arguments) -> None:
    kind, numbers = given.get("type", "it"), given.get("params", {})
    scheduler = f"LambdaLR or SequentialLR with {numbers}"
    if kind in ("WarmupLR", "WarmupDecayLR"):
        scheduler = (
            f"LambdaLR(optimizer, {_factor(kind, numbers)}), and lr={_number(numbers, 'warmup_max_lr', 0.001)},"
            f" which is warmup_max_lr; the rate rises from warmup_min_lr={numbers.get('warmup_min_lr', 0)}"
        )
        found.imports += ["math"] * ("math." in scheduler)
    found.by_hand.append(
        f"schedule: torch has no {kind} as DeepSpeed has it; return"
        ' {"optimizer": optimizer, "lr_scheduler": {"scheduler": ..., "interval": "step"}} from configure_optimizers,'
        f" with {scheduler}"
    )


def _factor(kind: str, numbers: Mapping[str, Any]) -> str:
    """Return the factor of the largest learning rate at a step, as a line of Python."""
    warmup = _number(numbers, "warmup_num_steps", 1000)
    is_linear = numbers.get("warmup_type", "log") == "linear"
    rising = f"step / {warmup}" if is_linear else f"math.log(step + 1) / math.log({warmup})"
    total = _number(numbers, "total_num_steps", "total_num_steps")
    falling = "1.0" if kind == "WarmupLR" else f"max(0.0, ({total} - step) / max(1, {total} - {warmup}))"
    factor = f"{rising} if step < {warmup} else {falling}"
    least = _number(numbers, "warmup_min_lr", 0)
    if least != 0:
        share = f"{least} / {_number(numbers, 'warmup_max_lr', 0.001)}"
        factor = f"{share} + (1 - {share}) * ({factor})"
    return f"lambda step: {factor}"


def _number(numbers: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a number of the file; its name where the file leaves it to another library."""
    value = numbers.get(name, default)
    return name if value == "auto" else value


def _precision(given: Any, found: Arguments) -> None:
    found.trainer["precision"] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(given, given)


def _sharding(given: Any, found: Arguments) -> None:
    name = str(given).upper()
    found.strategy["zero_stage"] = 0 if name in ("NO_SHARD", "3") else 3
    if name in ("SHARD_GRAD_OP", "2"):
        found.strategy["reshard_after_forward"] = False
    if name.startswith("HYBRID") or name in ("4", "5"):
        found.by_hand.append("shard_size: set it to the number of ranks of a node")


def _resharding(given: Any, found: Arguments) -> None:
    if isinstance(given, bool):
        found.strategy.update({"zero_stage": 3, "reshard_after_forward": given})
    else:  # of the first version of FSDP
        _sharding(given, found)


def _shard_size(given: Any, found: Arguments) -> None:
    found.strategy.update({"zero_stage": 3, "shard_size": given})


def _checkpoint_kind(given: Any, found: Arguments) -> None:
    found.strategy["save_distributed_checkpoint"] = "SHARDED" in str(given).upper()


_BATCH = "batch size {}: set it on the DataLoader; it is for one replica"
_ALL_BATCHES = (
    "train_batch_size {} = batch size of the DataLoader x accumulate_grad_batches x replicas; a replica has several"
    " devices under stages, tensor or context ranks"
)
_FULL_FILE = _left_out(
    "stage3_gather_16bit_weights_on_model_save",
    "default: a checkpoint is one full file; save_distributed_checkpoint=True otherwise",
)
_OFFLOAD: dict[str, Any] = {
    **dict.fromkeys(("device", "nvme_path"), _nothing),
    **{
        name: _left_out(name, "there is no such buffer, file or message here")
        for name in ("buffer_count", "buffer_size")
    },
}
_CHECKPOINTING: dict[str, Any] = {
    "number_checkpoints": _left_out("number_checkpoints", "each layer is one; recompute=n is every n-th layer"),
    "profile": _left_out("profile", "set Trainer(profiler='simple')"),
}
_GRADIENTS = {
    "gradient_clipping": _trainer("gradient_clip_val"),
    "gradient_accumulation_steps": _trainer("accumulate_grad_batches"),
}
_DEEPSPEED: dict[str, Any] = {
    **_GRADIENTS,
    "zero_optimization": {
        "stage": _stage,
        "offload_optimizer": _moved("optimizer_states"),
        "offload_param": _moved("parameters"),
        "zero_hpz_partition_size": _secondary_shards,
        "mics_shard_size": _left_out("mics_shard_size", "set shard_size to the same number, if it is above 0"),
        "stage3_gather_16bit_weights_on_model_save": _FULL_FILE,
    },
    "bf16": _enabled("bf16-mixed"),
    "bfloat16": _enabled("bf16-mixed"),
    "fp16": _enabled("16-mixed"),
    "activation_checkpointing": _checkpointed,
    "tensor_parallel": {"autotp_size": _strategy("tensor_parallel_size")},
    "sequence_parallel_size": _strategy("context_parallel_size"),
    "train_micro_batch_size_per_gpu": _by_hand(_BATCH),
    "train_batch_size": _by_hand(_ALL_BATCHES),
    "optimizer": lambda given, found: found.by_hand.append(
        f"optimizer: return {given.get('type', 'it')} from configure_optimizers, with {given.get('params', {})}"
    ),
    "scheduler": _schedule,
    "steps_per_print": _left_out("steps_per_print", "the progress bar and loggers; Trainer(log_every_n_steps=...)"),
    "wall_clock_breakdown": _left_out(
        "wall_clock_breakdown", "the callback PipelineTimeline shows the times of a step"
    ),
}
_FSDP: dict[str, Any] = {
    "sharding_strategy": _sharding,
    "reshard_after_forward": _resharding,
    "offload_params": _strategy("offload", "cpu"),
    "activation_checkpointing": _strategy("recompute", "full"),
    "state_dict_type": _checkpoint_kind,
    "version": _nothing,
}
_ACCELERATE: dict[str, Any] = {
    "mixed_precision": _precision,
    "num_machines": _trainer("num_nodes"),
    "num_processes": lambda given, found: found.by_hand.append(f"devices: {given} processes over all nodes"),
    "gradient_accumulation_steps": _trainer("accumulate_grad_batches"),
    "fsdp_config": {**{f"fsdp_{name}": rule for name, rule in _FSDP.items()}, **_FSDP},
    "deepspeed_config": {
        **_GRADIENTS,
        "zero_stage": _stage,
        "offload_optimizer_device": lambda given, found: found.move("optimizer_states", given),
        "offload_param_device": lambda given, found: found.move("parameters", given),
        "deepspeed_config_file": _by_hand("deepspeed_config_file: run this command on {} too"),
    },
    "parallelism_config": {
        "parallelism_config_tp_size": _strategy("tensor_parallel_size"),
        "parallelism_config_cp_size": _strategy("context_parallel_size"),
        "parallelism_config_dp_shard_size": _shard_size,
        "parallelism_config_dp_replicate_size": _nothing,
    },
    **dict.fromkeys(
        (
            *("compute_environment", "distributed_type", "debug", "downcast_bf16", "enable_cpu_affinity", "use_cpu"),
            *("machine_rank", "main_training_function", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster"),
            *("tpu_use_sudo", "main_process_ip", "main_process_port", "gpu_ids"),
        ),
        _nothing,
    ),
}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        parse = json.loads if path.suffix == ".json" else importlib.import_module("yaml").safe_load
        content = parse(text)
    except OSError as error:
        raise UsageError(str(error)) from error
    except Exception as error:  # of the parser
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} has no keys")
    return content


def _text(found: Arguments) -> str:
    strategy, trainer = _listed(found.strategy), _listed(found.trainer)
    imports, names = ["import lightning as L"], "Hybrid3DStrategy"
    if found.scaler and found.trainer.get("precision") == "16-mixed":  # the plugin has the precision
        trainer = _listed({name: value for name, value in found.trainer.items() if name != "precision"})
        plugin = f"HybridPrecision('16-mixed', scaler=torch.amp.GradScaler({', '.join(_listed(found.scaler))}))"
        strategy.append(f"precision_plugin={plugin}")
        imports, names = [*imports, "import torch"], "Hybrid3DStrategy, HybridPrecision"
    lines = [*(f"import {module}" for module in found.imports), ""] if found.imports else []
    lines += [*imports, f"from lightning_hybrid import {names}", "", _call("strategy = Hybrid3DStrategy", strategy)]
    lines.append(_call("trainer = L.Trainer", [*trainer, "strategy=strategy"]))
    for title, items in (("by hand:", found.by_hand), ("left out:", found.left_out)):
        if items:
            lines += ["", title, *(wrapped(f"- {item}") for item in items)]
    return "\n".join(lines)


def _listed(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in arguments.items()]


def _call(function: str, arguments: Sequence[str]) -> str:
    """A call in a line, or with an argument in each line where that is longer than 100 characters."""
    line = f"{function}({', '.join(arguments)})"
    return line if len(line) <= WIDTH else "\n".join([f"{function}(", *(f"    {each}," for each in arguments), ")"])
