"""Costs of a transformer from its sizes, after Korthikanti et al. (arXiv 2205.05198, section 4).

Activations are counted as that paper does: per position, a layer saves 5 rows of its width that tensor ranks do not
divide (inputs of two norms, of the projections of attention and of the MLP, and two dropout masks of half the bytes)
and those that they divide (queries, keys, values, the input of the output projection, and what the MLP saves).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lightning_hybrid.predict.costs.layers import LayerCosts, ModelCosts, Product


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a decoder or encoder of equal layers."""

    layers: int  # number of layers
    hidden: int  # width
    ffn: int  # inner width of the MLP
    heads: int  # heads of attention
    vocabulary: int  # rows of the embedding
    positions: int  # tokens of one sample
    key_value_heads: int | None = None  # heads of keys and values; as many as ``heads`` if None
    head_size: int | None = None  # width of a head; ``hidden / heads`` if None
    is_gated: bool = False  # whether the MLP has a gate (SwiGLU): three matrices instead of two
    is_causal: bool = True  # whether positions attend to earlier ones alone
    has_learned_positions: bool = False  # whether each position has an embedding
    has_dropout: bool = False  # whether the residual branches have dropout
    has_tied_embedding: bool = True  # whether the head uses the embedding's parameter
    fused_attention: bool = True  # whether scores of attention stay in the kernel
    # whether activation functions, dropout with residuals, and masks with softmax are one kernel each, as by
    # Megatron-LM or a compiler; otherwise each of their operations reads and writes memory
    fused_kernels: bool = True
    experts: int = 0  # MLPs per layer among which tokens are routed; 0 for one MLP without a router
    experts_per_token: int = 1  # how many of these compute each token
    shared_ffn: int = 0  # inner width of the MLPs beside the experts that compute every token
    dense_layers: int = 0  # first layers with one MLP instead of experts
    dense_ffn: int = 0  # its inner width
    # whether the host reads how many rows each expert gets before it starts their kernels, as without a capacity
    waits_for_rows: bool = True
    window: int = 0  # positions that layers with a window attend to; 0 if there are none
    windowed_share: float = 0.0  # the share of these
    query_rank: int = 0  # width to which queries are projected first (multi-head latent attention); 0 if they are not
    key_value_rank: int = 0  # the same of keys and values together
    rotary_size: int = 0  # the part of a head's keys that has positions and does not go through this width
    value_size: int | None = None  # width of a head's values; ``head_size`` if None

    @property
    def width_of_head(self) -> float:
        """Width of a head's queries and keys."""
        return self.head_size or self.hidden / self.heads

    @property
    def queries(self) -> float:
        """Width of all queries."""
        return self.width_of_head * self.heads

    @property
    def values(self) -> float:
        """Width of a head's values."""
        return self.value_size or self.width_of_head

    @property
    def keys(self) -> float:
        """Width of all keys and values."""
        return (self.width_of_head + self.values) * (self.key_value_heads or self.heads)

    @property
    def matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.is_gated else 2

    @property
    def computed_scores(self) -> float:
        """Share of the scores of attention that is computed, over all layers."""
        if not self.fused_attention:
            return 1.0
        full = 0.5 if self.is_causal else 1.0
        if not 0 < self.window < self.positions:
            return full
        inside = self.window / self.positions
        inside = inside - inside**2 / 2 if self.is_causal else min(1.0, 2 * inside)
        return full + (inside - full) * self.windowed_share


def transformer_costs(shape: TransformerShape, name: str = "transformer") -> ModelCosts:
    """Return the costs of a transformer: its embedding, its layers and its head with the loss."""
    tokens, width = shape.positions, shape.hidden
    embedding = LayerCosts(
        "embedding",
        parameters=(shape.vocabulary + (tokens if shape.has_learned_positions else 0)) * width,
        sharded_parameters=shape.vocabulary * width,
        replicated_moved=3.0 * tokens * width,
        moved=3.0 * tokens * width,
        outputs=tokens * width,
        reductions=1,
        kernels=4,
        repeats=False,
        has_full_positions=True,
    )
    logits = float(tokens) * shape.vocabulary
    head = LayerCosts(
        "head",
        products=(Product(tokens, width, shape.vocabulary, sharded="columns"),),
        parameters=2 * width + (0 if shape.has_tied_embedding else shape.vocabulary * width),
        sharded_parameters=0 if shape.has_tied_embedding else shape.vocabulary * width,
        moved=6.0 * logits,
        saved=2.0 * tokens * width,
        replicated_saved=2.0 * tokens * width,
        float32_saved=logits,
        peak_only=logits,
        outputs=1.0,
        kernels=12,
        repeats=False,
        has_full_positions=True,
    )
    return ModelCosts(
        name,
        (embedding, *_transformer_layers(shape), head),
        positions=tokens,
        heads=shape.heads,
        key_value_heads=shape.key_value_heads or shape.heads,
        routes=shape.experts,
        has_tied_embedding=shape.has_tied_embedding,
    )


