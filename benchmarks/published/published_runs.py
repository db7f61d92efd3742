"""The published measurements of this folder as what the planner reads: costs, layout, number format, hardware.

Each row of `measured_layouts.csv` and `measured_memory.csv` with a known or derivable shape is one `PublishedRun`. What
a row does not say and its source says elsewhere, or what was derived, is named in `PublishedRun.derived`. Nothing here
is fitted.

    PYTHONPATH=benchmarks/published python -c "import published_runs; print(len(published_runs.published_layouts()))"
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import BandwidthCurve, Hardware, load_hardware
from lightning_hybrid.predict.layout import FORMATS, NumberFormat, PlanLayout

HERE = Path(__file__).parent
VOCABULARIES = {"~250k": 250880, "GPT3": 51200, "LLAMA2": 32000, "LLAMA3": 128256, "Nemotron": 256000}

# nvidia-smi prints MiB, and BigScience's tables give thousands of them as GB: their "16GB" and "32GB" of runs that
# worked are more than the 16160 and 32510 MiB of a V100 if they were GiB.
BYTES_PER_PRINTED_GB = 1000 * 2**20

# Adam of bitsandbytes keeps both moments in 8 bits; the 32-bit master weights stay.
_EIGHT_BIT_ADAM = dataclasses.replace(FORMATS["16-true, float32 master weights"], name="16-true, 8-bit Adam", state=6)
# NeMo's distributed Adam (Apex) keeps as master weights the 16 bits that the bfloat16 parameters lack, and reads
# gradients in bfloat16.
_NEMO = dataclasses.replace(
    FORMATS["float8"], name="float8, 16-bit remainders", state=10, step=0, casts_weights_once=True
)
# DeepSpeed's BF16_Optimizer sums gradients in 32 bits, "not sharded across gpus" (the source's section on rebalancing).
_FLOAT32_SUMS = dataclasses.replace(
    FORMATS["bf16-true, float32 master weights"], name="bf16-true, float32 gradient sums", gradient=6, reduced=4, step=0
)
# FSDP's mixed precision "PURE", the default of the benchmark's script: 16 bits on the wire, 32-bit shards.
_PURE = dataclasses.replace(FORMATS["bf16-mixed"], name="bf16-mixed, 16-bit gathers", gathered=2, reduced=2)


@dataclass(frozen=True)
class PublishedRun:
    """One published measurement.

    Attributes:
        row: Line of the table, the first after the header is 0.
        file: Name of the table.
        source: Project and commit.
        group: Runs of one group were measured in one place at one time: orders within it are comparable.
        model: Name of the model.
        costs: Its costs.
        layout: How it was laid out.
        number_format: Bytes per element.
        hardware: The cluster.
        seconds: Of one optimizer step; None if the row does not give it.
        memory: Peak bytes of the device that holds most; None if the row does not give it.
        ran_out: Whether the run failed for lack of memory.
        derived: What is not in the row, but derived or said elsewhere in its source.
        contradictory: Whether the row's sizes do not multiply to its number of devices.
        note: The row's note.
    """

    row: int
    file: str
    source: str
    group: str
    model: str
    costs: ModelCosts
    layout: PlanLayout
    number_format: NumberFormat
    hardware: Hardware
    seconds: float | None
    memory: float | None
    ran_out: bool
    derived: tuple[str, ...]
    contradictory: bool
    note: str

    @property
    def worked(self) -> bool:
        """Whether the run finished a step."""
        return not self.ran_out

    @property
    def known_shape(self) -> bool:
        """Whether the row itself gives layers, width, MLP and heads."""
        return not {"layers", "ffn", "heads"} & set(self.derived)


def published_layouts() -> list[PublishedRun]:
    """Return the runs of `measured_layouts.csv` whose shape is known or can be derived."""
    with (HERE / "measured_layouts.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [run for index, row in enumerate(rows) if (run := _layout_run(index, row)) is not None]


def scaled_links(curve: BandwidthCurve, share: float) -> BandwidthCurve:
    """Return a curve of links with another rate: the time beyond the first point's is divided by ``share``."""
    latency = curve.sizes[0] / curve.bandwidths[0]
    seconds = [latency + max(0.0, s / b - latency) / share for s, b in zip(curve.sizes, curve.bandwidths, strict=True)]
    return BandwidthCurve(curve.sizes, tuple(s / t for s, t in zip(curve.sizes, seconds, strict=True)))


def cluster(row: Mapping[str, str]) -> Hardware:
    """Return the cluster of a row: a preset, with the links that its source names."""
    name = row["hw"].lower()
    if name.startswith("v100"):
        return load_hardware("v100-16" if "16gb" in name else "v100-32")
    if name == "a100-80gb":  # BLOOM's cluster: 4 Omni-Path links of 100 Gb/s per node of 8 (tr11-176B-ml/README.md)
        preset = load_hardware("a100-80")
        return dataclasses.replace(
            preset,
            name="a100-80, Omni-Path",
            between_nodes=scaled_links(preset.between_nodes, 0.25),
            efficiency=0.79,
            overlap=0.0,
        )
    presets = {"a100_80gb": "a100-80", "a100_40gb": "a100-40", "dgx-h100": "h100", "dgx-b200": "b200"}
    return load_hardware(presets[name])


