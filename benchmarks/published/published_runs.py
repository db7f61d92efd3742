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
from typing import Any

from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import BandwidthCurve, Hardware, load_hardware
from lightning_hybrid.predict.layout import FORMATS, NumberFormat, PlanLayout

HERE = Path(__file__).parent
TABLES = "measured_layouts.csv", "measured_layouts_2.csv"
VOCABULARIES = {"~250k": 250880, "GPT3": 51200, "LLAMA2": 32000, "LLAMA3": 128256, "Nemotron": 256000}

# nvidia-smi prints MiB, and BigScience's tables give thousands of them as GB: their "16GB" and "32GB" of runs that
# worked are more than the 16160 and 32510 MiB of a V100 if they were GiB.
BYTES_PER_PRINTED_GB = 1000 * 2**20

# ZeRO-3 of DeepSpeed in 2021 gathered each parameter alone, without prefetch: its steps of 768 to 2240 devices (SC'21)
# take as long as if a node had a tenth of its links.
DEEPSPEED_2021 = 0.1

# llm-foundry names ``attn_impl: triton``, FlashAttention 1 in Triton: forward, causal, heads of 128 reach about
# 120 of 271 TFLOP/s on the A100 (arXiv 2307.08691, figure 5), on the H100 as much slower than FlashAttention 2.
TRITON = {"a100": 0.5, "h100": 0.3}

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
    """Return the runs of both tables of layouts whose shape is known or can be derived."""
    runs = []
    for name in TABLES:
        with (HERE / name).open() as file:
            rows = list(csv.DictReader(file))
        runs += [run for index, row in enumerate(rows) if (run := _layout_run(index, name, row)) is not None]
    return runs


def scaled_links(curve: BandwidthCurve, share: float) -> BandwidthCurve:
    """Return a curve of links with another rate: the time beyond the first point's is divided by ``share``."""
    latency = curve.sizes[0] / curve.bandwidths[0]
    seconds = [latency + max(0.0, s / b - latency) / share for s, b in zip(curve.sizes, curve.bandwidths, strict=True)]
    return BandwidthCurve(curve.sizes, tuple(s / t for s, t in zip(curve.sizes, seconds, strict=True)))


def cluster(row: Mapping[str, str]) -> Hardware:
    """Return the cluster of a row: a preset, with the links that its source names."""
    name = row["hw"].lower()
    if name.startswith("v100"):
        hardware = load_hardware("v100-16" if "16gb" in name else "v100-32")
        if "eepspeed" in row["table"] and row["zero"].startswith("3"):
            return dataclasses.replace(hardware, between_nodes=scaled_links(hardware.between_nodes, DEEPSPEED_2021))
        return hardware
    if name.startswith("a100-80gb") and row["source"].startswith(
        "bigscience"
    ):  # BLOOM's cluster: 4 Omni-Path links of 100 Gb/s per node of 8 (tr11-176B-ml/README.md)
        preset = load_hardware("a100-80")
        return dataclasses.replace(
            preset,
            name="a100-80, Omni-Path",
            between_nodes=scaled_links(preset.between_nodes, 0.25),
            efficiency=dict.fromkeys(preset.efficiency, 0.78),
            overlap=0.0,
        )
    if name == "h100-96gb 500w":
        return _limited_h100()
    presets = {"a100_80gb": "a100-80", "a100_40gb": "a100-40", "dgx-b200": "b200", "h200": "h200"}
    hardware = load_hardware(presets.get(name, "a100-80" if name.startswith("a100") else "h100"))
    if row["source"].startswith(("NeMo", "Megatron-Bridge")):  # Transformer Engine takes cuDNN's attention
        return dataclasses.replace(hardware, attention={"cudnn": hardware.attention["cudnn"]})
    if row["source"].startswith("llm-foundry"):
        return dataclasses.replace(hardware, attention={"triton": TRITON[hardware.name.split("-")[0]]})
    return hardware


def _limited_h100() -> Hardware:
    """torchtitan's H100: "96GB HBM2e, limited to 500 W" instead of 700 W and HBM3 (its benchmarks/README.md).

    The rate of products follows the clock, and the power of a chip at the limit about its square.
    """
    preset = load_hardware("h100")
    rates = {name: rate * (500 / 700) ** 0.5 for name, rate in preset.product_flops.items()}
    return dataclasses.replace(
        preset,
        name="h100, 500 W",
        efficiency={**dict.fromkeys(rates, 0.78), "float8": 0.87},
        product_flops=rates,
        memory_bandwidth=2.4e12,
        memory=100.0e9,
    )


