"""Error bars of step times follow what was compared with measurements."""

import dataclasses
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.evidence import COMPARED, UNCALIBRATED, device_of, format_of, techniques_of, time_error
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"
BF16, FLOAT8 = FORMATS["bf16-mixed"], FORMATS["float8"]
DENSE = transformer_costs(TransformerShape(4, 2048, 8192, 16, 50304, 2048))
MIXTURE = transformer_costs(TransformerShape(4, 2048, 8192, 16, 50304, 2048, experts=8, experts_per_token=2))
SHARDS = PlanLayout(shard=8, batch=8, zero_stage=3)


def test_the_table_names_what_three_published_runs_or_more_have(monkeypatch):
    monkeypatch.syspath_prepend(str(PUBLISHED))
    from leave_one_out import usable_runs

    found = defaultdict(Counter)
    for run in usable_runs():
        if not run.costs.routes:
            found[device_of(run.hardware), format_of(run.number_format)].update(techniques_of(run.layout))
    table = {
        key: frozenset(technique for technique, runs in counts.items() if runs >= 3) for key, counts in found.items()
    }
    devices = {key: techniques for key, techniques in table.items() if not key[0].startswith("v100")}
    assert {key: value for key, value in devices.items() if value} == COMPARED
    sys.modules.pop("leave_one_out")


@pytest.mark.parametrize(
    ("costs", "layout", "number_format", "hardware", "error"),
    [
        (DENSE, SHARDS, BF16, "h100", 0.08),
        (DENSE, SHARDS, FLOAT8, "h100", 0.08),
        (DENSE, SHARDS.replaced(context=2), FLOAT8, "h100", 0.08),
        (DENSE, SHARDS.replaced(context=2), BF16, "h100", UNCALIBRATED["dense"]),
        (DENSE, SHARDS, BF16, "a100-40", 0.08),
        (DENSE, SHARDS, BF16, "v100-32", UNCALIBRATED["dense"]),
        (DENSE, SHARDS, BF16, "b200", UNCALIBRATED["dense"]),
        (MIXTURE, SHARDS, BF16, "h100", UNCALIBRATED["mixtures"]),
        (dataclasses.replace(DENSE, positions=1), SHARDS, BF16, "h100", UNCALIBRATED["dense"]),
    ],
)
def test_bars(costs, layout, number_format, hardware, error):
    assert time_error(costs, layout, number_format, load_hardware(hardware)) == error <= 0.35
