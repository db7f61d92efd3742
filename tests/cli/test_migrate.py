"""`lightning-hybrid migrate` prints arguments that the strategy and the Trainer take."""

import json

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
        "reduce_bucket_size": "auto",
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "wall_clock_breakdown": False,
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
    assert found["strategy"] == {"zero_stage": 3, "offload": offload}
    assert found["trainer"] == {"precision": "bf16-mixed", "gradient_clip_val": 1.0, "accumulate_grad_batches": 4}
    assert [line.split(":")[0] for line in found["by_hand"]] == ["batch size 2", "optimizer"]
    assert [line.split(":")[0] for line in found["left_out"]] == ["overlap_comm", "stage3_prefetch_bucket_size"]
    assert f"strategy = Hybrid3DStrategy(zero_stage=3, offload={offload})\n" in text and "\nby hand:\n- batch" in text


def test_accelerate(capsys, tmp_path):
    found, _ = migrated(capsys, tmp_path / "fsdp.yaml", FSDP)
    shards = {"zero_stage": 3, "reshard_after_forward": False}
    kept = {"offload": "cpu", "recompute": "full", "save_distributed_checkpoint": True}
    assert found["strategy"] == {**shards, **kept}
    assert found["trainer"] == {"precision": "bf16-mixed", "num_nodes": 2}
    assert found["by_hand"] == ["devices: 16 processes over all nodes"]
    assert len(found["left_out"]) == 2 and all("layers are found in the module" in each for each in found["left_out"])


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
