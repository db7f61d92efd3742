"""Write docs/advice/: what the planner chooses for models on clusters, and its reasons against the others.

PYTHONPATH=. python .ci/advice_pages.py
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import BandwidthCurve, Hardware, load_hardware
from lightning_hybrid.predict.layout import number_format_of
from lightning_hybrid.predict.options import spelled
from lightning_hybrid.predict.report import PlannedRun, why
from lightning_hybrid.predict.search import cluster_of, search_layouts
from lightning_hybrid.text import sized, timed

PAGES = Path(__file__).resolve().parents[1] / "docs" / "advice"
PRECISION = "bf16-mixed"
PLANS = 4
_SLOW = 1.25e9  # bytes per second of 10 Gb/s


@dataclass(frozen=True)
class Case:
    """One model on one cluster."""

    heading: str
    shape: TransformerShape
    hardware: Hardware
    devices: int
    num_nodes: int
    batch: int


def shape(layers: int, hidden: int, heads: int, positions: int = 2048, **others: int) -> TransformerShape:
    """A causal decoder with a gated MLP of 3.5 times its width."""
    return TransformerShape(
        layers, hidden, hidden * 7 // 2, heads, 50304, positions, is_gated=True, has_tied_embedding=False, **others
    )


A100 = load_hardware("a100-80")
H100 = load_hardware("h100")
SLOW_LINK = dataclasses.replace(
    A100,
    name="a100-80 behind 10 Gb/s",
    between_nodes=BandwidthCurve((1e6, 64e6), (0.4 * _SLOW, _SLOW)),
    latency_between=1e-4,
)
CASES = {
    "one_node": (
        "One node",
        "Eight devices with fast links between them.",
        [
            Case("1 billion parameters", shape(16, 2048, 16), A100, 8, 1, 256),
            Case("7 billion parameters", shape(32, 4096, 32), A100, 8, 1, 256),
            Case("30 billion parameters", shape(48, 7168, 56), A100, 8, 1, 256),
        ],
    ),
    "slow_link": (
        "Two nodes and a slow link",
        "Two nodes of eight devices, between which 10 Gb/s are shared by all.",
        [
            Case("1 billion parameters", shape(16, 2048, 16), SLOW_LINK, 8, 2, 256),
            Case("7 billion parameters", shape(32, 4096, 32), SLOW_LINK, 8, 2, 256),
            Case("The same with the fast link", shape(32, 4096, 32), A100, 8, 2, 256),
        ],
    ),
    "long_sequence": (
        "A long sequence",
        "A model of 7 billion parameters on 4 nodes of eight devices; a step has the same number of tokens.",
        [
            Case("8,192 tokens", shape(32, 4096, 32, 8192), H100, 8, 4, 128),
            Case("32,768 tokens", shape(32, 4096, 32, 32768), H100, 8, 4, 32),
            Case("131,072 tokens", shape(32, 4096, 32, 131072), H100, 8, 4, 8),
        ],
    ),
    "mixture": (
        "A mixture of experts",
        "Experts hold most parameters, and each token is computed by two of them."
        " The experts of a module are found in its recorded step.",
        [
            Case(
                "8 experts in 16 layers, one node", shape(16, 2048, 16, experts=8, experts_per_token=2), H100, 8, 1, 256
            ),
            Case(
                "8 experts in 32 layers, four nodes",
                shape(32, 4096, 32, experts=8, experts_per_token=2),
                H100,
                8,
                4,
                512,
            ),
        ],
    ),
}


def planned(case: Case) -> PlannedRun:
    """Search the layouts of a case."""
    costs, number_format = transformer_costs(case.shape, "a decoder"), number_format_of(PRECISION)
    sizes = case.devices, case.num_nodes
    result = search_layouts(costs, number_format, case.hardware, *sizes, batch=case.batch)
    return PlannedRun(result, costs, number_format, cluster_of(case.hardware, *sizes), *sizes, PRECISION)


def section(case: Case) -> str:
    """The plans of a case, the Trainer of the first, and the reasons against the others."""
    run = planned(case)
    unit = run.rate(run.result.best)[1]
    lines = [
        f"## {case.heading}",
        "",
        f"{run.title}; {case.batch} samples of {case.shape.positions:,} tokens per step.",
        "",
    ]
    lines += [f"| layout | step | memory | {unit} | why |", "|---|---|---|---|---|"]
    for plan in run.result.plans[:PLANS]:
        assert plan.time is not None
        step = f"{timed(plan.time.seconds)} ± {plan.time_error:.0%}"
        memory = f"{sized(plan.memory.least)} ± {plan.memory_error:.0%}"
        rate, reason = f"{run.rate(plan)[0]:,.0f}", why(plan, run.result.best)
        lines.append(f"| `{spelled(plan.layout)}` | {step} | {memory} | {rate} | {reason} |")
    lines += ["", "<!-- notest -->", "```python", run.trainer_arguments(run.result.best), "```", ""]
    lines += ["| not | because |", "|---|---|"]
    lines += [f"| {rejection.family} | {rejection.reason} |" for rejection in run.result.rejected]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """The text of each page, by its name."""
    texts = {}
    for name, (title, introduction, cases) in CASES.items():
        head = [
            f"# {title}",
            "",
            "Written by `python .ci/advice_pages.py`: the plans, times and sizes are [predictions](../plan.md).",
            "",
            introduction,
        ]
        texts[name] = "\n".join([*head, *(f"\n{section(case)}" for case in cases)]) + "\n"
    return texts


def main() -> None:
    """Write the pages."""
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
