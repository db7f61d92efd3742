"""`lightning-hybrid migrate` prints arguments that the strategy and the Trainer take."""

import json
import math

import pytest
import yaml
from lightning.pytorch import Trainer

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.cli import main

DEEPSPEED = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "reduce_bucket_size": "auto",
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}},
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
    "zero_allow_untested_optimizer": True,
}
FSDP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "fsdp_config": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    },
    "machine_rank": 0,
}


def migrated(capsys, path, content):
    path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content))
    assert main(["migrate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    Trainer(
        accelerator="cpu", devices=2, logger=False, strategy=Hybrid3DStrategy(**found["strategy"]), **found["trainer"]
    )
    assert main(["migrate", str(path)]) == 0
    return found, capsys.readouterr().out


def test_deepspeed(capsys, tmp_path):
    found, text = migrated(capsys, tmp_path / "ds_config.json", DEEPSPEED)
    offload = {"optimizer_states": "disk:/scratch", "parameters": "cpu"}
    assert found["strategy"] == {"zero_stage": 3, "offload": offload, "recompute": "full"}
    assert found["trainer"] == {"precision": "bf16-mixed", "gradient_clip_val": 1.0, "accumulate_grad_batches": 4}
    assert [line.split(":")[0] for line in found["by_hand"]] == ["batch size 2", "optimizer", "schedule"]
    reasons = dict(line.split(": ", 1) for line in found["left_out"])
    assert list(reasons) == [
        "pin_memory",
        "overlap_comm",
        "stage3_prefetch_bucket_size, stage3_max_live_parameters",
        "stage3_gather_16bit_weights_on_model_save",
        *("partition_activations", "number_checkpoints", "steps_per_print", "wall_clock_breakdown"),
        "zero_allow_untested_optimizer",
    ]
    assert reasons["stage3_gather_16bit_weights_on_model_save"].startswith("default: a checkpoint is one full file")
    assert f"strategy = Hybrid3DStrategy(\n    zero_stage=3,\n    offload={offload},\n" in text
    assert "\nby hand:\n- batch" in text and max(map(len, text.splitlines())) <= 100, text


@pytest.mark.filterwarnings("ignore:.*not supported with .fp16.|.*16-mixed.:UserWarning")
@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")  # where the printed lines run
def test_loss_scale_and_total_batch(capsys, tmp_path):
    scaling = {"initial_scale_power": "12", "loss_scale_window": 500, "hysteresis": 2}
    config = {"fp16": {"enabled": "true", **scaling}, "zero_optimization": {"stage": "3"}, "train_batch_size": 64}
    found, text = migrated(capsys, tmp_path / "ds_config.json", config)
    assert found["strategy"] == {"zero_stage": 3}
    assert found["scaler"] == {"init_scale": 4096, "growth_interval": 500}
    scaler = "scaler=torch.amp.GradScaler(init_scale=4096.0, growth_interval=500)"
    assert f"precision_plugin=HybridPrecision('16-mixed', {scaler})" in text and "import torch\n" in text
    assert "trainer = L.Trainer(strategy=strategy)" in text  # the plugin has the precision
    exec(text.partition("\n\nby hand:")[0].partition("trainer = ")[0], {})
    [batch] = found["by_hand"]
    assert batch.startswith("train_batch_size 64 = batch size of the DataLoader x accumulate_grad_batches x replicas")


@pytest.mark.filterwarnings("ignore:.*not supported with .fp16.|.*16-mixed.:UserWarning")
def test_constant_loss_scale_does_not_grow(capsys, tmp_path):
    config = {"fp16": {"enabled": True, "loss_scale": 128}}
    found = migrated(capsys, tmp_path / "ds_config.json", config)[0]
    assert found["scaler"] == {"init_scale": 128, "growth_interval": 10**9} and "halves" in found["by_hand"][0]


@pytest.mark.parametrize(
    ("numbers", "factors"),
    [
        ({"warmup_type": "linear"}, {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0, 120: 0.0}),
        ({"warmup_type": "linear", "warmup_min_lr": 0.5e-3}, {0: 0.5, 5: 0.75, 10: 1.0, 60: 0.75, 110: 0.5}),
        ({}, {0: 0.0, 4: math.log(5) / math.log(10), 60: 0.5}),
    ],
)
def test_schedule_is_a_line_of_python(capsys, tmp_path, numbers, factors):
    numbers = {"warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 110, **numbers}
    config = {"bf16": {"enabled": True}, "scheduler": {"type": "WarmupDecayLR", "params": numbers}}
    [line] = migrated(capsys, tmp_path / "ds_config.json", config)[0]["by_hand"]
    code = line.partition("LambdaLR(optimizer, ")[2].partition("), and lr=0.001")[0]
    assert {step: eval(code, {"math": math})(step) for step in factors} == pytest.approx(factors)


def test_other_schedules_are_named_with_their_numbers(capsys, tmp_path):
    config = {"bf16": {"enabled": True}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}}
    [line] = migrated(capsys, tmp_path / "ds_config.json", config)[0]["by_hand"]
    assert "torch has no WarmupCosineLR" in line and line.endswith("SequentialLR with {'total_num_steps': 9}")


def test_accelerate(capsys, tmp_path):
    found, _ = migrated(capsys, tmp_path / "fsdp.yaml", FSDP)
    shards = {"zero_stage": 3, "reshard_after_forward": False}
    kept = {"offload": "cpu", "recompute": "full", "save_distributed_checkpoint": True}
    assert found["strategy"] == {**shards, **kept}
    assert found["trainer"] == {"precision": "bf16-mixed", "num_nodes": 2}
    assert found["by_hand"] == ["devices: 16 processes over all nodes"]
    [line] = found["left_out"]
    names = "fsdp_auto_wrap_policy, fsdp_transformer_layer_cls_to_wrap"
    assert line == f"{names}: layers are found in the module, and sharded one by one"


@pytest.mark.parametrize("version", [True, False])
def test_resharding_of_fsdp2(capsys, tmp_path, version):
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": version}}
    found, _ = migrated(capsys, tmp_path / "fsdp.yaml", config)
    assert found["strategy"] == {"zero_stage": 3, "reshard_after_forward": version}


@pytest.mark.parametrize(
    ("text", "message"), [("{}", "neither keys of DeepSpeed"), ("[1]", "has no keys"), ("{", "Expecting")]
)
def test_other_files_are_refused(capsys, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    assert main(["migrate", str(tmp_path / "config.json")]) == 2
    assert message in capsys.readouterr().err
    assert main(["migrate", str(tmp_path / "missing.json")]) == 2


def refused(capsys, path, config):
    path.write_text(json.dumps(config))
    assert main(["migrate", str(path)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("stage", [4, -1, True, 1.5, "three"])
def test_stages_that_zero_does_not_have(capsys, tmp_path, stage):
    error = refused(capsys, tmp_path / "ds_config.json", {"zero_optimization": {"stage": stage}})
    assert f"the stage of ZeRO is {stage!r}, and must be 0, 1, 2 or 3" in error
    config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}
    assert "must be 0, 1, 2 or 3" in refused(capsys, tmp_path / "config.json", config)


def test_two_precisions_are_refused(capsys, tmp_path):
    config = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert "fp16 and bf16 are both enabled" in refused(capsys, tmp_path / "ds_config.json", config)


def test_unknown_keys_are_listed_with_the_nearest_name(capsys, tmp_path):
    config = {"bf16": {"enabled": True}, "my_typo": 1, "gradient_cliping": 1.0, "flops_profiler": {"enabled": True}}
    config["zero_optimization"] = {"stage": 2, "overlap_com": True, "round_robin_gradients": True}
    assert migrated(capsys, tmp_path / "ds_config.json", config)[0]["left_out"] == [
        "my_typo: unknown key",
        "gradient_cliping: unknown key; did you mean 'gradient_clipping'?",
        "flops_profiler, round_robin_gradients: no counterpart",
        "overlap_com: unknown key; did you mean 'overlap_comm'?",
    ]


def test_lines_of_a_schedule_name_their_import_and_the_least_rate(capsys, tmp_path):
    config = {"bf16": {"enabled": True}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}}
    found, text = migrated(capsys, tmp_path / "ds_config.json", config)
    assert text.startswith("import math\n\nimport lightning as L\n") and found["imports"] == ["math"]
    assert found["by_hand"][0].endswith("lr=0.0001, which is warmup_max_lr; the rate rises from warmup_min_lr=0")
    config["scheduler"]["params"]["warmup_type"] = "linear"
    assert migrated(capsys, tmp_path / "ds_config.json", config)[1].startswith("import lightning as L\n")


def test_secondary_shards_copy_states_too(capsys, tmp_path):
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    found = migrated(capsys, tmp_path / "ds_config.json", config)[0]
    assert found["strategy"] == {"zero_stage": 3, "shard_size": 2}
    assert "a copy of everything, gradients and optimizer states too" in found["by_hand"][0]
    config["zero_optimization"]["zero_hpz_partition_size"] = 1  # DeepSpeed's default: no such shards
    found = migrated(capsys, tmp_path / "ds_config.json", config)[0]
    assert found["strategy"] == {"zero_stage": 3} and not found["by_hand"]
