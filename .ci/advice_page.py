"""Write docs/advice.md: what the planner chooses for models on clusters, and why not the next best layout.

PYTHONPATH=. python .ci/advice_page.py
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import BandwidthCurve, Hardware, load_hardware
from lightning_hybrid.predict.layout import number_format_of, spelled
from lightning_hybrid.predict.report import PlannedRun, why
from lightning_hybrid.predict.search import cluster_of, search_layouts
from lightning_hybrid.text import sized, timed

PAGE = Path(__file__).resolve().parents[1] / "docs" / "advice.md"
PRECISION = "bf16-mixed"
PLANS = 2
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
        "Eight A100 of 80 GB, 256 samples of 2,048 tokens per step.",
        [
            Case("1 billion parameters", shape(16, 2048, 16), A100, 8, 1, 256),
            Case("7 billion parameters", shape(32, 4096, 32), A100, 8, 1, 256),
            Case("30 billion parameters", shape(48, 7168, 56), A100, 8, 1, 256),
        ],
    ),
    "slow_link": (
        "Two nodes and a slow link",
        "Two nodes of eight A100 with 10 Gb/s between them, shared by all devices; the last case has the fast link.",
        [
            Case("1 billion parameters", shape(16, 2048, 16), SLOW_LINK, 8, 2, 256),
            Case("7 billion parameters", shape(32, 4096, 32), SLOW_LINK, 8, 2, 256),
            Case("The same with the fast link", shape(32, 4096, 32), A100, 8, 2, 256),
        ],
    ),
    "long_sequence": (
        "A long sequence",
        "A model of 7 billion parameters on four nodes of eight H100, the same number of tokens per step.",
        [
            Case("8,192 tokens", shape(32, 4096, 32, 8192), H100, 8, 4, 128),
            Case("32,768 tokens", shape(32, 4096, 32, 32768), H100, 8, 4, 32),
            Case("131,072 tokens", shape(32, 4096, 32, 131072), H100, 8, 4, 8),
        ],
    ),
    "mixture": (
        "A mixture of experts",
        "On H100; two of eight experts compute each token.",
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


def rows(case: Case) -> list[str]:
    """The best plans of a case, with the reason of each."""
    run = planned(case)
    lines = []
    for number, plan in enumerate(run.result.plans[:PLANS]):
        assert plan.time is not None
        figures = f"{timed(plan.time.seconds)} | {sized(plan.memory.least)}"
        title = case.heading if number == 0 else ""
        lines.append(f"| {title} | `{spelled(plan.layout)}` | {figures} | {why(plan, run.result.best)} |")
    return lines


def page() -> str:
    """The text of the page."""
    lines = [
        "# What the planner advises",
        "",
        "Typical models on typical clusters, in bf16-mixed: the layout that [the planner](plan.md) chooses, and the",
        "runner-up with its reason. Times and memory are good to about 8 %, times of mixtures and of context ranks to",
        "35 and 22 % ([how far to trust them](planner.md)); nothing here was run. For your own model,",
        "`lightning-hybrid plan` prints the same table, the reason against every other family of layouts, and the",
        "arguments of the Trainer. Written by `python .ci/advice_page.py`.",
    ]
    for title, introduction, cases in CASES.values():
        lines += [
            "",
            f"## {title}",
            "",
            introduction,
            "",
            "| model | layout | step | memory | why |",
            "|---|---|---|---|---|",
        ]
        lines += [row for case in cases for row in rows(case)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
