"""Parameters and FLOPs of configurations are those of a count by hand: latent attention, windows, experts, ties."""

import pytest

from lightning_hybrid.predict.costs.config import costs_from_config
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout
from lightning_hybrid.predict.memory import predict_memory

LATENT = {
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_act": "silu", "rope_theta": 1e4,
    "tie_word_embeddings": False,
}  # fmt: skip
SHARED = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts": 64,
    "num_experts_per_tok": 8, "vocab_size": 151936, "hidden_act": "silu", "rope_theta": 1e6,
    "intermediate_size": 18944, "tie_word_embeddings": False,
}  # fmt: skip
DENSE_FIRST = {
    **LATENT, "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "vocab_size": 129280,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (DENSE_FIRST, 671e9, 37e9),
        (
            {
                **DENSE_FIRST,
                **{"hidden_size": 5120, "num_hidden_layers": 60, "intermediate_size": 12288, "vocab_size": 102400},
                **{"moe_intermediate_size": 1536, "n_shared_experts": 2, "n_routed_experts": 160},
                **{"num_experts_per_tok": 6, "first_k_dense_replace": 1},
            },
            236e9,
            21e9,
        ),
        (SHARED, 57.4e9, 14.2e9),
    ],
    ids=["671 billion", "236 billion", "57 billion"],
)
def test_parameters_of_published_mixtures(config, parameters, active):
    costs = costs_from_config(config, 16)
    assert costs.parameters == pytest.approx(parameters, rel=0.003)
    products = sum(p.flops * layer.count for layer in costs.layers for p in layer.products if p.has_weight) / 32
    embedding = config["vocab_size"] * config["hidden_size"]
    assert products + embedding == pytest.approx(active, rel=0.05)
    assert costs.notes == ()


def test_windows_shorten_attention():
    config = {**SHARED, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 14}
    full, half = costs_from_config(SHARED, 4096), costs_from_config(config, 4096)
    every = costs_from_config({**config, "layer_types": None}, 4096)
    assert every.flops < half.flops < full.flops
    assert half.flops == pytest.approx((every.flops + full.flops) / 2)
    assert costs_from_config({**config, "use_sliding_window": False}, 4096).flops == full.flops


MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "hidden_act": "silu",
    "sliding_window": 4096, "tie_word_embeddings": False, "rope_theta": 1e4,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "rope_theta": 1e4,
    "cache_implementation": "hybrid", "tie_word_embeddings": True,
}  # fmt: skip


def pairs(tokens, window):
    """Positions that all positions of a causal sequence attend to, at most ``window`` each; half of the last counts."""
    return tokens * min(tokens, window) - min(tokens, window) ** 2 / 2


