"""Plans that docs/plan.md quotes are those that the command makes, and are of the families of published recipes."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lightning_hybrid.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Plans beside published recipes")[2].partition("\n## ")[0]
COMMANDS = [shlex.split(line)[2:] for line in SECTION.splitlines() if line.startswith("lightning-hybrid plan ")]
ROWS = [line.split(" | ") for line in SECTION.splitlines() if re.match(r"\| \w.*\| `", line)]
# Ranks of each kind of parallelism above 1, and the stage of ZeRO, of what practitioners run.
FAMILIES = {
    "llama3-8b.json": ({"shard": 8}, 3),
    "llama3-70b.json": ({"shard": 64}, 3),
    "gpt3-175b.json": ({"pipeline": 16, "tensor": 4, "shard": 16}, 1),
    "mixtral-8x7b.json": ({"pipeline": 4, "expert": 8, "replicate": 8}, 0),
    "mpt-13b.json": ({"shard": 64}, 3),
    "gpt-1.3b.json": ({}, 0),
}


@pytest.mark.parametrize(
    ("arguments", "row"), list(zip(COMMANDS, ROWS, strict=True)), ids=[arguments[1] for arguments in COMMANDS]
)
def test_quoted_plans(capsys, monkeypatch, arguments, row):
    monkeypatch.chdir(ROOT / "examples" / "configurations")
    assert main(["plan", *arguments, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    best = content["plans"][0]
    sizes, zero = FAMILIES[arguments[1]]
    kinds = "pipeline", "tensor", "context", "expert", "shard", "replicate"
    assert {kind: best["fields"][kind] for kind in kinds if best["fields"][kind] > 1} == sizes
    assert best["fields"]["zero_stage"] == zero and not best["fields"]["offload"]
    assert best["memory"] + best["memory_error"] <= best["capacity"]
    rate = best["samples_per_second"] * content["model"]["positions"] / content["devices"] / content["num_nodes"]
    bar = f"{best['seconds_error'] / best['seconds']:.0%}{'' if best['is_calibrated'] else ' uncalibrated'}"
    assert row[1:3] == [f"`{best['layout']}`", f"{rate:,.0f} ± {bar}"]


def test_quoted_table(capsys):
    path = str(ROOT / "examples" / "configurations" / "llama3-8b.json")
    arguments = ["--config-json", path, "--sequence", "4096", "--hardware", "h100", "--devices", "8", "--batch", "64"]
    assert main(["plan", *arguments]) == 0
    lines = capsys.readouterr().out.partition("\n4  ")[0].splitlines()
    assert "\n".join(f"    {line}".rstrip() for line in lines) in PAGE
