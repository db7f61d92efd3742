"""Options by the names of Lightning's strategies, FSDP, accelerate and DeepSpeed: resolved to ours, or refused."""

import inspect
import itertools
import sys

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.strategies.options.keywords_of_deepspeed_and_accelerate import AccelerateNames
from lightning_hybrid.strategies.options.names_of_other_libraries import _MEANINGS, OtherNames, resolve_names
from models.tiny import Tiny

ENCODER, DECODER = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
OWN = {p.name: p.default for p in inspect.signature(Hybrid3DStrategy).parameters.values() if p.kind != p.VAR_KEYWORD}


MEANT = [
    ({"activation_checkpointing": True}, {"recompute": "full"}),
    ({"activation_checkpointing": False}, {"recompute": None}),
    ({"activation_checkpointing": ENCODER}, {"recompute": [ENCODER]}),
    ({"activation_checkpointing": [ENCODER, DECODER]}, {"recompute": [DECODER, ENCODER]}),
    ({"activation_checkpointing_policy": {ENCODER, DECODER}}, {"recompute": [DECODER, ENCODER]}),
    ({"activation_checkpointing_policy": ModuleWrapPolicy({ENCODER})}, {"recompute": [ENCODER]}),
    ({"gradient_checkpointing": True}, {"recompute": "full"}),
    ({"cpu_offload": True}, {"offload": "cpu"}),
    ({"cpu_offload": None, "offload": "cpu"}, {"offload": "cpu"}),
    ({"cpu_offload": CPUOffload(offload_params=True)}, {"offload": "cpu"}),
    ({"cpu_offload": CPUOffload(offload_params=False)}, {"offload": None}),
    ({"offload_policy": CPUOffloadPolicy()}, {"offload": "cpu"}),
    ({"offload_policy": OffloadPolicy()}, {"offload": None}),
    ({"offload_optimizer": True}, {"offload": {"optimizer_states": "cpu"}}),
    (
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
        {"zero_stage": 3, "offload": {"optimizer_states": "cpu", "parameters": "cpu"}},
    ),
    ({"offload_optimizer": False, "offload": "cpu"}, {"offload": "cpu"}),
    ({"stage": 2}, {"zero_stage": 2}),
    ({"sharding_strategy": "FULL_SHARD"}, {"zero_stage": 3}),
    ({"sharding_strategy": "full_shard", "zero_stage": 3}, {"zero_stage": 3}),
    ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"zero_stage": 3, "reshard_after_forward": False}),
    ({"sharding_strategy": "NO_SHARD"}, {"zero_stage": 0}),
    ({"sharding_strategy": "HYBRID_SHARD", "shard_size": 4}, {"zero_stage": 3, "shard_size": 4}),
    (
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 4)},
        {"zero_stage": 3, "shard_size": 4, "data_parallel_size": 8},
    ),
    (
        {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "device_mesh": [2, 4]},
        {"zero_stage": 3, "shard_size": 4, "data_parallel_size": 8, "reshard_after_forward": False},
    ),
    ({"state_dict_type": "sharded"}, {"save_distributed_checkpoint": True}),
    ({"state_dict_type": "SHARDED_STATE_DICT"}, {"save_distributed_checkpoint": True}),
    ({"state_dict_type": StateDictType.FULL_STATE_DICT}, {}),
    ({"tp_size": 2, "cp_size": 4}, {"tensor_parallel_size": 2, "context_parallel_size": 4}),
    ({"compile": True}, {"compile": "units"}),
    ({"compile": False}, {}),
    ({"find_unused_parameters": True, "static_graph": False, "use_orig_params": True}, {}),
    ({"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "reduce_bucket_size": "auto"}, {}),
    ({"allgather_bucket_size": 5e8, "overlap_comm": False, "contiguous_gradients": True}, {}),
    # accelerate's
    ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, {"reshard_after_forward": True}),
    ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": True}, {"zero_stage": 3, "offload": "cpu"}),
    ({"fsdp_sharding_strategy": 1, "fsdp_activation_checkpointing": True}, {"zero_stage": 3, "recompute": "full"}),
    ({"fsdp_sharding_strategy": 2}, {"zero_stage": 3, "reshard_after_forward": False}),
    (
        {"fsdp_sharding_strategy": "3", "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
        {"zero_stage": 0, "save_distributed_checkpoint": True},
    ),
    ({"fsdp_sharding_strategy": 4, "shard_size": 4}, {"zero_stage": 3, "shard_size": 4}),
    (
        {"sharding_strategy": "HYBRID_SHARD_ZERO2", "fsdp_device_mesh": (2, 4)},
        {"zero_stage": 3, "shard_size": 4, "data_parallel_size": 8, "reshard_after_forward": False},
    ),
    (
        {"sharding_strategy": 5, "shard_size": 4},
        {"zero_stage": 3, "shard_size": 4, "reshard_after_forward": False},
    ),
    ({"sync_module_states": True, "gradient_as_bucket_view": False, "auto_wrap_policy": None}, {}),
]


@pytest.mark.parametrize(
    ("given", "ours"), MEANT, ids=[f"{number}-{','.join(given)}" for number, (given, _) in enumerate(MEANT)]
)
def test_meanings(given, ours):
    assert Hybrid3DStrategy(**given).options == Hybrid3DStrategy(**ours).options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"activation_checkpointing_policy": lambda module: True}, "recompute to 'full', 'selective', or names"),
        ({"cpu_offload": "disk"}, r"cpu_offload='disk'; .*set offload='cpu'"),
        ({"offload_parameters": "nvme"}, r"set offload={'parameters': 'cpu'} or 'disk:PATH'"),
        ({"sharding_strategy": "SHARD"}, "sharding_strategy='SHARD' is unknown; use FULL_SHARD, .*zero_stage="),
        ({"sharding_strategy": "HYBRID_SHARD"}, "number is not known yet; set shard_size"),
        ({"device_mesh": 8}, "device_mesh=8; .*set data_parallel_size to their product"),
        ({"state_dict_type": "local"}, "state_dict_type='local'; .*save_distributed_checkpoint"),
        ({"state_dict_type": FullStateDictConfig()}, "state_dict_type=.*save_distributed_checkpoint"),
        ({"stage": 4}, "zero_stage=4; use 0"),
        ({"tp_size": "all"}, "tensor_parallel_size='all'; use 'auto' or a whole number of 1 or more"),
        ({"find_unused_parameters": "no"}, "find_unused_parameters='no'; use True or False"),
        ({"mixed_precision": MixedPrecision()}, r"mixed_precision=.*set Trainer\(precision="),
        ({"auto_wrap_policy": {ENCODER}}, "auto_wrap_policy=.*layers are found in the module.*leave it out"),
        ({"fsdp_sharding_strategy": 5}, "fsdp_sharding_strategy=5 .*number is not known yet; set shard_size"),
        ({"sharding_strategy": True}, "sharding_strategy=True is unknown"),
        ({"fsdp_min_num_params": 1000}, "fsdp_min_num_params=1000: layers are found in the module.*leave it out"),
        ({"fsdp_transformer_layer_cls_to_wrap": "Block"}, "layers are found in the module.*leave it out"),
        ({"fsdp_offload_params": True, "cpu_offload": False}, "cpu_offload=False means offload=None, but fsdp_offload"),
        ({"config": {str(number): 0 for number in range(9)}}, r"config={\.\.\. 9 entries}: no file of DeepSpeed's"),
        ({"bf16": {"enabled": True}}, r"bf16={\.\.\. 1 entry}: set Trainer\(precision='bf16-mixed'\)"),
        ({"fp16": True}, "fp16=True: set Trainer.precision='16-mixed'"),
        ({"remote_device": "cpu"}, "remote_device='cpu': build the module inside trainer.init_module"),
        ({"train_micro_batch_size_per_gpu": 4}, "set the batch size of the DataLoader"),
        ({"logging_batch_size_per_gpu": 4}, "leave it out"),
        ({"partition_activations": True}, "set sequence_parallel=True with tensor_parallel_size"),
        ({"cpu_checkpointing": True}, "cpu_checkpointing=True: .*stays on the device"),
        ({"loss_scale": 128}, "loss_scale=128: .*scaler="),
        ({"process_group": object()}, "built from the sizes"),
        ({"pin_memory": True}, "not in pinned memory; leave it out"),
        ({"ddp_comm_hook": fp16_compress_hook}, r"=fp16_compress_hook: set .*GradientCompression\('fp16'\)\]\)"),
        ({"ddp_comm_hook": powerSGD_hook}, r"=powerSGD_hook: set .*GradientCompression\('powersgd'\)\]\)"),
        ({"ddp_comm_hook": lambda state, bucket: None}, "with one of powersgd, fp16"),
        (
            {"ddp_comm_state": PowerSGDState(None, 2, start_powerSGD_iter=7)},
            r"GradientCompression\('powersgd', rank=2, start_step=7\)",
        ),
        ({"model_averaging_period": 4}, r"LocalSGD\(every=4\)"),
        ({"offload": {"parameters": "cpu"}}, "set zero_stage=3, or leave 'parameters' out"),
        ({"offload": {"gradients": "cpu"}}, "set zero_stage=1, 2 or 3, or leave 'gradients' out"),
        ({"reshard_after_forward": 4}, "reshard_after_forward=4: .*set shard_size=4"),
        ({"reshard_after_forward": 1}, "reshard_after_forward=1: .*set shard_size=1"),
        ({"reshard_after_forward": 0}, "reshard_after_forward=0: .*set shard_size=0"),
        # Two keywords that contradict each other are both named.
        ({"cpu_offload": False, "offload": "cpu"}, "cpu_offload=False means offload=None, but offload='cpu' is set"),
        ({"compile": True, "activation_checkpointing": True, "recompute": 2}, "recompute='full', but recompute=2 is"),
        ({"sharding_strategy": "NO_SHARD", "zero_stage": 2}, "sharding_strategy='NO_SHARD' .*zero_stage=2 is set"),
        (
            {"sharding_strategy": "FULL_SHARD", "stage": 2},
            "(stage=2|'FULL_SHARD') means .*(stage=2|'FULL_SHARD'), which",
        ),
        (
            {"cpu_offload": True, "offload_optimizer": True},
            "offload_optimizer=True means .*, but cpu_offload=True, which means offload='cpu', is",
        ),
        ({"state_dict_type": "full", "save_distributed_checkpoint": True}, "save_distributed_checkpoint=True is set"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value,
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        Hybrid3DStrategy(**given)


def test_each_other_name_is_refused_or_resolved_to_own_options():
    with_prefix = AccelerateNames.__annotations__.keys() - _MEANINGS.keys()
    assert OtherNames.__annotations__.keys() == _MEANINGS.keys() | with_prefix
    assert {name.removeprefix("fsdp_") for name in with_prefix} <= _MEANINGS.keys() | OWN.keys()
    assert not _MEANINGS.keys() & OWN.keys()
    for name, value in itertools.product(_MEANINGS, (True, "x", 3)):
        try:
            resolved = resolve_names(OWN, {name: value}, OWN)
        except ValueError as error:
            assert name in str(error)
        else:
            assert resolved.keys() == OWN.keys()


# FSDPStrategy passes further keywords on to torch's class.
KINDS = [DDPStrategy, FSDPStrategy, FullyShardedDataParallel, DeepSpeedStrategy, ModelParallelStrategy]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_keyword_of_lightning_has_an_answer(kind):
    keywords = {p.name for p in inspect.signature(kind).parameters.values() if p.kind != p.VAR_KEYWORD}
    assert keywords - OWN.keys() - _MEANINGS.keys() - {"module"} == set()


def test_every_key_of_a_file_of_accelerate_has_an_answer():
    launch = pytest.importorskip("accelerate.commands.launch")
    parser = launch.launch_command_parser()
    keys = {action.dest for action in parser._actions if action.dest.startswith("fsdp_")}
    assert len(keys) > 10 and keys <= OtherNames.__annotations__.keys()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tensor_paralel_size", "; the nearest are tensor_parallel_size,"),
        ("fsdp_ofload_params", "; .*offload_params"),
        ("fsdp_qq", "$"),
        ("cpu_offloading", "; .*cpu_offload"),
        ("qq", "$"),
    ],
)
def test_unknown_keywords(name, nearest):
    with pytest.raises(TypeError, match=f"no option '{name}'{nearest}"):
        Hybrid3DStrategy(**{name: 2})


