"""Costs of a transformer from its configuration, such as ``config.json``, whose values are checked as they are read.

A value that no transformer has is refused by its name. What is left out of the costs, or may be, is a note.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.predict.costs.layers import LayerCosts, ModelCosts
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs

# Names of each size over the architectures, the most common first.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_size": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token"),
    "experts_width": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "shared_width": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "window": ("sliding_window",),
    "full_layers": ("max_window_layers",),
    "query_rank": ("q_lora_rank",),
    "key_value_rank": ("kv_lora_rank",),
    "rotary_size": ("qk_rope_head_dim",),
    "unrotated_size": ("qk_nope_head_dim",),
    "value_size": ("v_head_dim",),
    "positions": ("max_position_embeddings", "n_positions"),
}
_MAY_BE_ZERO = (
    "experts", "shared_experts", "shared_width", "dense_layers", "window", "full_layers", "rotary_size",
    "unrotated_size",
)  # fmt: skip
_NEEDED = ("layers", "hidden", "heads", "vocabulary")
_MOST_LAYERS, _LARGEST = 10_000, 2**31 - 1
_GATED = ("silu", "swish", "swiglu", "geglu")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_dim", "rotary_pct", "alibi", "use_alibi")
_DROPOUTS = ("hidden_dropout_prob", "resid_pdrop", "dropout")
_PATTERN_KEYS = "sliding_window_pattern", "_sliding_window_pattern"
_OF_TEXT = ("text_config", "llm_config", "language_config")
# Keys of sizes, such as num_memory_tokens or window_size: those that nothing here reads get a note.
_SIZE = re.compile(
    r"^(num|n)_|_(size|dim|rank|layers|heads|width|window|groups?|interval|period|step|freq|experts|replace)$"
)
_NO_COSTS = (
    "type_vocab_size", "rotary_dim", "n_ctx", "n_group", "topk_group", "no_rope_layer_interval",
    "num_labels", "num_return_sequences", "qk_head_dim",
)  # fmt: skip
# Beginnings and ends of keys of layers with a recurrent state.
_RECURRENT = ("ssm_", "time_step_", "lru_width", "attention_hidden_size", "linear_num_"), ("state_size", "d_state")
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "block_types")
_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention", "attention"))
_INSTEAD = "; give the module instead of its configuration: its step is recorded"


def costs_from_config(config: Mapping[str, Any], positions: int, name: str = "") -> ModelCosts:
    """Return the costs of the transformer that a configuration describes.

    Args:
        config: Its content, such as that of ``config.json``; a ``text_config`` in it is taken instead.
        positions: Tokens of one sample.
        name: For reports; that of the configuration if empty.

    Raises:
        ValueError: A number that every transformer has is missing, a value is none that it can have, or the layers are
            others than attention and an MLP.
    """
    read = ModelConfig.read(config)
    costs = transformer_costs(shape_from_config(config, positions), name or read.model_type or "transformer")
    layers = tuple(_with_selective(layer) if layer.repeats else layer for layer in costs.layers)
    return dataclasses.replace(costs, layers=layers, notes=(*costs.notes, *read.notes(positions)))


def _with_selective(layer: LayerCosts) -> LayerCosts:
    """Under selective recomputation a layer keeps its input, and the results of its products and of attention."""
    kept = sum(each.rows * each.columns for each in layer.products if each.has_weight and each.sharded != "inner")
    scored = [each for each in layer.products if each.is_attention]
    kept += sum(each.rows * each.columns * each.count for each in scored[-1:])
    return dataclasses.replace(layer, selective_saved=min(layer.saved, layer.replicated_saved + kept))


def shape_from_config(config: Mapping[str, Any], positions: int) -> TransformerShape:
    """Return the sizes of the transformer that a configuration describes; see `costs_from_config`.

    Raises:
        ValueError: As `costs_from_config`.
    """
    read = ModelConfig.read(config)
    hidden, heads, experts = read.needed("hidden"), read.needed("heads"), read.experts
    latent = read.size("key_value_rank")
    return TransformerShape(
        layers=read.needed("layers"),
        hidden=hidden,
        ffn=(read.size("experts_width") if experts else 0) or read.size("ffn") or 4 * hidden,
        heads=heads,
        vocabulary=read.needed("vocabulary"),
        positions=positions,
        key_value_heads=read.key_value_heads or None,
        head_size=(read.size("unrotated_size") + read.size("rotary_size") if latent else read.size("head_size"))
        or None,
        is_gated=read.is_gated,
        is_causal=not any("Masked" in name for name in read.architectures),
        has_learned_positions=not any(read.content.get(name) for name in _ROTARY),
        has_dropout=any(read.number(name) for name in _DROPOUTS),
        has_tied_embedding=read.flag("tie_word_embeddings", default=True),
        experts=experts,
        experts_per_token=read.size("experts_per_token") or 1 if experts else 1,
        shared_ffn=read.shared_width if experts else 0,
        dense_layers=min(read.dense_layers, read.needed("layers") - 1) if experts else 0,
        dense_ffn=read.size("ffn") or 4 * hidden,
        window=read.size("window"),
        windowed_share=read.windowed_layers / read.needed("layers"),
        query_rank=read.size("query_rank") if latent else 0,
        key_value_rank=latent,
        rotary_size=read.size("rotary_size") if latent else 0,
        value_size=(read.size("value_size") or None) if latent else None,
    )


@dataclass(frozen=True)
class ModelConfig:
    """The content of a configuration; what is read of it is checked."""

    content: Mapping[str, Any]  # of the language model
    left_out: tuple[str, ...] = ()  # keys of other models beside it

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Take the language model of a configuration, and check it.

        Raises:
            ValueError: As `costs_from_config`.
        """
        others: tuple[str, ...] = ()
        for key in _OF_TEXT:
            inner = config.get(key)
            if isinstance(inner, Mapping):
                others = tuple(name for name in config if name.endswith("_config") and name not in _OF_TEXT)
                others = tuple(name for name in others if isinstance(config[name], Mapping) and "quant" not in name)
                config = {**config, **inner}
            elif inner is not None:
                raise ValueError(f"{key}={_short(inner)}; use a mapping of names to values")
        read = cls(config, others)
        read.check_kind()
        read.check_sizes()
        return read

    @property
    def model_type(self) -> str:
        """The name of the architecture; empty if there is none."""
        name = self.content.get("model_type") or ""
        if not isinstance(name, str):
            raise ValueError(f"model_type={_short(name)}; use text")
        return name

    @property
    def architectures(self) -> Collection[str]:
        """Names of classes."""
        names = self.content.get("architectures") or ()
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"architectures={_short(names)}; use a list of names")
        return names

    @property
    def activation(self) -> str:
        """The MLP's activation in small letters; empty if there is none."""
        name = next((self.content[key] for key in _ACTIVATIONS if self.content.get(key)), "")
        if not isinstance(name, str):
            raise ValueError(f"{_ACTIVATIONS[0]}={_short(name)}; use a name such as 'silu'")
        return name.lower()

    @property
    def experts(self) -> int:
        """Experts of a layer; 0 for a single MLP."""
        count = self.size("experts")
        return count if count > 1 else 0

    @property
    def shared_width(self) -> int:
        """Inner width of the MLPs beside the experts."""
        return self.size("shared_width") or self.size("shared_experts") * (
            self.size("experts_width") or self.size("ffn")
        )

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values; 0 if they are not given."""
        is_single = self.flag("multi_query", default=False) and not self.flag("new_decoder_architecture", default=False)
        return 1 if is_single else self.size("key_value_heads")

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation.startswith(_GATED) or "hidden_activation" in self.content

    @property
    def dense_layers(self) -> int:
        """Layers without experts beside layers with them."""
        listed = self.content.get("mlp_only_layers") or ()
        if not isinstance(listed, list | tuple):
            raise ValueError(f"mlp_only_layers={_short(listed)}; use a list of numbers of layers")
        return self.size("dense_layers") or len(listed)

    @property
    def windowed_layers(self) -> int:
        """Layers whose attention has a window, by their kind; all where no kind is given."""
        layers, kinds = self.needed("layers"), self.content.get("layer_types")
        if not self.size("window") or not self.flag("use_sliding_window", default=True):
            return 0
        if kinds:
            return min(layers, sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds))
        if pattern := self.window_pattern:
            return layers - layers // pattern
        first = self.size("full_layers") if self.content.get("use_sliding_window") else 0
        return max(0, layers - first)

    @property
    def window_pattern(self) -> int:
        """One of so many layers in a row has no window, such as 4 for "LLLG"; 0 if that is not given."""
        key = next((key for key in _PATTERN_KEYS if self.content.get(key) is not None), "")
        # A hybrid cache without a pattern is for models whose every other layer has a window.
        value = self.content[key] if key else 2 * (self.content.get("cache_implementation") == "hybrid")
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{key}={_short(value)}; use a whole number of 0 or more")
        return value

    def key(self, field: str) -> str:
        """Return the key under which a size is given, or the most common one."""
        names = _NAMES[field]
        return next((name for name in names if self.content.get(name) is not None), names[0])

    def size(self, field: str) -> int:
        """Return a size; 0 if there is none.

        Raises:
            ValueError: It is no whole number, or out of range.
        """
        key = self.key(field)
        value = self.content.get(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        least, most = 0 if field in _MAY_BE_ZERO else 1, _MOST_LAYERS if field == "layers" else _LARGEST
        if value is None:
            return 0
        if isinstance(value, list):
            raise ValueError(f"{key}={_short(value)}: the layers differ, and are counted as equal{_INSTEAD}")
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not is_whole or not least <= value <= most:
            raise ValueError(f"{key}={_short(value)}; use a whole number from {least} to {most:,}")
        return int(value)

    def needed(self, field: str) -> int:
        """Return a size that every transformer has.

        Raises:
            ValueError: There is none, or it is no size.
        """
        found = self.size(field)
        if not found:
            names = ", ".join(_NAMES[field])
            raise ValueError(f"the configuration has none of {names}; a transformer's costs need one of them")
        return found

    def number(self, key: str) -> float:
        """Return a number of 0 or more; 0 if there is none."""
        value = self.content.get(key)
        if isinstance(value, str | list | Mapping) or (value or 0) < 0:
            raise ValueError(f"{key}={_short(value)}; use a number of 0 or more")
        return float(value or 0)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a choice."""
        value = self.content.get(key, default)
        if not isinstance(value, bool) and value is not None:
            raise ValueError(f"{key}={_short(value)}; use true or false")
        return default if value is None else value

    def check_kind(self) -> None:
        """Refuse architectures whose layers are others than attention and an MLP.

        Raises:
            ValueError: Naming the architecture, and the key that tells.
        """
        name = f"model_type {self.model_type!r}" if self.model_type else "the configuration"
        content = self.content
        if content.get("is_encoder_decoder") or "num_decoder_layers" in content or "decoder_layers" in content:
            raise ValueError(f"{name} has an encoder and a decoder, and layers of one kind are counted{_INSTEAD}")
        begins, ends = _RECURRENT
        found = (key for key in content if key.startswith(begins) or key.endswith(ends))
        if recurrent := next((key for key in found if content[key] is not None), ""):
            raise ValueError(f"{name} has layers with a recurrent state ({recurrent}), which are not counted{_INSTEAD}")
        for key in _KINDS_OF_LAYERS:
            kinds = content.get(key) or ()
            if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
                raise ValueError(f"{key}={_short(kinds)}; use a list of names")
            if others := sorted(set(kinds) - _ATTENTION):
                raise ValueError(f"{name} has layers of {', '.join(others)} ({key}), which are not counted{_INSTEAD}")

    def check_sizes(self) -> None:
        """Refuse sizes that do not fit each other.

        Raises:
            ValueError: Naming both.
        """
        for field in _NAMES:
            (self.needed if field in _NEEDED else self.size)(field)
        heads, key_value_heads = self.needed("heads"), self.key_value_heads
        if not self.size("head_size") and not self.size("key_value_rank") and self.needed("hidden") % heads:
            sizes = f"{self.key('heads')}={heads} does not divide {self.key('hidden')}={self.needed('hidden')}"
            raise ValueError(f"{sizes}; correct one of them, or set head_dim")
        if key_value_heads and heads % key_value_heads:
            pair = f"{self.key('key_value_heads')}={key_value_heads} does not divide {self.key('heads')}={heads}"
            raise ValueError(f"{pair}: each head of keys and values serves as many heads of queries")
        chosen = self.size("experts_per_token")
        if self.experts and chosen > self.experts:
            most = f"{self.key('experts')}={self.experts}"
            raise ValueError(f"{self.key('experts_per_token')}={chosen} is more than {most}; a token takes each once")

    def _is_unread_size(self, key: str, positions: int) -> bool:
        value = self.content[key]
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 1
        is_read = key in _NO_COSTS or any(key in names for names in _NAMES.values())
        is_wide = "window" in key and is_number and value >= positions
        return is_number and _SIZE.search(key) is not None and not is_read and not is_wide

    def notes(self, positions: int) -> Iterator[str]:
        """Yield what is left out of the costs, or may be."""
        longest = self.size("positions")
        if unread := ", ".join(key for key in self.content if self._is_unread_size(key, positions)):
            yield f"not counted: {unread} of model_type {self.model_type!r}; its layers are counted as equal"
        if self.left_out:
            yield f"{', '.join(self.left_out)}: not counted, only the language model is"
        if not self.activation:
            yield "the configuration names no hidden_act: MLPs of two matrices are counted, without a gate"
        if self.content.get("tie_word_embeddings") is None:
            yield "the configuration does not set tie_word_embeddings: embedding and head are counted as one parameter"
        if self.experts and not self.size("experts_per_token"):
            yield "the configuration names no num_experts_per_tok: one expert per token is counted"
        if longest and positions > longest:
            yield f"samples of {positions:,} tokens are longer than {self.key('positions')}={longest:,}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