def _layout_run(index: int, table: str, row: Mapping[str, str]) -> PublishedRun | None:
    derived: list[str] = []
    shape = _mixture(row) or _shape(row, derived)
    if shape is None:
        return None
    layout, contradictory = _layout(row, derived)
    costs = transformer_costs(shape, row["model"])
    if row["source"].startswith("llm-foundry"):
        costs = _fused_cross_entropy(costs)
    if row["table"].startswith("HF"):  # fp16 throughout: neither copies nor gradients of logits in 32 bits
        costs = _sixteen_bit_loss(costs)
    if row["source"].startswith(("NeMo", "Megatron-Bridge")):
        costs = _divided_positions(costs if shape.experts else _transformer_engine(costs, shape))
    if row["source"].startswith("torchtitan"):
        costs = _divided_positions(costs)
        if row["recompute"].startswith("selective"):
            costs = _selective_by_operation(costs)
    if row["source"].startswith("Megatron-Bridge"):
        derived.append("recomputation")
    if shape.experts and (row["table"] >= "26" or row["model"].startswith("DeepSeek")):
        costs = _sent_once(costs, shape, layout)
    if "LoRA" in row["table"]:  # adapters of rank 32 are under 1 % of the parameters
        costs = dataclasses.replace(costs, frozen_parameters=int(costs.parameters * 0.99))
    memory = None if row["recompute"].endswith("?") else _number(row["mem_gb"])  # not stated by the source
    return PublishedRun(
        index,
        table,
        row["source"],
        _group(row),
        row["model"],
        costs,
        layout,
        _number_format(row, derived),
        cluster(row),
        _seconds(row, layout),
        None
        if memory is None
        else memory * (2**30 if row["source"].startswith("torchtitan") else BYTES_PER_PRINTED_GB),
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
    positions = int(row["seq"].rstrip("?"))
    is_megatron = row["source"].startswith("bigscience")
    vocabulary = _whole(row["vocab"])
    if vocabulary is None:
        vocabulary = VOCABULARIES[row["vocab"] if row["vocab"] in VOCABULARIES else name.split("-")[0]]
        derived.append("vocabulary")
    if not row["table"].startswith("HF"):  # Megatron-LM's default: a multiple of 128 rows for each tensor rank
        is_padded = not row["source"].startswith(("llm-foundry", "torchtitan"))
        rows = 128 * int(row["tp"] or 1) if is_padded else 1
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
        positions,
        key_value_heads=_whole(row["kv"]) or heads,
        is_gated=is_llama,
        has_learned_positions=not is_llama and not name.startswith("Nemotron"),
        has_dropout=is_megatron,
        has_tied_embedding=not is_llama and not name.startswith("Nemotron"),
        fused_attention=not is_megatron,
        fused_kernels=not row["table"].startswith("HF"),
    )


# Sizes of the mixtures, from their configurations on the Hub.
_QWEN3 = {"head_size": 128, "key_value_heads": 4, "experts": 128, "experts_per_token": 8}
_MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3_30B_a3B": {"layers": 48, "hidden": 2048, "ffn": 768, "heads": 32, "vocabulary": 151936, **_QWEN3},
    "Qwen3_235B_a22B": {"layers": 94, "hidden": 4096, "ffn": 1536, "heads": 64, "vocabulary": 151936, **_QWEN3},
    "GPT OSS 120B": {
        **{"layers": 36, "hidden": 2880, "ffn": 2880, "heads": 64, "vocabulary": 201088, "head_size": 64},
        **{"key_value_heads": 8, "experts": 128, "experts_per_token": 4, "window": 128, "windowed_share": 0.5},
    },
    "DeepSeekV3": {
        **{"layers": 61, "hidden": 7168, "ffn": 2048, "heads": 128, "vocabulary": 129280, "head_size": 192},
        **{"value_size": 128, "query_rank": 1536, "key_value_rank": 512, "rotary_size": 64, "shared_ffn": 2048},
        **{"experts": 256, "experts_per_token": 8, "dense_layers": 3, "dense_ffn": 18432},
    },
}


def _mixture(row: Mapping[str, str]) -> TransformerShape | None:
    name, _, variant = row["model"].partition(" (")
    if name not in _MIXTURES:
        return None
    sizes = dict(_MIXTURES[name])
    if "MTP" in variant:  # one more layer predicts the token after the next one
        sizes["layers"] += 1
    return TransformerShape(
        **sizes,
        positions=int(row["seq"]),
        is_gated=True,
        has_tied_embedding=False,
        waits_for_rows="tokendrop" not in variant,
    )


def _sent_once(costs: ModelCosts, shape: TransformerShape, layout: PlanLayout) -> ModelCosts:
    """DeepEP and HybridEP, of the containers of 2026 and of DeepSeek: a token goes once to each node with its experts.

    Within a node it goes once to each rank. Tokens of a uniform router are assumed.
    """
    places = layout.expert // 8 if layout.expert > 8 else layout.expert
    copies = places * (1 - (1 - 1 / places) ** shape.experts_per_token)
    layers = [
        dataclasses.replace(layer, routed_tokens=layer.routed_tokens * copies / shape.experts_per_token)
        for layer in costs.layers
    ]
    return dataclasses.replace(costs, layers=tuple(layers))