YAML = """
sharding_strategy: HYBRID_SHARD
device_mesh: [1, 1]
activation_checkpointing: [torch.nn.Sequential]
activation_checkpointing_policy: [torch.nn.Sequential]
state_dict_type: sharded
offload_optimizer: true
compile: true
find_unused_parameters: true
reshard_after_forward: null
fsdp_version: 2
fsdp_use_orig_params: true
fsdp_sharding_strategy: HYBRID_SHARD
fsdp_state_dict_type: SHARDED_STATE_DICT
fsdp_reshard_after_forward: true
thread_count: 4
"""


@pytest.mark.filterwarnings("ignore")  # LightningCLI calls deprecated functions of jsonargparse
def test_yaml_of_lightning_cli(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    strategy = {"class_path": "lightning_hybrid.Hybrid3DStrategy", "init_args": yaml.safe_load(YAML)}
    trainer = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "strategy": strategy}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    arguments = ["--config", str(tmp_path / "config.yaml"), "--seed_everything", "false"]
    cli = LightningCLI(Tiny, args=arguments, run=False, save_config_callback=None)
    options = cli.trainer.strategy.options
    assert (options.zero_stage, options.shard_size, options.sizes["data_parallel_size"]) == (3, 1, 1)
    assert (options.recompute, options.compile) == ([nn.Sequential], "units")
    assert options.offload == {"optimizer_states": "cpu"}
    assert options.save_distributed_checkpoint and options.reshard_after_forward is True


def test_trainer_takes_them():
    strategy = Hybrid3DStrategy(activation_checkpointing=True, tp_size=1)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert trainer.strategy.options.recompute == "full"
