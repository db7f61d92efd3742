"""Costs of a transformer from a configuration as Hugging Face writes it, by the names of its numbers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_hybrid.planner.costs.layer_costs import ModelCosts
from lightning_hybrid.planner.costs.transformer_costs import TransformerShape, transformer_costs

# Names of each number over the architectures, the most common first.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"),
    "vocabulary": ("vocab_size",),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_size": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token"),
}
_OPTIONAL = {"ffn", "key_value_heads", "head_size", "experts", "experts_per_token"}
_GATED = ("silu", "swish", "swiglu", "geglu")
_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_dim", "rotary_pct", "alibi", "use_alibi")


def costs_from_config(config: Mapping[str, Any], positions: int, name: str = "") -> ModelCosts:
    """Return the costs of the transformer that a configuration describes.

    Args:
        config: Its content, such as that of ``config.json``; a ``text_config`` in it is taken instead.
        positions: Tokens of one sample.
        name: For reports; that of the configuration if empty.

    Raises:
        ValueError: A number that every transformer has is missing.
    """
    costs = transformer_costs(
        shape_from_config(config, positions), name or str(config.get("model_type", "transformer"))
    )
    if any(config.get(key) for key in ("hidden_act", "hidden_activation", "activation_function", "text_config")):
        return costs
    note = "the configuration names no hidden_act: MLPs of two matrices are counted, without a gate"
    return dataclasses.replace(costs, notes=(*costs.notes, note))


def shape_from_config(config: Mapping[str, Any], positions: int) -> TransformerShape:
    """Return the sizes of the transformer that a configuration describes; see `costs_from_config`.

    Raises:
        ValueError: A number that every transformer has is missing.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    numbers: dict[str, Any] = {}
    for field, names in _NAMES.items():
        numbers[field] = next((config[name] for name in names if config.get(name) is not None), None)
        if numbers[field] is None and field not in _OPTIONAL:
            raise ValueError(
                f"the configuration has none of {', '.join(names)}; a transformer's costs need one of them"
            )
    is_mixture = bool(numbers["experts"]) and int(numbers["experts"]) > 1
    ffn = numbers["ffn"] or 4 * numbers["hidden"]
    if is_mixture:
        ffn = config.get("moe_intermediate_size") or ffn
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "").lower()
    architectures = " ".join(config.get("architectures") or [])
    return TransformerShape(
        layers=numbers["layers"],
        hidden=numbers["hidden"],
        ffn=ffn,
        heads=numbers["heads"],
        vocabulary=numbers["vocabulary"],
        positions=positions,
        key_value_heads=numbers["key_value_heads"],
        head_size=numbers["head_size"],
        is_gated=activation.startswith(_GATED) or bool(config.get("hidden_activation")),
        is_causal="Masked" not in architectures,
        has_learned_positions=not any(config.get(name) for name in _ROTARY),
        has_dropout=any(config.get(name, 0) for name in ("hidden_dropout_prob", "resid_pdrop", "dropout")),
        has_tied_embedding=bool(config.get("tie_word_embeddings", True)),
        experts=int(numbers["experts"]) if is_mixture else 0,
        experts_per_token=int(numbers["experts_per_token"] or 1) if is_mixture else 1,
    )
