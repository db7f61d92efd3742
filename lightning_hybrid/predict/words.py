"""What the words of a printed plan mean, for readers that meet them for the first time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_OF_LAYOUTS = {
    "dp=": "replicas of the model, each with samples of its own",
    "pp=": "pipeline ranks, each with some of the layers (units); a bubble is time in which they wait",
    "tp=": "tensor ranks, each with a part of every layer",
    "cp=": "context ranks, each with a part of every sequence",
    "spatial=": "ranks that share the rows of every image, volume and feature map",
    "ep=": "expert ranks, each with some of the experts",
    "stage_widths=": "pipeline ranks of each stage, which hold copies of it and take its microbatches in turn",
    "stages=": "groups of layers on each pipeline rank",
    ",m=": "microbatches: the batch of a replica is computed in so many parts, one after the other",
    "schedule=": "order of the microbatches on pipeline ranks",
    "zero=": "ZeRO: replicas share optimizer states (1), gradients too (2), parameters too (3)",
    "shard_size=": "replicas that share one copy of these",
    "reshard_after_forward=": "true: gathered again for each microbatch's backward (3), or reduced after it (2)",
    "sequence_parallel=": "tensor ranks divide positions between their products, which saves activations",
    "recompute=": "activations that are not kept but computed again in the backward; selective: the cheap ones",
    "offload=": "what is in the host's memory; the optimizer then steps there",
    "chunked_loss=": "the loss is computed in chunks of positions, so that no rank holds all logits",
}
_ALWAYS = {
    "step": "time of one optimizer step; ± is how far predictions were from measured runs",
    "MFU": "model FLOPs utilization: FLOP/s of the model's own products, as a share of the data sheet's",
    "microbatch": "samples that a replica computes at a time",
}


def words_of(spellings: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the words in spelled layouts, and of the table's heading, with their meanings."""
    for word, meaning in _OF_LAYOUTS.items():
        if any(word in f",{spelling}" for spelling in spellings):
            yield word.strip(",="), meaning
    yield from _ALWAYS.items()
