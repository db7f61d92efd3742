"""Configurations of published models have their number of parameters, and attention to windows costs less."""

import pytest

from lightning_hybrid.predict.costs.config import costs_from_config

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