def _transformer_layers(shape: TransformerShape) -> list[LayerCosts]:
    """Return the first layers without experts, if there are some, and the others."""
    if not shape.dense_layers:
        return [_transformer_layer(shape)]
    dense = dataclasses.replace(shape, layers=shape.dense_layers, ffn=shape.dense_ffn, experts=0, shared_ffn=0)
    others = dataclasses.replace(shape, layers=shape.layers - shape.dense_layers)
    return [_transformer_layer(dense), _transformer_layer(others)]


def _attention_products(shape: TransformerShape) -> list[Product]:
    """Return the products of attention, in the order of their execution."""
    tokens, width, computed = shape.positions, shape.hidden, shape.computed_scores
    if shape.key_value_rank:
        rotary = shape.rotary_size
        inputs = [
            Product(tokens, width, shape.query_rank + shape.key_value_rank + rotary),
            Product(tokens, shape.key_value_rank, shape.keys - rotary * shape.heads, sharded="columns"),
            Product(tokens, shape.query_rank or width, shape.queries, sharded="columns"),
        ]
    else:
        inputs = [Product(tokens, width, shape.queries + shape.keys, sharded="columns")]
    return [
        *inputs,
        Product(tokens, shape.width_of_head, tokens, shape.heads, "count", False, True, computed),
        Product(tokens, tokens, shape.values, shape.heads, "count", False, True, computed),
        Product(tokens, shape.values * shape.heads, width, sharded="inner"),
    ]


def _mlp_products(shape: TransformerShape) -> list[Product]:
    """Return the products of an MLP, or of experts and of what is shared beside them."""
    tokens, width, first = shape.positions, shape.hidden, shape.matrices - 1
    held = max(1, shape.experts)
    rows = tokens * (shape.experts_per_token if shape.experts else 1)
    # A dropout after it, or the weights of experts, need its result in the backward.
    repeats = shape.has_dropout or shape.experts > 0
    products = []
    if shape.shared_ffn:
        products.append(Product(tokens, width, first * shape.shared_ffn, sharded="columns"))
        products.append(Product(tokens, shape.shared_ffn, width, sharded="inner"))
    if shape.experts:
        products.append(Product(tokens, width, shape.experts, in_float8=False))  # the router
    products.append(Product(rows, width, first * shape.ffn, sharded="columns", groups=held))
    products.append(Product(rows, shape.ffn, width, sharded="inner", repeats=repeats, groups=held))
    return products


def _transformer_layer(shape: TransformerShape) -> LayerCosts:
    tokens, width = shape.positions, shape.hidden
    held = shape.experts
    used = shape.experts_per_token if held else 1
    attention, mlp = _attention_products(shape), _mlp_products(shape)
    scores = 0.0 if shape.fused_attention else float(shape.heads) * tokens * tokens
    routed = shape.matrices * width * shape.ffn * held
    weights = [(int(p.inner * p.columns), p) for p in (*attention, *mlp) if p.has_weight and p.groups == 1]
    sharded = sum(size for size, product in weights if product.sharded)
    ffn = shape.ffn * used + shape.shared_ffn
    replicated = (5.0 if shape.has_dropout else 4.0) * tokens * width
    widths = shape.queries + shape.keys + shape.values * shape.heads + (4 if shape.is_gated else 2) * ffn
    moved_replicated = (10.0 if shape.has_dropout else 8.0) * tokens * width * (1.0 if shape.fused_kernels else 1.6)
    around_mlp = (3.0 if shape.is_gated else 2.0) * (1.0 if shape.fused_kernels else 8.0)
    moved = tokens * (2.0 * (shape.queries + shape.keys) + around_mlp * ffn)
    # Rows are sorted by rank and by expert, and sorted back and summed: each is read and written in all of these.
    moved += tokens * width * (2.0 + 6.0 * used) if held else 0.0
    return LayerCosts(
        "layer",
        count=shape.layers,
        products=(*attention, *mlp),
        parameters=sum(size for size, _ in weights) + routed + 4 * width,
        sharded_parameters=sharded,
        routed_parameters=routed,
        moved=moved_replicated + moved,
        moved_scores=(4.5 if shape.fused_kernels else 15.0) * scores,
        replicated_moved=moved_replicated,
        saved=replicated + tokens * widths,
        replicated_saved=replicated,
        saved_scores=2.5 * scores,
        selective_saved=replicated + tokens * widths,
        outputs=float(tokens * width),
        reductions=2,
        kernels=(24 if shape.fused_kernels else 40) + (40 if held else 0),
        waits_for_rows=held > 0 and shape.waits_for_rows,
        routed_tokens=float(tokens * used) if held else 0.0,
    )