def counted(config, tokens, queries, outputs, keys, mlp, windows, values=None):
    """Parameters and FLOPs of a sample: of projections of attention, MLPs, scores and the head."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    attention = width * queries + keys * width + outputs * width
    scores = sum(2 * pairs(tokens, window) * (queries + (values or queries)) for window in windows)
    matrices = len(windows) * attention + sum(mlp)
    parameters = matrices + vocabulary * width * (1 if config.get("tie_word_embeddings", True) else 2)
    return parameters, 2 * tokens * (matrices + vocabulary * width) + scores


@pytest.mark.parametrize("tokens", [2048, 4096, 32768])
def test_windows_of_all_layers(tokens):
    parameters, flops = counted(MISTRAL, tokens, 4096, 4096, 2 * 1024, [3 * 4096 * 14336] * 32, [4096] * 32)
    costs = costs_from_config(MISTRAL, tokens)
    assert costs.parameters == pytest.approx(parameters, rel=1e-4)
    assert costs.flops == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_windows_of_every_other_layer_and_wide_heads(tokens):
    windows = [4096, tokens] * 21
    parameters, flops = counted(GEMMA, tokens, 16 * 256, 16 * 256, 2 * 8 * 256, [3 * 3584 * 14336] * 42, windows)
    for config in (GEMMA, {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 21}):
        costs = costs_from_config(config, tokens)
        assert costs.parameters == pytest.approx(parameters, rel=1e-4)
        assert costs.flops == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("query_rank", [1536, None])
def test_latent_attention_and_dense_first_layers(query_rank):
    config, tokens, width = {**DENSE_FIRST, "q_lora_rank": query_rank}, 4096, 7168
    queries, values = 128 * (128 + 64), 128 * 128
    attention = width * (query_rank or 0) + (query_rank or width) * queries
    attention += width * (512 + 64) + 512 * 128 * (128 + 128) + values * width
    dense, experts, used = 3 * width * 18432, 3 * width * 2048 * 256, 3 * width * 2048 * (8 + 1)
    router, shared, head = width * 256, 3 * width * 2048, 129280 * width
    parameters = 61 * attention + 3 * dense + 58 * (experts + shared + router) + 2 * head
    products = 61 * attention + 3 * dense + 58 * (used + router) + head
    costs = costs_from_config(config, tokens)
    assert costs.parameters == pytest.approx(parameters, rel=1e-4)
    scores = 61 * 2 * pairs(tokens, tokens) * (queries + values)
    assert costs.flops == pytest.approx(2 * tokens * products + scores, rel=1e-9)
    first, others = costs.layers[1:3]
    assert (first.count, others.count) == (3, 58) and first.routed_parameters == 0
    sharded = 61 * ((query_rank or width) * queries + 512 * 128 * 256 + values * width)
    sharded += 3 * dense + 58 * shared
    assert sum(layer.count * layer.sharded_parameters for layer in (first, others)) == sharded


def test_shared_experts_are_plain_products():
    tokens, width = 4096, 3584
    attention = width * (2 * 3584 + 2 * 4 * 128)
    shared, router = 3 * width * 20480, width * 64
    used = attention + 3 * width * 2560 * 8 + shared + router
    costs = costs_from_config(SHARED, tokens)
    head = 151936 * width
    assert costs.parameters == pytest.approx(28 * (used + 3 * width * 2560 * 56) + 2 * head, rel=1e-4)
    scores = 28 * 2 * pairs(tokens, tokens) * 2 * width
    assert costs.flops == pytest.approx(2 * tokens * (28 * used + head) + scores, rel=1e-9)
    plain = [p for p in costs.layers[1].products if p.groups == 1 and p.has_weight and 20480 in (p.inner, p.columns)]
    assert len(plain) == 1 and costs.layers[1].routed_parameters == 3 * width * 2560 * 64


def test_windows_beside_dense_first_layers():
    """Both kinds of layers have the same share of windows."""
    config = {**SHARED, "first_k_dense_replace": 1, "sliding_window": 512}
    full, every = costs_from_config({**config, "sliding_window": None}, 4096), costs_from_config(config, 4096)
    saved = 28 * 2 * (pairs(4096, 4096) - pairs(4096, 512)) * 2 * 3584
    assert full.flops - every.flops == pytest.approx(saved, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "max_window_layers": 21}, 7),
        ({"use_sliding_window": False, "max_window_layers": 21}, 0),
        ({"sliding_window_pattern": 4}, 21),
        ({"sliding_window_pattern": "LLLG"}, 21),
        ({"_sliding_window_pattern": 6}, 24),
        ({"cache_implementation": "hybrid"}, 14),
        ({"layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 25}, 3),
    ],
)
def test_layers_with_windows(changes, windows):
    costs = [costs_from_config({**SHARED, "sliding_window": size, **changes}, 4096).flops for size in (None, 512)]
    saved = windows * 2 * (pairs(4096, 4096) - pairs(4096, 512)) * 2 * 3584
    assert costs[0] - costs[1] == pytest.approx(saved, rel=1e-9, abs=1.0)


@pytest.mark.parametrize(
    ("config", "copies"),
    [
        ({"tie_word_embeddings": False}, 2),
        ({"tie_word_embeddings": True}, 1),
        ({}, 1),
    ],
)
def test_memory_of_tied_embeddings(config, copies):
    base = {name: size for name, size in MISTRAL.items() if name != "tie_word_embeddings"}
    costs = costs_from_config({**base, **config}, 2048)
    embedding = 32000 * 4096
    assert sum(layer.parameters for layer in (costs.layers[0], costs.layers[-1])) // embedding == copies
    memory = predict_memory(costs, PlanLayout(batch=1), FORMATS["bf16-mixed"], load_hardware("gb300"))
    assert memory.ranks[0]["parameters"] == 4 * costs.parameters
    two = predict_memory(costs, PlanLayout(pipeline=2, batch=2), FORMATS["bf16-mixed"], load_hardware("gb300"))
    held = sum(rank["parameters"] for rank in two.ranks) / 4
    assert held == pytest.approx(costs.parameters + (embedding if copies == 1 else 0))


def test_one_head_of_keys_and_values():
    config = {**MISTRAL, "num_key_value_heads": None, "multi_query": True}
    assert costs_from_config(config, 2048).key_value_heads == 1
    assert costs_from_config({**config, "new_decoder_architecture": True}, 2048).key_value_heads == 32
