"""The examples that users copy: LoRA with safetensors, a U-Net, and a Llama under SLURM, which a dry run tries."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from harness.launched_jobs import run

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA = EXAMPLES / "llama_slurm"
PAGE = (EXAMPLES.parent / "docs" / "examples.md").read_text()
SMALL = """
trainer: {accelerator: cpu, precision: 32-true, max_steps: 2, callbacks: null, logger: false}
data: {length: 16}
model:
  config: {vocab_size: 128, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 4,
    num_key_value_heads: 2, max_position_embeddings: 32, use_cache: false}
"""


def output_of(*command):
    code, output, _ = run([sys.executable, *map(str, command)], timeout=400)
    assert code == 0, output[-4000:]
    return output


@pytest.mark.slow
def test_an_adapter_of_lora_is_read_back(tmp_path):
    output = output_of(EXAMPLES / "lora_safetensors.py", "--steps", 2, "--out", tmp_path)
    assert "pipeline 2" in output and "110,592 of 964,736 parameters trained" in output, output
    assert "read back: 0.0e+00" in output, output
    assert "model.layers.3.mlp.up_proj.weight" in load_file(tmp_path / "base" / "model.safetensors")
    assert (tmp_path / "run.png").exists()


@pytest.mark.slow
def test_a_unet_segments_over_stages_and_replicas(tmp_path):
    output = output_of(EXAMPLES / "unet.py", "--devices", 4, "--images", 64, "--epochs", 1, "--out", tmp_path)
    assert "pipeline 2 x data 2" in output and "sharded instead" not in output, output
    assert re.search(r"loss [\d.]+, mean IoU 0\.\d+", output), output
    assert (tmp_path / "shapes.png").exists()


@pytest.mark.slow
def test_a_captioner_trains_on_stages_of_different_width(tmp_path):
    output = output_of(EXAMPLES / "captions.py", "--widths", 2, 1, "--images", 128, "--epochs", 3, "--out", tmp_path)
    assert re.search(r"^0 +0, 1 +encoder", output, re.MULTILINE) and "sharded instead" not in output, output
    assert re.search(r"right captions [\d.]+%", output), output
    assert (tmp_path / "timeline.svg").exists()


def test_the_job_has_a_task_for_each_rank_of_the_layout():
    script, config = (LLAMA / "llama.sbatch").read_text(), yaml.safe_load((LLAMA / "llama.yaml").read_text())
    assert subprocess.run(["bash", "-n", LLAMA / "llama.sbatch"], capture_output=True, text=True).stderr == ""
    job = {name: int(value) for name, value in re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", script, re.MULTILINE)}
    options = config["trainer"]["strategy"]["init_args"]
    assert job["ntasks-per-node"] == job["gpus-per-node"] == config["trainer"]["devices"]
    ranks = math.prod(options[f"{axis}_parallel_size"] for axis in ("data", "pipeline", "tensor"))
    assert ranks == job["nodes"] * job["ntasks-per-node"]
    shown = next(block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "zero_stage: 1" in block)
    assert yaml.safe_load(shown) == {"strategy": config["trainer"]["strategy"]}


@pytest.mark.slow
def test_a_dry_run_of_the_llama_fits_gpus_of_80_gb_and_is_drawn(tmp_path):
    dry_run = ["-m", "lightning_hybrid.cli", "dryrun", LLAMA / "train.py", "--config", LLAMA / "llama.yaml", "--json"]
    output = output_of(*dry_run, "--rank", "all")
    world = output[output.index("{\n") : output.rindex("}") + 1]
    totals = {rank["rank"]: rank["bytes"]["total"] for rank in json.loads(world)["rank"]}
    shown = re.findall(r"^rank (\d) +\d  .*?([\d,]+)$", PAGE, re.MULTILINE)
    assert len(totals) == 8 and max(totals.values()) < 64e9 and len(shown) == 2
    for rank, total in shown:
        assert totals[int(rank)] == pytest.approx(int(total.replace(",", "")), rel=0.03), "update docs/examples.md"
    command = [sys.executable, LLAMA / "memory.py", tmp_path / "memory.png"]
    subprocess.run(command, input=world, text=True, check=True)
    assert (tmp_path / "memory.png").stat().st_size > 5_000


@pytest.mark.slow
def test_a_small_llama_trains_with_that_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    output = output_of(LLAMA / "train.py", "fit", "--config", LLAMA / "llama.yaml", "--config", "small.yaml")
    assert "pipeline 2 x data 2 x tensor 2" in output and "sharded instead" not in output, output
    assert "`max_steps=2` reached" in output, output
