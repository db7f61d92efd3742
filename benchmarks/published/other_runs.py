"""Published runs of papers: shape, layout, batch, and the time of a step or a rate with the operations that it counts.

The hardware is a preset, or the cluster of the SC'21 tables where the paper names the same machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from published_runs import PublishedRun
from published_sc21 import published_sc21

from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import Hardware, load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout

MASTER = FORMATS["bf16-true, float32 master weights"]
KORTHIKANTI = "Korthikanti et al. (arXiv 2205.05198), table 5"
SMITH = "Smith et al. (arXiv 2201.11990), section 2.4"
NEOX = "Black et al. (arXiv 2204.06745), section 2"
LLAMA = "Llama 3 (arXiv 2407.21783), table 4"
NEMOTRON = "Nemotron-4 340B (arXiv 2406.11704), table 2"
DGXC = "Nemotron-4 340B, DGX Cloud benchmarks 24.11"


def other_runs() -> list[PublishedRun]:
    """Return every run of this file."""
    return [*_megatron(), *_neox(), *_llama(), *_nemotron()]


def _megatron() -> Iterator[PublishedRun]:
    """Two papers on Selene: layers of Megatron-LM, with and without recomputation of all."""
    selene = published_sc21()[0].hardware
    # layers, width, heads, pipeline, stages per rank, microbatch, batch; seconds with all recomputed, and selectively
    for layers, width, heads, pipeline, stages, microbatch, batch, full, selective in (
        (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
        (96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
        (105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
        (128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49),
    ):
        shape = _gpt(layers, width, heads)
        layout = _layout(8, pipeline, 1, stages, microbatch, batch, fused_attention=False)
        for recompute, seconds in (("full", full), ("selective", selective)):
            changed = layout.replaced(recompute=recompute, sequence_parallel=recompute == "selective")
            yield _run(KORTHIKANTI, shape, changed, selene, seconds)
    for replicas, seconds in ((8, 60.1), (10, 50.2), (12, 44.4)):
        layout = _layout(8, 35, replicas, 1, 1, 1920, recompute="full", fused_attention=False)
        yield _run(SMITH, _gpt(105, 20480, 128), layout, selene, seconds)


def _neox() -> Iterator[PublishedRun]:
    """117 TFLOP/s per device, counted with recomputation as in SC'21; 12 nodes of 8 A100 of 40 GB."""
    layers, width, batch, vocabulary = 44, 6144, 1536, 50432
    shape = dataclasses.replace(_gpt(layers, width, 64), vocabulary=vocabulary, has_tied_embedding=False)
    shape = dataclasses.replace(shape, has_learned_positions=False)
    flops = 96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + vocabulary / (16 * layers * width))
    layout = _layout(2, 4, 12, 1, 4, batch, recompute="full", fused_attention=False)
    yield _run(NEOX, shape, layout, load_hardware("a100-40"), flops / (117e12 * 96), "time from TFLOP/s")


def _llama() -> Iterator[PublishedRun]:
    """430 and 400 TFLOP/s; the paper does not give the stages of a rank: 8, one layer each, are assumed."""
    shape = TransformerShape(126, 16384, 53248, 128, 128256, 8192, 8, is_gated=True, has_tied_embedding=False)
    for replicas, rate in ((64, 430e12), (128, 400e12)):
        layout = _layout(8, 16, replicas, 8, 1, 2048, sequence_parallel=True, overlapped_tensor_ranks=True)
        flops = 3 * transformer_costs(shape).flops * layout.batch
        yield _run(LLAMA, shape, layout, _h100(), flops / (rate * layout.ranks), "time from TFLOP/s")


def _nemotron() -> Iterator[PublishedRun]:
    """bfloat16. Of the paper 8 stages per rank, one layer each, are assumed; the maker's benchmark gives all sizes."""
    shape = TransformerShape(96, 18432, 73728, 96, 256000, 4096, 8, has_tied_embedding=False)
    for replicas, batch, seconds in ((16, 768, 10.3), (32, 1536, 10.3), (64, 2304, 8.0)):
        layout = _layout(8, 12, replicas, 8, 1, batch, sequence_parallel=True, overlapped_tensor_ranks=True)
        yield _run(NEMOTRON, shape, layout, _h100(), seconds)
    layout = _layout(8, 8, 2, 12, 1, 32, sequence_parallel=True, overlapped_tensor_ranks=True)
    yield _run(DGXC, shape, layout, _h100(), 4.77)


def _h100() -> Hardware:
    """Transformer Engine takes cuDNN's attention; Meta's is of the same speed."""
    preset = load_hardware("h100")
    return dataclasses.replace(preset, attention={"cudnn": preset.attention["cudnn"]})


def _gpt(layers: int, width: int, heads: int) -> TransformerShape:
    """A model of Megatron-LM."""
    sizes = layers, width, 4 * width, heads, 51200, 2048
    return TransformerShape(*sizes, has_learned_positions=True, has_dropout=True, fused_attention=False)


def _layout(
    tensor: int, pipeline: int, replicas: int, stages: int, microbatch: int, batch: int, **others: Any
) -> PlanLayout:
    return PlanLayout(
        pipeline=pipeline,
        shard=replicas,
        tensor=tensor,
        schedule="interleaved_1f1b" if stages > 1 else "1f1b",
        stages_per_rank=stages,
        microbatch=microbatch,
        batch=batch,
        zero_stage=1 if replicas > 1 else 0,
        **others,
    )


def _run(
    source: str, shape: TransformerShape, layout: PlanLayout, hardware: Hardware, seconds: float, note: str = ""
) -> PublishedRun:
    costs = transformer_costs(shape, f"{shape.layers} layers of {shape.hidden}")
    places = 0, "other_runs.py", source, source, costs.name
    return PublishedRun(*places, costs, layout, MASTER, hardware, seconds, None, False, (), False, note)