def _layout_run(index: int, row: Mapping[str, str]) -> PublishedRun | None:
    derived: list[str] = []
    shape = _shape(row, derived)
    if shape is None:
        return None
    layout, contradictory = _layout(row, derived)
    costs = transformer_costs(shape, row["model"])
    if row["source"].startswith("llm-foundry"):
        costs = _fused_cross_entropy(costs)
    if row["table"].startswith("HF"):  # fp16 throughout: neither copies nor gradients of logits in 32 bits
        costs = _sixteen_bit_loss(costs)
    if row["source"].startswith("NeMo"):
        costs = _divided_positions(_transformer_engine(costs, shape))
    if "LoRA" in row["table"]:  # adapters of rank 32 are under 1 % of the parameters
        costs = dataclasses.replace(costs, frozen_parameters=int(costs.parameters * 0.99))
    memory = _number(row["mem_gb"])
    return PublishedRun(
        index,
        "measured_layouts.csv",
        row["source"],
        _group(row),
        row["model"],
        costs,
        layout,
        _number_format(row, derived),
        cluster(row),
        _seconds(row, layout),
        None if memory is None else memory * BYTES_PER_PRINTED_GB,
        "OOM" in (row["mem_gb"], row["step_s"]),
        tuple(derived),
        contradictory,
        row["note"],
    )


