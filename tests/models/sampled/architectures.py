"""Architectures sampled from transformers, each built tiny from its configuration by rules for field names.

Nothing here knows an architecture: sizes are recognised by the words in their names, inputs by the parameters of
``forward``. Models that they cannot build, or run in one process, are ``Unavailable`` and sampled again.
"""

from __future__ import annotations

import inspect
import itertools
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

VOCABULARY, LENGTH, IMAGE, LAYERS = 128, 8, 32, 4
MOST_PARAMETERS = 4_000_000
SAMPLES = 2


class Unavailable(Exception):
    """No tiny form of this architecture runs in one process."""


def candidates(seed: int) -> Iterator[tuple[str, str]]:
    """All architectures in a drawn order, as (name of the configuration, a model class drawn from those it has)."""
    from transformers.models.auto import configuration_auto, modeling_auto

    tables = [table for name, table in sorted(vars(modeling_auto).items()) if re.match(r"MODEL_.*MAPPING_NAMES$", name)]
    draw = random.Random(seed)
    names = sorted(configuration_auto.CONFIG_MAPPING_NAMES)
    draw.shuffle(names)
    for name in names:
        found = [table[name] for table in tables if name in table]
        classes = sorted({c for entry in found for c in ((entry,) if isinstance(entry, str) else entry)})
        if classes:
            yield name, draw.choice(classes)


# --- sizes -----------------------------------------------------------------------------------------------------------

_LAYERS = re.compile(r"(^|_)(n|num)_.*(layers?|blocks)$|_layers$|^(num_)?(layers|n_layer)$|(^|_)depth$")
_EXPERTS = re.compile(r"experts?$|_experts_.*num$")
_TOP = re.compile(r"top_?k|experts_per_tok|per_token|_group$")
_HEADS = re.compile(r"heads?$|heads_")
_HEAD_DIM = re.compile(r"head_dim|^d_kv$|rotary_dim|mrope_section|axes_dim|key_dim$|value_dim$")
_MAIN_WIDTH = re.compile(r"^(hidden_size|hidden_dim|d_model|n_embd|embed_dim|dim|hidden_sizes|embed_dims|width)$")
_WIDTH = re.compile(
    r"hidden|width|dim$|dims$|d_model|n_embd|n_inner|intermediate|ffn|d_ff|channels$|embedding_size|feature_size|_rank$"
    r"|^d_|conv_dim|inner|projection|out_features_size|filters|mlp_size|embed"
)
_NO_WIDTH = re.compile(
    r"^num_channels$|^in_channels$|^in_chans$|layers|kernel|stride|ratio|out_indices|act|dropout|std|range"
)
_POSITIONS = re.compile(
    r"(max|n)_.*positions?(_embeddings)?$|^max_(seq|sequence)|^n_ctx$|context_length$|sliding_window|seq_length$"
)
_ID = re.compile(r"(token|_bos|_eos|_pad)_(id|index)$|_token_idx$")
_NEVER = {"transformers_version", "architectures", "model_type", "_name_or_path", "id2label", "label2id", "dtype"}
_NEVER |= {"out_features", "out_indices", "stage_names", "attn_implementation", "output_attentions"}


def shrunk(config: dict[str, Any], *, head_dim: int, heads: int, width: int) -> dict[str, Any]:
    """A configuration with the sizes of each part divided by one number, so that multiples remain multiples.

    Args:
        config: As a dict, parts inside as dicts.
        head_dim: The least that the dimensions of heads are divided to.
        heads: The least that counts of heads are divided to.
        width: The least width, where there are no heads.
    """
    known: dict[int, int] = {}
    for part in _parts(config):
        by_head, by_dim = _factors(part, head_dim, heads, width)
        for key, value in part.items():
            if _MAIN_WIDTH.search(key):
                for number in value if isinstance(value, list | tuple) else [value]:
                    if type(number) is int:
                        known.setdefault(number, _over(number, by_head * by_dim))
    return _shrunk(config, known, (head_dim, heads, width), itertools.count(VOCABULARY - 1, -1))


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for key, value in config.items():
        if isinstance(value, dict) and key not in _NEVER:
            yield from _parts(value)


