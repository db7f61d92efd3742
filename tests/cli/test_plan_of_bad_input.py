"""The `plan` command names what it cannot plan: values and kinds of models, files, sizes and clusters."""

import json

import pytest

from lightning_hybrid.cli import main

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "hidden_act": "silu",
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
CLUSTER = ["--hardware", "h100", "--devices", "8", "--batch", "64"]


@pytest.fixture
def plan(tmp_path, capsys):
    def run(content, *more):
        path = tmp_path / "config.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        status = main(["plan", "--config-json", str(path), *CLUSTER, *more])
        output = capsys.readouterr()
        return status, output.err.splitlines()[-1] if status == 2 else output.out

    return run


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hidden_size", "1024", "hidden_size='1024'; use a whole number from 1"),
        ("hidden_size", -1024, "hidden_size=-1024; use a whole number from 1"),
        ("hidden_size", 1024.5, "hidden_size=1024.5; use a whole number from 1"),
        ("hidden_size", True, "hidden_size=True; use a whole number from 1"),
        ("hidden_size", float("nan"), "hidden_size=nan; use a whole number from 1"),
        ("hidden_size", {}, "hidden_size={}; use a whole number from 1"),
        ("hidden_size", 10**30, "use a whole number from 1 to 2,147,483,647"),
        ("hidden_size", None, "the configuration has none of hidden_size, n_embd, d_model, dim"),
        ("num_hidden_layers", 0, "num_hidden_layers=0; use a whole number from 1 to 10,000"),
        ("num_hidden_layers", 10**6, "num_hidden_layers=1000000; use a whole number from 1 to 10,000"),
        ("intermediate_size", [2816, 1408], "intermediate_size=[2816, 1408]: the layers differ"),
        ("num_attention_heads", 15, "num_attention_heads=15 does not divide hidden_size=1024"),
        ("num_key_value_heads", 5, "num_key_value_heads=5 does not divide num_attention_heads=16"),
        ("head_dim", 0, "head_dim=0; use a whole number from 1"),
        ("num_experts_per_tok", 9, "num_experts_per_tok=9 is more than num_local_experts=8"),
        ("num_experts_per_tok", 0, "num_experts_per_tok=0; use a whole number from 1"),
        ("num_local_experts", -8, "num_local_experts=-8; use a whole number from 0"),
        ("model_type", 3, "model_type=3; use text"),
        ("architectures", "LlamaForCausalLM", "architectures='LlamaForCausalLM'; use a list of names"),
        ("hidden_act", ["silu"], "hidden_act=['silu']; use a name"),
        ("tie_word_embeddings", "no", "tie_word_embeddings='no'; use true or false"),
        ("hidden_dropout_prob", "0.1", "hidden_dropout_prob='0.1'; use a number of 0 or more"),
        ("text_config", "llama", "text_config='llama'; use a mapping"),
        ("text_config", {"hidden_size": "1"}, "hidden_size='1'; use a whole number from 1"),
        ("layer_types", 3, "layer_types=3; use a list of names"),
    ],
)
def test_values_that_no_model_has(plan, name, value, words):
    status, text = plan({**MIXTRAL, name: value})
    assert status == 2 and words in text and "--config-json" in text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "mamba", "state_size": 16},
            "'mamba' has layers with a recurrent state (state_size)",
        ),
        ({"model_type": "jamba", "mamba_d_state": 16}, "'jamba' has layers with a recurrent state (mamba_d_state)"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type 't5' has an encoder and a decoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of linear_attention (layer_types)"),
    ],
)
def test_models_of_other_layers(plan, config, words):
    status, text = plan({**LLAMA, **config})
    assert status == 2 and words in text and "give the module instead" in text


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"model_type": "tomorrow", "num_memories": 4}, "note: not counted: num_memories of model_type 'tomorrow'"),
        ({"window_size": 512}, "note: not counted: window_size of model_type"),
        ({"max_position_embeddings": 1024}, "note: samples of 2,048 tokens are longer than max_position_embeddings"),
        ({"text_config": LLAMA, "vision_config": {"hidden_size": 8}}, "note: vision_config: not counted"),
        ({"num_local_experts": 4}, "note: the configuration names no num_experts_per_tok: one expert"),
        ({"tie_word_embeddings": None}, "note: the configuration does not set tie_word_embeddings"),
        ({"moe_layer_freq": 2}, "not counted: moe_layer_freq"),
    ],
)
def test_what_gets_a_note(plan, config, note):
    status, text = plan({**LLAMA, **config})
    assert status == 0 and note in text


def test_what_is_known_has_no_note(plan):
    assert "note:" not in plan(LLAMA)[1]
    assert plan({**LLAMA, "hidden_size": 1024.0, "num_attention_heads": [16, 16], "text_config": None})[0] == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"{'hidden_size': 1}", b"[" * 100_000, b'{"hidden_size": ' + b"9" * 6000 + b"}"],
    ids=["empty", "cut", "bytes", "quotes", "deep", "long"],
)
def test_files_of_no_json(plan, content):
    status, text = plan(content)
    assert status == 2 and "config.json is no JSON file: " in text


def test_files_of_other_json(plan):
    assert "no mapping of names to values" in plan(b"[]")[1]
    assert plan(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())[0] == 0  # as Windows writes it


@pytest.mark.parametrize("flag", ["--fix", "--why"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ep=3", "ep=3 does not divide the model's 8 experts"),
        ("ep=0", "ep=0; use a whole number of 1 or more"),
        ("tp=3", "tp=3 does not divide the model's 16 heads"),
        ("tp=16", "tp=16 does not divide the model's 8 heads of keys and values"),
        ("tp=true", "tp=true; use a whole number of 1 or more"),
        ("tp=2,ep=8", "ep=8 does not divide the 4 ranks that may share experts"),
        ("pp=100", "100 stages are more than the model's 10 units"),
        ("stages=100", "100 stages are more than the model's 10 units"),
        ("cp=3", "cp=3 does not divide the 2,048 positions"),
        ("zero=3,shard_size=3", "shard_size=3 does not divide 8 devices"),
        ("m=100", "100 microbatches of "),
        ("zero=true", "zero=true; use 0, 1, 2 or 3"),
        ("tp=2,tp=4", "tp is set twice"),
        ("offload=true", "offload=true; use cpu, or a mapping"),
        ("offload={weights: cpu}", "offload={weights: cpu}; use cpu, or a mapping"),
        ("zero=1,offload={parameters: cpu}", "zero=1: parameters are on the host where replicas shard them; use 3"),
        ("recompute=some", "recompute=some; use full, selective, none"),
        ("sequence_parallel=2", "sequence_parallel=2; use true or false"),
    ],
)
def test_sizes_and_options_that_there_are_not(plan, flag, options, words):
    status, text = plan(MIXTRAL, flag, options)
    assert status == 2 and words in text and flag in text


def test_expert_ranks_of_a_model_without_experts(plan):
    assert "ep=2: the model has no experts" in plan(LLAMA, "--fix", "ep=2")[1]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--devices", "-1"], 2, "--devices -1; use 1 or more"),
        (["--batch", str(10**30)], 2, "use 1,000,000,000 at most"),
        (["--sequence", "0"], 2, "--sequence 0; use 1 or more"),
        (["--devices", "12"], 3, "a node of h100 has 8 devices"),
        (["--num-nodes", "900000"], 3, "a plan has 1,000,000 devices at most"),
        (["--hardware", "h1000"], 2, "no hardware 'h1000': give one of"),
    ],
)
def test_clusters_that_there_are_not(plan, arguments, status, words):
    found, text = plan(LLAMA, *arguments)
    assert found == status and words in text