def _shape(row: Mapping[str, str], derived: list[str]) -> TransformerShape | None:
    hidden, layers, ffn, heads = (_whole(row[key]) for key in ("hidden", "layers", "ffn", "heads"))
    name = row["model"]
    if hidden is None:
        return None
    is_llama = "LLAMA" in name.upper()
    is_megatron = row["source"].startswith("bigscience")
    vocabulary = _whole(row["vocab"])
    if vocabulary is None:
        vocabulary = VOCABULARIES[row["vocab"] if row["vocab"] in VOCABULARIES else name.split("-")[0]]
        derived.append("vocabulary")
    if not row["table"].startswith("HF"):  # Megatron-LM's default: a multiple of 128 rows for each tensor rank
        rows = 1 if row["source"].startswith("llm-foundry") else 128 * int(row["tp"] or 1)
        vocabulary = -(-vocabulary // rows) * rows
    if (
        "58B" in row["table"]
    ):  # the source says the size of its MLP was wrong and the model one of 58 billion parameters
        assert layers is not None
        ffn = int(((58e9 - vocabulary * hidden) / layers - 4 * hidden**2) / (2 * hidden)) // 64 * 64
        derived.append("ffn")
    ffn = ffn or 4 * hidden
    if layers is None:  # "layers tweaked to fit": the multiple of the stages nearest to the size in the model's name
        stages, size = int(row["pp"]), float(re.findall(r"(\d+)B", name)[0]) * 1e9
        layers = stages * round((size - vocabulary * hidden / 2) / (12 * hidden**2) / stages)
        derived.append("layers")
    if heads is None:  # the source's text: 96 of the model of 200B, 32 of its 20B, 64 of all others
        heads = 64 if hidden != 14400 else 96 if layers > 8 else 32
        derived.append("heads")
    return TransformerShape(
        layers,
        hidden,
        ffn,
        heads,
        vocabulary,
        int(row["seq"]),
        key_value_heads=_whole(row["kv"]) or heads,
        is_gated=is_llama,
        has_learned_positions=not is_llama and not name.startswith("Nemotron"),
        has_dropout=is_megatron,
        has_tied_embedding=not is_llama and not name.startswith("Nemotron"),
        fused_attention=not is_megatron,
        fused_kernels=not row["table"].startswith("HF"),
    )


def _fused_cross_entropy(costs: ModelCosts) -> ModelCosts:
    """FlashAttention's cross-entropy, MPT's default: it writes the gradient over the 16-bit logits."""
    head = costs.layers[-1]
    head = dataclasses.replace(head, float32_saved=head.float32_saved / 2, peak_only=0.0, moved=head.moved / 3)
    return dataclasses.replace(costs, layers=(*costs.layers[:-1], head))


def _divided_positions(costs: ModelCosts) -> ModelCosts:
    """Megatron-LM's context ranks divide the positions of the embedding and of the loss, too."""
    layers = [dataclasses.replace(layer, has_full_positions=False) for layer in costs.layers]
    return dataclasses.replace(costs, layers=tuple(layers))


def _sixteen_bit_loss(costs: ModelCosts) -> ModelCosts:
    head = costs.layers[-1]
    head = dataclasses.replace(head, float32_saved=head.float32_saved / 2, peak_only=head.peak_only / 2)
    return dataclasses.replace(costs, layers=(*costs.layers[:-1], head))


def _transformer_engine(costs: ModelCosts, shape: TransformerShape) -> ModelCosts:
    """Return the costs with what Transformer Engine saves, inputs of products in 8 bits, and with a 16-bit head."""
    layer, head = costs.layers[1:]
    head = dataclasses.replace(
        head, products=tuple(dataclasses.replace(each, in_float8=False) for each in head.products)
    )
    width, queries = shape.hidden, shape.hidden
    keys = queries * (shape.key_value_heads or shape.heads) // shape.heads
    first, second = (2, 1) if shape.is_gated else (1, 1)
    sharded = shape.positions * (queries + 2 * keys + 1.5 * queries + (first + second / 2) * shape.ffn)
    replicated = shape.positions * 3.0 * width
    layer = dataclasses.replace(
        layer, saved=replicated + sharded, selective_saved=replicated + sharded, replicated_saved=replicated
    )
    return dataclasses.replace(costs, layers=(costs.layers[0], layer, head))


def _layout(row: Mapping[str, str], derived: list[str]) -> tuple[PlanLayout, bool]:
    ranks = int(row["gpus"])
    tensor, pipeline, context = (int(row[key] or 1) for key in ("tp", "pp", "cp"))
    model_parallel = tensor * pipeline * context
    data = int(row["dp"] or 0)
    contradictory = data > 0 and data * model_parallel != ranks
    if not data or (contradictory and ranks % model_parallel == 0):
        data = ranks // model_parallel
        derived.append("replicas")
    zero = 3 if row["zero"] == "FULL_SHARD" else int((row["zero"] or "1").split()[0])
    if not row["zero"]:
        derived.append("ZeRO stage")  # NeMo's distributed optimizer
    microbatch = int(row["mbs"] or 1)
    stages_per_rank = int(row["vp"] or 1) if pipeline > 1 else 1
    is_nemo, is_megatron = row["source"].startswith("NeMo"), row["source"].startswith("bigscience")
    layout = PlanLayout(
        pipeline=pipeline,
        replicate=1 if zero else data,
        shard=data if zero else 1,
        tensor=tensor,
        context=context,
        schedule="interleaved_1f1b" if stages_per_rank > 1 else "1f1b",
        stages_per_rank=stages_per_rank,
        microbatch=microbatch,
        batch=int(row["gbs"] or microbatch * data),
        zero_stage=zero,
        recompute="full" if row["recompute"] == "full" else "none",
        offload=_offload(row),
        # DeepSpeed's partitioned activations are not in the layout; what they save is what sequence parallel saves.
        sequence_parallel=(is_nemo and tensor > 1) or "PA_CPU=N" in row["note"],
        overlapped_tensor_ranks=is_nemo and tensor > 1,
        fused_attention=not is_megatron,
    )
    return layout, contradictory


def _offload(row: Mapping[str, str]) -> frozenset[str]:
    note, everything = row["note"], {"parameters", "gradients", "optimizer_states"}
    if "ZeRO (old branch)" in row["table"]:  # its scripts set PA_CPU=true: inputs of recomputed layers on the host
        activations = set() if "PA_CPU=N" in note else {"activations"}
        return frozenset(activations | (everything if "table at line 398" in note else set()))
    if "table at line 464" in note or "Par Offl=Y" in note:
        return frozenset(everything)
    return frozenset({"gradients", "optimizer_states"} if "Opt Offl=Y" in note else ())


def _number_format(row: Mapping[str, str], derived: list[str]) -> NumberFormat:
    precision = row["precision"]
    if row["source"].startswith("llm-foundry"):
        derived.append("FSDP's mixed precision")
        return _PURE
    if precision == "FP8":  # Megatron's distributed optimizer shards its states over context ranks too
        return dataclasses.replace(_NEMO, state=_NEMO.state / int(row["cp"] or 1))
    if precision == "bf16":
        return _FLOAT32_SUMS if "Rebalancing" in row["note"] else FORMATS["bf16-true, float32 master weights"]
    return _EIGHT_BIT_ADAM if "8-bit Adam" in row["note"] else FORMATS["16-true, float32 master weights"]


def _seconds(row: Mapping[str, str], layout: PlanLayout) -> float | None:
    seconds, rate = _number(row["step_s"]), _number(row["tok_s_gpu"])
    if seconds is None and rate is not None:
        seconds = layout.batch * int(row["seq"]) / (rate * int(row["gpus"]))
    return seconds


def _group(row: Mapping[str, str]) -> str:
    """Source, table and, where noted, the day or the section."""
    days = re.findall(r"(\d{4}-\d\d-\d\d|\d\d-\d\d)(?:;|$)", row["note"]) or [""]
    return " | ".join(filter(None, (row["source"].split("@")[0], row["table"], days[0])))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None
