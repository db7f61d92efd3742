"""Layers of transformers models are found like any unit, and are fully sharded."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.recording.units import choose_units
from lightning_hybrid.tensor.proof.example import copied
from lightning_hybrid.tensor.search.unit import plan_unit

transformers: Any = pytest.importorskip("transformers")

SIZES = {"vocab_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32}
GATED = {**SIZES, "intermediate_size": 48}
IDS = torch.arange(20).view(2, 10)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make(name, **options):
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(config).train()


def text(**options):
    return {"input_ids": IDS, **options}


# name -> model, its inputs, and how many groups each kind of unit has
MODELS = {
    "GPT2": lambda: (make("GPT2", vocab_size=40, n_embd=32, n_layer=4, n_head=4, **SPECIAL), text()),
    "Llama": lambda: (make("Llama", **GATED, **SPECIAL, num_key_value_heads=2), text()),
    "T5": lambda: (
        make("T5", vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4),
        text(decoder_input_ids=IDS[:, :6], attention_mask=(IDS % 7 > 0).long()),
    ),
    "Bert": lambda: (make("Bert", **GATED), text(attention_mask=(IDS % 7 > 0).long())),
    "ViT": lambda: (
        make("ViT", **{k: v for k, v in GATED.items() if k != "vocab_size"}, image_size=16, patch_size=4),
        {"pixel_values": torch.randn(2, 3, 16, 16)},
    ),
    "Mixtral": lambda: (make("Mixtral", **GATED, **SPECIAL, num_key_value_heads=2, num_local_experts=4), text()),
    "GPTNeoX": lambda: (make("GPTNeoX", **GATED, **SPECIAL), text()),
    "Whisper": lambda: (
        make(
            "Whisper",
            vocab_size=40,
            d_model=32,
            encoder_layers=4,
            decoder_layers=4,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=8,
            max_source_positions=16,
            decoder_start_token_id=1,
            **SPECIAL,
        ),
        {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": IDS[:, :6]},
    ),
    "Qwen3": lambda: (make("Qwen3", **GATED, **SPECIAL, num_key_value_heads=2, head_dim=8), text()),
    "Phi3": lambda: (make("Phi3", **GATED, **SPECIAL, num_key_value_heads=2), text()),
}


def calls_of_units(model, inputs):
    """The first call of each unit with linears, by the class of the unit: its arguments as they were before it."""
    calls = {}

    def note(module, args, kwargs):
        copy = map_leaves(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copied(leaf), (args, kwargs))
        calls.setdefault(type(module), (module, *copy))

    hooks = [
        unit.register_forward_pre_hook(note, with_kwargs=True)
        for unit in choose_units(model, 4).values()
        if len(list(unit.modules())) > 6
    ]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return calls.values()


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_sharded_in_pairs(name):
    model, inputs = MODELS[name]()
    calls = calls_of_units(model, inputs)
    assert calls
    for unit, args, kwargs in calls:
        plan = plan_unit(unit, args, kwargs, 2)
        table = "\n".join([type(unit).__name__, *plan.lines()])
        assert plan.groups and all(group.role == "column" for group in plan.groups), table
        linears = {fqn for fqn, m in unit.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
        assert set(plan.roles) == linears, table
        assert plan.num_trials <= 20


def test_repeated_key_heads_and_per_head_norms():
    model, inputs = MODELS["Qwen3"]()
    [(unit, args, kwargs)] = calls_of_units(model, inputs)
    plan = plan_unit(unit, args, kwargs, 4)
    assert plan.summed == ("self_attn.k_norm.weight", "self_attn.q_norm.weight")
    assert plan.shared_pieces == ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
    assert len(plan.groups) == 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "Qwen3" else pytest.mark.slow) for name in MODELS]
)
def test_positions_are_sharded_over_context_ranks_beside_tensor_ranks(name):
    """Of Qwen3 two key heads are repeated over context ranks, and norms on heads are summed over both."""
    model, inputs = MODELS[name]()
    for unit, args, kwargs in calls_of_units(model, inputs):
        plan, alone = (plan_unit(unit, args, kwargs, 2, context=context) for context in (2, 1))
        assert plan.positions is not None, plan.full_sequence_reason
        exchanging = [group for group in plan.groups if plan.exchanges(group)]
        assert 0 < len(exchanging) < max(2, len(plan.groups)), "an MLP exchanges nothing"
        assert plan.placements == alone.placements and plan.full_sequence_plan.groups == alone.groups
        if name == "Qwen3":
            in_context = plan_unit(unit, args, kwargs, 1, context=2)
            assert in_context.positions is not None, in_context.full_sequence_reason