def _factors(part: dict[str, Any], head_dim: int, heads: int, width: int) -> tuple[int, int]:
    """Divisors of head counts and head dimensions."""
    widths = [v for k, v in part.items() if _MAIN_WIDTH.search(k) for v in (v if isinstance(v, list | tuple) else [v])]
    widths = [w for w in widths if type(w) is int and w > 0]
    if not widths:
        return 1, 1
    counts = [v for k, v in part.items() if _HEADS.search(k) and type(v) is int and v > 0]
    if not counts:
        return 1, max(1, min(widths) // width)
    most = max(counts)
    by_head = max(f for f in range(1, most + 1) if most % f == 0 and most // f >= min(heads, most))
    own = [v for k, v in part.items() if _HEAD_DIM.search(k) and type(v) is int and v > 0]
    dim = min([*own, max(1, widths[0] // most)])
    return by_head, max(1, 2 ** max(0, (dim // head_dim).bit_length() - 1))


def _over(number: int, factor: int) -> int:
    return max(1, number // factor) if number > 0 else number


def _shrunk(
    part: dict[str, Any],
    known: dict[int, int],
    least: tuple[int, int, int],
    ids: Iterator[int],
    inherited: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    by_head, by_dim = factors = _factors(part, *least) if "model_type" in part else inherited
    layers = {v for k, v in part.items() if _LAYERS.search(k) and type(v) is int and v > LAYERS}

    def number(key: str, value: int) -> int:
        if _ID.search(key):
            return next(ids) if value >= VOCABULARY - 32 else value
        if value <= 1:
            return value
        if "vocab" in key or key == "type_vocab_size":
            return min(value, VOCABULARY)
        if _LAYERS.search(key):
            return min(value, LAYERS)
        if _TOP.search(key):
            return min(value, 2)
        if _EXPERTS.search(key):
            return min(value, 4)
        if _HEAD_DIM.search(key):
            return _over(value, by_dim)
        if _HEADS.search(key):
            return _over(value, by_head)
        if "image_size" in key or key in ("input_size", "crop_size"):
            return min(value, IMAGE)
        if "patch_size" in key:
            return min(value, 8)
        if _POSITIONS.search(key):
            return min(value, 64)
        if _NO_WIDTH.search(key):
            return value
        if _WIDTH.search(key):
            return known.get(value, _over(value, by_head * by_dim))
        return value

    def item(key: str, value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return 0 if key == "pad_token_id" and value is None else value
        if isinstance(value, int):
            return number(key, value)
        if isinstance(value, float):
            return 0.0 if re.search(r"drop(?!less)|mask_.*prob", key) else value
        if isinstance(value, list | tuple):
            if key == "depths":
                return [min(depth, 2) for depth in value]
            kept = value[:LAYERS] if len(value) in layers else value
            if len(kept) == LAYERS and "layer_types" in key and len(set(value)) > len(set(kept)):
                kept = [*kept[: LAYERS - 1], next(kind for kind in value if kind not in kept)]
            return type(value)(item(key, each) for each in kept)
        return value

    small = {}
    for key, value in part.items():
        if key in _NEVER:
            continue
        small[key] = _shrunk(value, known, least, ids, factors) if isinstance(value, dict) else item(key, value)
    return small


# --- models ----------------------------------------------------------------------------------------------------------

_RULES = (
    {"head_dim": 8, "heads": 4, "width": 16},
    {"head_dim": 16, "heads": 4, "width": 32},
    {"head_dim": 32, "heads": 2, "width": 64},
    {"head_dim": 1 << 20, "heads": 1 << 20, "width": 1 << 20},
)


def build(class_name: str, rule: dict[str, int]) -> nn.Module:
    """A model of this class, tiny by one rule."""
    import transformers

    model_class = getattr(transformers, class_name)
    config_class = model_class.config_class
    config = config_class(**shrunk(config_class().to_dict(), **rule))
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if not 0 < size <= MOST_PARAMETERS:
        raise Unavailable(f"{size} parameters")
    torch.manual_seed(0)
    return model_class(config)


def inputs_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Candidate arguments of a model's forward, the likeliest first."""
    config: Any = model.config
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]

    def size(*names: str, default: int) -> int:
        found = [v for part in parts for name in names if type(v := getattr(part, name, None)) is int]
        return found[0] if found else default

    draw = torch.Generator().manual_seed(1)

    def ids(length: int = LENGTH) -> Tensor:
        return torch.randint(5, 60, (SAMPLES, length), generator=draw)

    def real(*shape: int) -> Tensor:
        return torch.randn(SAMPLES, *shape, generator=draw, dtype=torch.float64)

    channels, side = size("num_channels", "in_channels", "in_chans", default=3), size("image_size", default=IMAGE)
    mel = size("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    frames = 2 * size("max_source_positions", default=32)
    forms: dict[str, list[Tensor]] = {
        "input_ids": [ids(), ids(32), ids(2 * LENGTH).view(SAMPLES, 2, LENGTH)],
        "decoder_input_ids": [ids()],
        "pixel_values": [real(channels, side, side), real(channels, 64, 64), real(2, channels, side, side)],
        "input_values": [real(1600), real(64, mel), real(1, 1600), real(size("max_length", default=64), mel)],
        "input_features": [real(mel, frames), real(64, mel), real(1, 64, mel)],
        "past_values": [real(size("context_length", default=64)), real(size("context_length", default=64), 1)],
    }
    wanted = inspect.signature(model.forward).parameters
    required = [
        name
        for name, p in wanted.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    main = getattr(model, "main_input_name", "input_ids")
    sets = [[main, *required], [name for name in forms if name in wanted], [main, *required, "decoder_input_ids"]]
    for names in sets:
        names = list(dict.fromkeys(name for name in names if name in wanted and name in forms))
        if names:
            for choice in itertools.product(*(forms[name] for name in names)):
                yield dict(zip(names, choice, strict=True))


def labels_of(model: nn.Module, inputs: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Candidate labels, and at last none."""
    wanted = inspect.signature(model.forward).parameters
    if "labels" in wanted:
        for name in ("decoder_input_ids", "input_ids"):
            if name in inputs:
                yield {"labels": inputs[name].clone()}
        yield {"labels": torch.arange(SAMPLES) % 2}
    if {"start_positions", "end_positions"} <= set(wanted):
        yield {"start_positions": torch.zeros(SAMPLES, dtype=torch.int64), "end_positions": torch.arange(SAMPLES)}
    yield {}


class Drawn(LightningModule):
    """The loss of a model, or the distance of its output from waves where it has none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        out = self.model(**batch)
        loss = getattr(out, "loss", None)
        if loss is not None and loss.requires_grad and loss.dim() == 0:
            return loss
        first = next(value for value in out.values() if _is_trainable(value))
        wave = torch.arange(first.numel(), dtype=first.dtype, device=first.device).cos().view(first.shape)
        return ((first - wave) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _is_trainable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def make(class_name: str, dtype: torch.dtype | None = None) -> tuple[Drawn, dict[str, Tensor]]:
    """A tiny module of an architecture that runs in one process, and a batch for it.

    Args:
        class_name: A class of transformers.
        dtype: Of its parameters; float64, or float32 where that does not run, if None.

    Raises:
        Unavailable: No rule gives one.
    """
    first: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rule in _RULES:
            try:
                model = build(class_name, rule)
            except Exception as error:
                first = first or error
                continue
            for inputs in inputs_of(model):
                for kind in [torch.float64, torch.float32] if dtype is None else [dtype]:
                    for labels in labels_of(model, inputs):
                        batch = {
                            name: value.to(kind) if value.is_floating_point() else value
                            for name, value in {**inputs, **labels}.items()
                        }
                        module = Drawn(model.to(kind)).train()
                        try:
                            if _runs(module, batch):
                                return module, batch
                        except Exception as error:
                            first = first or error
    raise Unavailable(f"{type(first).__name__}: {first}".splitlines()[0])


def _runs(module: Drawn, batch: dict[str, Tensor]) -> bool:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    loss = module.training_step(batch)
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    module.load_state_dict(state)
    finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(grad).all()) for grad in grads)
    return finite and any(bool(grad.any()) for grad in grads)
