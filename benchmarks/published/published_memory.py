"""The rows of `measured_memory.csv` whose shapes, batches and number formats their sources give.

Left out are rows of which the source does not give the length or number of sequences, and those of techniques that the
planner does not have: adapters over quantized weights, steps inside the backward, graphs of a compiler that decides
itself what it saves.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from published_runs import BYTES_PER_PRINTED_GB, HERE, PublishedRun

from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, NumberFormat, PlanLayout

_LLAMA_3B = TransformerShape(28, 3072, 8192, 24, 128256, 4096, key_value_heads=8, head_size=128, is_gated=True)
# The instructions of Alpaca are short: 7B models see batches of 2 padded to a few hundred tokens.
_LLAMA_7B = TransformerShape(32, 4096, 11008, 32, 32000, 512, is_gated=True, has_tied_embedding=False)
_VIT_H = TransformerShape(32, 1280, 5120, 16, 1000, 257, is_causal=False, has_tied_embedding=False)
_GPT_104B = TransformerShape(
    64, 11600, 46400, 80, 50257, 2048, has_learned_positions=True, has_dropout=True, fused_attention=False
)


@dataclass(frozen=True)
class _Known:
    """What the source of one row says, and which bytes it counts."""

    shape: TransformerShape
    layout: PlanLayout
    number_format: NumberFormat
    hardware: str
    derived: tuple[str, ...] = ()


def published_memory() -> list[tuple[PublishedRun, bool]]:
    """Return the runs with their peaks, and whether these are of tensors alone, without what the framework takes."""
    with (HERE / "measured_memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = []
    for index, row in enumerate(rows):
        known = next((known for matches, known in _sources() if matches(row)), None)
        if known is None:
            continue
        unit = BYTES_PER_PRINTED_GB if "nvidia-smi" in row["unit"] else 2**30 if "GiB" in row["unit"] else 1e9
        run = PublishedRun(
            index,
            "measured_memory.csv",
            row["source"],
            f"{row['source'].split('@')[0]} | {row['path'] or row['hw']}",
            row["model"],
            _costs(known),
            known.layout,
            known.number_format,
            load_hardware(known.hardware),
            None,
            float(row["peak_mem"]) * unit,
            False,
            known.derived,
            False,
            f"{row['method']} {row['optimizer']}",
        )
        found.append((run, "nvidia-smi" not in row["unit"]))
    return found


def _costs(known: _Known) -> ModelCosts:
    costs = transformer_costs(known.shape)
    if known.shape is not _VIT_H:
        return costs
    head = dataclasses.replace(costs.layers[-1], products=(), float32_saved=1000, peak_only=1000)  # of one token
    embedding = dataclasses.replace(costs.layers[0], parameters=(3 * 14 * 14 + 258) * 1280, sharded_parameters=0)
    return dataclasses.replace(costs, layers=(embedding, costs.layers[1], head))


def _sources() -> list[tuple[Callable[[Mapping[str, str]], bool], _Known]]:
    half, mixed = FORMATS["bf16-true"], FORMATS["bf16-mixed"]
    one = PlanLayout(microbatch=2, batch=2)
    recomputed = one.replaced(recompute="full")

    def adam(number_format: NumberFormat, state: float) -> NumberFormat:
        return dataclasses.replace(number_format, name=f"{number_format.name}, Adam of {state} bytes", state=state)

    def row(*words: str) -> Callable[[Mapping[str, str]], bool]:
        return lambda row: all(any(word in cell for cell in row.values() if cell) for word in words)

    alpaca = ("positions",)
    images = PlanLayout(microbatch=8, batch=8)
    megatron = PlanLayout(
        pipeline=32, shard=2, tensor=4, microbatch=1, batch=2048, zero_stage=1, recompute="full", fused_attention=False
    )
    return [
        (row("Llama 3.2 3B", "+ Packed Dataset"), _Known(_LLAMA_3B, one, half, "a100-80")),
        (
            row("Llama 3.2 3B", "+ Activation Checkpointing"),
            _Known(_LLAMA_3B, recomputed.replaced(chunked_loss=True), half, "a100-80"),
        ),
        (row("Llama2-7B", "AdamW PyTorch"), _Known(_LLAMA_7B, recomputed, half, "a100-80", alpaca)),
        (row("Llama2-7B", "8-bit"), _Known(_LLAMA_7B, recomputed, adam(half, 2), "a100-80", alpaca)),
        (row("Llama2-7B", "4-bit"), _Known(_LLAMA_7B, recomputed, adam(half, 1), "a100-80", alpaca)),
        (row("ViT-H", "AdamW PyTorch"), _Known(_VIT_H, images, mixed, "v100-16")),
        (row("ViT-H", "8-bit"), _Known(_VIT_H, images, adam(mixed, 2), "v100-16")),
        (row("ViT-H", "FP8"), _Known(_VIT_H, images, adam(mixed, 2), "v100-16")),
        (row("ViT-H", "4-bit"), _Known(_VIT_H, images, adam(mixed, 1), "v100-16")),
        # The run of 104 billion parameters had 256 devices, so 2 replicas (its own page, tr8-104B-wide).
        (
            row("GPT 104B", "with embedding (first"),
            _Known(_GPT_104B, megatron, FORMATS["16-true, float32 master weights"], "v100-32", ("replicas",)),
        ),
    ]