def _selective_by_operation(costs: ModelCosts) -> ModelCosts:
    """torchtitan's selective recomputation keeps the result of every second product, and of attention."""
    layers = [dataclasses.replace(layer, selective_saved=layer.saved * 0.4) for layer in costs.layers]
    return dataclasses.replace(costs, layers=tuple(layers))


def _fused_cross_entropy(costs: ModelCosts) -> ModelCosts:
    """FlashAttention's cross-entropy, MPT's default: it writes the gradient over the 16-bit logits."""
    head = costs.layers[-1]
    head = dataclasses.replace(head, float32_saved=head.float32_saved / 2, peak_only=0.0, moved=head.moved / 3)
    return dataclasses.replace(costs, layers=(*costs.layers[:-1], head))


def _divided_positions(costs: ModelCosts) -> ModelCosts:
    """Megatron-LM's and torchtitan's context ranks divide the positions of the embedding and of the loss, too."""
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
    stages = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 3, "FSDP 0": 1}
    zero = stages[row["zero"]] if row["zero"] in stages else int((row["zero"] or "1").split()[0])
    if not row["zero"]:
        derived.append("ZeRO stage")  # NeMo's distributed optimizer
    microbatch = int(row["mbs"] or 1)
    if "mbs column = local batch" in row["note"]:
        microbatch = 1
    stages_per_rank = (_whole(row["vp"]) or 1) if pipeline > 1 else 1
    is_nemo = row["source"].startswith(("NeMo", "Megatron-Bridge"))
    is_megatron, is_titan = (row["source"].startswith(name) for name in ("bigscience", "torchtitan"))
    # Experts that are also divided over tensor ranks count for these.
    expert = min(_whole(row["ep"]) or 1, data * context)
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
        expert=expert,
        zero_stage=zero,
        # torchtitan keeps the parameters of a stage from its first forward on.
        reshard_after_forward=row["zero"] != "SHARD_GRAD_OP" and not (is_titan and pipeline > 1),
        recompute=row["recompute"].split()[0].rstrip("?") if row["recompute"][:4] in ("full", "sele") else "none",
        offload=_offload(row),
        # DeepSpeed's partitioned activations are not in the layout; what they save is what sequence parallel saves.
        sequence_parallel=((is_nemo or is_titan) and tensor > 1) or "PA_CPU=N" in row["note"],
        overlapped_tensor_ranks=tensor > 1 and (is_nemo or "async TP" in row["note"]),
        fused_attention=not is_megatron,
        # Megatron-Core hides the all-to-alls of one microbatch beside another one where ranks have several stages.
        overlapped_expert_ranks=expert > 1 and stages_per_rank > 1,
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
        return dataclasses.replace(_PURE, products="float8") if "fp8" in precision else _PURE
    if row["source"].startswith("torchtitan"):
        products = "float8" if "float8" in precision else "bfloat16"
        context = int(row["cp"])  # FSDP shards over context ranks, too
        held = {name: getattr(_PURE, name) / context for name in ("parameter", "gradient", "state")}
        return dataclasses.replace(_PURE, name=f"{products}, FSDP2", products=products, reduced=4, **held)
    if precision.startswith(
        ("FP8", "MXFP8")
    ):  # Megatron's distributed optimizer shards its states over context ranks too
        return dataclasses.replace(_NEMO, state=_NEMO.state / int(row["cp"] or 1))
    if precision.lower() == "bf16":
        return _FLOAT32_SUMS if "Rebalancing" in row["note"] else FORMATS["bf16-true, float32 master weights"]
    return _EIGHT_BIT_ADAM if "8-bit Adam" in row["note"] else FORMATS["16-true, float32 master weights"]


def _seconds(row: Mapping[str, str], layout: PlanLayout) -> float | None:
    seconds, rate = _number(row["step_s"]), _number(row["tok_s_gpu"])
    if seconds is None and rate is not None:
        seconds = layout.batch * int(row["seq"].rstrip("?")) / (rate * int(row["gpus"]))
    return seconds


def _group(row: Mapping[str, str]) -> str:
    """Source, table and, where noted, the day or the section."""
    days = re.findall(r"(\d{4}-\d\d-\d\d|\d\d-\d\d)(?:;|$)", row["note"]) or [""]
    return " | ".join(filter(None, (row["source"].split("@")[0], row["table"], days[0])))


def _number(text: str) -> float | None:
    try:
        return float(text.partition(" (")[0])  # brackets: a second quantisation
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None
