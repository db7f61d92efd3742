"""What the `plan` command prints and plans of a configuration: rates, words, float8, chunks, and the host's memory."""

import json
import re

import pytest

from lightning_hybrid.cli import main
from lightning_hybrid.cli.hardware import hardware_to_toml
from lightning_hybrid.predict.hardware import load_hardware

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MINIMAL = """
memory = 24e9
product_flops = { bfloat16 = 165e12 }
memory_bandwidth = 1e12
within_node = 12e9
between_nodes = 1.2e9
"""


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))

    def run(*more, hardware="h100"):
        arguments = ["--config-json", str(path), "--hardware", hardware, "--devices", "8", "--batch", "64"]
        status = main(["plan", *arguments, *more])
        output = capsys.readouterr()
        return status, output.err.splitlines()[-1] if status == 2 else output.out

    return run


def test_rates_are_those_of_the_prediction(plan):
    best = json.loads(plan("--json")[1])["plans"][0]
    text = plan()[1]
    tokens = best["samples_per_second"] * 2048 / 8
    flops = 6 * 7.5e9 * tokens  # of forward and backward, without the embedding and the scores
    assert best["model_flops_utilization"] == pytest.approx(flops / 989e12, rel=0.05)
    cells = f"{tokens:,.0f} +{best['model_flops_utilization']:.0%} +{best['fields']['microbatch']}"
    assert re.search(cells, text) and "of 84.9 GB" in text
    assert "a step takes 64 samples of 2,048 tokens" in text


def test_words_of_the_plans_are_explained(plan):
    text = plan("--fix", "pp=2,zero=1")[1]
    words = text.partition("\nwords\n")[2]
    assert all(re.search(rf"^  {word} +\w", words, re.MULTILINE) for word in ("dp", "pp", "zero", "MFU", "microbatch"))
    assert not re.search("^  (ep|offload) ", words, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 100


def test_float8_is_that_of_this_package(plan):
    content = json.loads(plan("--precision", "float8", "--json")[1])
    assert 'plugins=HybridPrecision("bf16-mixed", float8=Float8())' in content["trainer"]
    assert all(each["fields"][name] == 1 for each in content["plans"] for name in ("tensor", "context", "expert"))
    arguments = "--fix", "pp=1,dp=8,zero=3", "--json"
    other, own = (json.loads(plan(*arguments, "--precision", each)[1])["plans"][0] for each in ("bf16-mixed", "float8"))
    assert own["memory"] == other["memory"] and own["seconds"] < other["seconds"]


@pytest.mark.parametrize(
    ("hardware", "arguments", "words"),
    [
        ("a100-80", ["--precision", "float8"], "a100-80 has products in bfloat16, float16, float32 alone"),
        ("h100", ["--precision", "float8", "--fix", "tp=2"], "float8 scales whole tensors, which tensor ranks would"),
        ("h100", ["--precision", "transformer-engine"], "for products in float8 use --precision float8"),
    ],
)
def test_float8_that_there_is_not(plan, hardware, arguments, words):
    status, text = plan(*arguments, hardware=hardware)
    assert status == 2 and words in text


def test_selective_recomputation_and_a_loss_in_chunks_save_memory(plan):
    base = "pp=1,tp=1,cp=1,zero=3,m=1,reshard_after_forward=true,"
    kinds = "recompute=none", "recompute=selective", "recompute=full", "recompute=full,chunked_loss=true"
    found = [json.loads(plan("--why", base + kind, "--json", hardware="gb300")[1])["why"] for kind in kinds]
    memories = [each["memory"] for each in found]
    assert memories == sorted(memories, reverse=True) and len(set(memories)) == 4
    times = [each["seconds"] for each in found[:3] if each["fits"]]
    assert times == sorted(times)


def test_offload_beyond_the_host_is_refused(plan, tmp_path):
    fixed = ["--fix", "dp=8,zero=3,offload=cpu,recompute=full"]
    assert plan(*fixed)[0] == 0
    path = tmp_path / "small.toml"
    small = hardware_to_toml(load_hardware("h100")).replace("host_memory = 2e+12", "host_memory = 64e9")
    path.write_text(small)
    status, text = plan(*fixed, hardware=str(path))
    assert status == 3 and "of a node's host of 64 GB" in text


def test_a_minimal_file_has_defaults(plan, tmp_path):
    path = tmp_path / "mini.toml"
    path.write_text(MINIMAL)
    status, text = plan(hardware=str(path))
    assert status == 0 and "note: mini leaves out reserved, kernel_seconds, efficiency" in text
    found = load_hardware(str(path))
    assert found.within_node.bandwidth(1e10) == pytest.approx(12e9, rel=0.01)
    assert found.within_node.bandwidth(1e4) < 2e9 and found.product_flops["float32"] == pytest.approx(165e12 / 16)
    path.write_text(MINIMAL.replace("memory_bandwidth", "bandwidth"))
    assert "missing keys ['memory_bandwidth'], unknown keys ['bandwidth']" in plan(hardware=str(path))[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("devices_per_node = 7.5", "devices_per_node=7.5; use a whole number"),
        ("name = 3", "name=3; use text in quotes"),
        ("host_memory = 0", "host_memory=0; use a number above 0"),
        ("peak_flops = 3", "peak_flops=3; use FLOP/s by number format"),
    ],
)
def test_a_minimal_file_with_what_there_is_not(plan, tmp_path, line, words):
    path = tmp_path / "mini.toml"
    path.write_text(f"{MINIMAL}{line}\n")
    assert words in plan(hardware=str(path))[1]


@pytest.mark.parametrize("name", ["b300", "gb200", "gb300", "rtx4090"])
def test_presets_of_new_devices(plan, name):
    status, text = plan(hardware=name)
    assert status == 0 and f"on 8 {name} (one node)" in text
    assert "note: uncalibrated: no run like this was compared" in text


@pytest.mark.parametrize(
    ("name", "other"), [("b300", "b200"), ("gb200", "b200"), ("gb300", "b200"), ("rtx4090", "a100-80")]
)
def test_what_no_run_showed_is_taken_from_the_device_that_the_preset_names(name, other):
    own, known = load_hardware(name), load_hardware(other)
    shared = own.efficiency.keys() & known.efficiency.keys()
    assert {key: own.efficiency[key] for key in shared} == {key: known.efficiency[key] for key in shared}
    assert len(shared) >= 3 and (own.attention, own.overlap) == (known.attention, known.overlap)
