"""Costs of a transformer from its sizes, after Korthikanti et al. (arXiv 2205.05198, section 4).

Activations are counted as that paper does: per position, a layer saves 5 rows of its width that tensor ranks do not
divide (inputs of two norms, of the projections of attention and of the MLP, and two dropout masks of half the bytes)
and those that they divide (queries, keys, values, the input of the output projection, and what the MLP saves).
"""

from __future__ import annotations

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
        (embedding, _transformer_layer(shape), head),
        positions=tokens,
        heads=shape.heads,
        key_value_heads=shape.key_value_heads or shape.heads,
        routes=shape.experts,
        has_tied_embedding=shape.has_tied_embedding,
    )


def _transformer_layer(shape: TransformerShape) -> LayerCosts:
    tokens, width = shape.positions, shape.hidden
    head_size = shape.head_size or width / shape.heads
    queries, keys = head_size * shape.heads, head_size * (shape.key_value_heads or shape.heads)
    matrices = 3 if shape.is_gated else 2
    used, held = (shape.experts_per_token, shape.experts) if shape.experts else (1, 0)
    causal = 0.5 if shape.is_causal and shape.fused_attention else 1.0
    scores = 0.0 if shape.fused_attention else float(shape.heads) * tokens * tokens
    attention_weights = int(width * (queries + 2 * keys) + queries * width)
    mlp_weights = matrices * width * shape.ffn
    products = (
        Product(tokens, width, queries + 2 * keys, sharded="columns"),
        Product(tokens, head_size, tokens, shape.heads, "count", False, True, causal),
        Product(tokens, tokens, head_size, shape.heads, "count", False, True, causal),
        Product(tokens, queries, width, sharded="inner"),
        Product(tokens * used, width, (matrices - 1) * shape.ffn, sharded="columns"),
        # A dropout after it, or the weights of experts, need its result in the backward.
        Product(tokens * used, shape.ffn, width, sharded="inner", repeats=shape.has_dropout or held > 0),
    )
    inner_mlp = (4 if shape.is_gated else 2) * shape.ffn * used
    replicated = (5.0 if shape.has_dropout else 4.0) * tokens * width
    sharded = tokens * (queries + 2 * keys + queries + inner_mlp)
    moved_replicated = (10.0 if shape.has_dropout else 8.0) * tokens * width * (1.0 if shape.fused_kernels else 1.6)
    around_mlp = (3.0 if shape.is_gated else 2.0) * (1.0 if shape.fused_kernels else 8.0)
    moved = tokens * (2.0 * (queries + 2 * keys) + around_mlp * shape.ffn * used)
    return LayerCosts(
        "layer",
        count=shape.layers,
        products=products,
        parameters=attention_weights + mlp_weights * max(held, 1) + 4 * width + held * width,
        sharded_parameters=attention_weights + (0 if held else mlp_weights),
        routed_parameters=mlp_weights * held,
        moved=moved_replicated + moved,
        moved_scores=(4.5 if shape.fused_kernels else 15.0) * scores,
        replicated_moved=moved_replicated,
        saved=replicated + sharded,
        replicated_saved=replicated,
        saved_scores=2.5 * scores,
        selective_saved=replicated + sharded,
        outputs=float(tokens * width),
        reductions=2,
        kernels=24 if shape.fused_kernels else 40,
        routed_tokens=float(tokens * used) if held else 0.0,
    )
