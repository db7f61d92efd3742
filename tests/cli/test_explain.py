"""The `explain` command: the plan of any number of ranks, made in one process, is that of the ranks themselves."""

import json

import pytest
import torch

from harness.fits import trainer_of
from harness.trainer_runs import lines_of_lightning
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.cli import main
from lightning_hybrid.cli.explain import balance_line, explain
from lightning_hybrid.text import wrapped
from lightning_hybrid.verify import parse_layout
from models import command_line_classes
from models.hand_written import WIDTH

CLASSES = "tests/models/command_line_classes.py"


def explained(capsys, *arguments):
    status = main(["explain", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def table_of_run(name, options, devices):
    """On a rank: the table that a fit prints at its start."""
    torch.manual_seed(0)
    trainer = trainer_of(devices, Hybrid3DStrategy(**options), [], max_steps=1)
    with lines_of_lightning() as lines:
        trainer.fit(getattr(command_line_classes, name)())
    return [line for line in lines if line.startswith("hybrid3d:")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Stack", "pp=2,tp=2"),
        pytest.param("Stack", "dp=2,pp=2", marks=pytest.mark.slow),
        ("Mixture", "dp=2,ep=2"),
        pytest.param("Stack", "dp=2,zero_stage=3,recompute=full", marks=pytest.mark.slow),
        pytest.param("Mixture", "dp=2,pp=2,ep=2", marks=pytest.mark.slow),
    ],
)
def test_table_is_that_of_a_run(worlds, name, layout):
    layout = parse_layout(layout)
    [table] = worlds.run(layout.devices, table_of_run, name, layout.options(None), layout.devices)[0]
    torch.manual_seed(0)
    shown = [line for line in table.splitlines() if not line.startswith("environment: ")]
    explained = explain(getattr(command_line_classes, name)(), None, layout, "32-true")["table"]
    assert wrapped(explained).replace("\n    ", " ").splitlines() == shown  # unwrapped, as the logged lines are


def test_units_and_stages(capsys):
    status, plan = explained(capsys, f"{CLASSES}:Stack", "--layout", "pp=2,stages=2,dp=8")
    sizes = sum(parameter.numel() for parameter in command_line_classes.Stack().parameters())
    assert status == 0 and plan["ranks"] == 16 and plan["refused"] is None
    assert [stage["pipeline_rank"] for stage in plan["stages"]] == [0, 1, 0, 1]
    for rows in (plan["units"], plan["stages"]):
        assert sum(row["parameters"] for row in rows) == sizes and sum(row["bytes"] for row in rows) == 4 * sizes
        assert sum(row["cost_share"] for row in rows) == pytest.approx(1)
    status, in_v = explained(capsys, f"{CLASSES}:Stack", "--layout", "pp=2,schedule=zero_bubble_v")
    assert status == 0 and [stage["pipeline_rank"] for stage in in_v["stages"]] == [0, 1, 1, 0]
    names = {unit["unit"] for unit in plan["units"]}
    assert {"layers.0", "layers.3", "head", None} <= names


# Importing inductor uses what torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_memory_with_and_without_techniques(capsys):
    layout = "dp=2,pp=2,m=4,zero_stage=3,offload=cpu,recompute=full,compile=units"
    status, plan = explained(capsys, f"{CLASSES}:Stack", "--layout", layout)
    assert status == 0
    assert plan["offloaded"] == {"optimizer_states": "cpu", "gradients": "cpu", "parameters": "cpu"}
    for words in ("zero_stage=3", "offloaded: ", "recomputed in the backward", "compiled with inductor"):
        [line] = [line for line in plan["techniques"] if line.startswith(words)]
        assert line in plan["table"]
    for stage, rank, without in zip(plan["stages"], plan["memory"], plan["memory_without_techniques"], strict=True):
        assert without["parameters"] == without["gradients"] == stage["bytes"] and not without["gathered"]
        # Dims of odd sizes are sharded unevenly.
        assert stage["bytes"] / 2 <= rank["parameters"] == rank["gradients"] < 0.7 * stage["bytes"]
        assert rank["gathered"] == 2 * stage["bytes"]
        for memory in (rank, without):
            sizes = {kind: size for kind, size in memory.items() if not kind.endswith("total")}
            assert memory["total"] + memory["host_total"] == sum(sizes.values())
        assert 0 < rank["activations"] <= without["activations"]
        assert rank["host_total"] == rank["parameters"] + rank["gradients"] + rank["optimizer_states"]
        assert without["host_total"] == 0
    assert plan["memory"][0]["activations"] < plan["memory_without_techniques"][0]["activations"]


def test_states_in_files_are_not_in_the_total(capsys, tmp_path):
    layout = f"dp=2,zero_stage=3,offload=disk:{tmp_path}"
    status, plan = explained(capsys, f"{CLASSES}:Stack", "--layout", layout)
    [rank] = plan["memory"]
    assert status == 0 and rank["optimizer_states"] > 0
    assert rank["total"] == rank["parameters"] + rank["gradients"] + rank["gathered"] + rank["activations"]
    assert "optimizer states)" in plan["table"].partition("; in files ")[2]


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=3", "dp=2,m=2,zero=1", "tp=2"])
def test_activations_without_stages(capsys, layout):
    """A full batch saves what two stages with one microbatch save, but for the value between them, which both keep."""
    [rank] = explained(capsys, f"{CLASSES}:Stack", "--layout", layout)[1]["memory"]
    stages = explained(capsys, f"{CLASSES}:Stack", "--layout", "pp=2,m=1")[1]["memory"]
    share, sent = 2 if "m=2" in layout else 1, 8 * WIDTH * 4
    saved = sum(stage["activations"] for stage in stages) - sent
    assert rank["activations"] == pytest.approx(saved / share, rel=0.01)


@pytest.mark.parametrize("module", [f"{CLASSES}:Stack", "examples/quickstart.py:Classifier"])
def test_recomputed_layers_save_less_without_stages(capsys, module):
    _, plan = explained(capsys, module, "--layout", "dp=1,recompute=full")
    assert 0 < plan["memory"][0]["activations"] < plan["memory_without_techniques"][0]["activations"]


def test_text_shows_memory_of_ranks(capsys):
    assert main(["explain", f"{CLASSES}:Stack", "--layout", "dp=2,zero_stage=1,offload=cpu"]) == 0
    title, kinds, rank, _, without, _, of_all, *_ = capsys.readouterr().out.splitlines()
    assert title == "bytes of a rank, estimated (optimizer on cpu, grads on cpu)"
    assert "gathered" in kinds and kinds.split()[-2:] == ["total", "host"]
    assert without == "without ZeRO, offload and recomputation"
    assert rank.startswith("each rank  ") and of_all.startswith("each rank  ")


@pytest.mark.parametrize("command", ["explain", "dryrun"])
def test_printed_columns_of_memory_add_up(capsys, command):
    assert main([command, f"{CLASSES}:Stack", "--layout", "pp=2,m=4"]) == 0
    table = capsys.readouterr().out.partition("bytes of a rank, estimated\n")[2].partition("\n\n")[0]
    title, *rows = table.splitlines()
    assert "working" in title and "messages" in title and len(rows) == 2
    for row in rows:
        *sizes, total = (int(cell.replace(",", "")) for cell in row.split()[-8:])
        assert sum(sizes) == total and len(sizes) == 7


def test_text_names_units_stages_and_plans(capsys):
    assert main(["explain", f"{CLASSES}:Stack", "--module.num_layers", "2", "--layout", "pp=2,tp=2"]) == 0
    out = capsys.readouterr().out
    assert "layers.0" in out and "stage 1 in all" in out and "0 -> 2 (split by output features)" in out


@pytest.mark.parametrize("stages", [2, 8, 16])
def test_each_stage_has_a_line_of_at_most_100_characters(capsys, stages):
    arguments = ["explain", f"{CLASSES}:ReadsFirst", "--module.num_layers", "32", "--layout", f"pp={stages},m=1"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    start = next(index for index, line in enumerate(lines) if line.startswith("stage  units"))
    rows = lines[start + 1 : start + 1 + stages]
    assert [row.split()[0] for row in rows] == [str(stage) for stage in range(stages)]
    assert stages == 2 or f"-{stages - 1}" in rows[0]  # what all later stages read


def test_phases_are_named_on_standard_error(capsys):
    assert main(["explain", f"{CLASSES}:Stack", "--layout", "pp=2,tp=2", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["refused"] is None
    names = [line.partition("explain: ")[2].partition(" (after")[0] for line in captured.err.splitlines()]
    expected = [
        "importing torch, Lightning and your module",
        "making the module and its data",
        "recording the step on one batch",
    ]
    expected += ["searching tensor plans", "searching tensor plans: layer 1 of 5, layers.0", "estimating memory"]
    assert [name for name in names if name in expected] == expected


def test_layout_with_a_mapping(capsys):
    layout = "dp=2,zero_stage=3,offload={optimizer_states: cpu}"
    status, plan = explained(capsys, f"{CLASSES}:Stack", "--layout", layout)
    assert status == 0 and plan["offloaded"] == {"optimizer_states": "cpu"}


def test_experts(capsys):
    status, plan = explained(capsys, f"{CLASSES}:Mixture", "--layout", "dp=2,ep=2")
    assert status == 0 and "4 experts, 2 on each of 2 ranks" in plan["experts"]


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("Stack", "pp=30", "UnfitError: pipeline_parallel_size=30 makes 30 stages"),
        ("Stack", "tp=3", "shards no layer of the module"),
        ("Stack", "dp=2,ep=2", "finds no experts"),
        ("Stack", "pp=30,strict_layout=true", "UnfitError: pipeline_parallel_size=30 makes 30 stages"),
    ],
)
def test_refusals(capsys, name, layout, reason):
    status, plan = explained(capsys, f"{CLASSES}:{name}", "--layout", layout)
    assert status == 3 and reason in plan["refused"]


@pytest.mark.filterwarnings("ignore:sharded instead of pipelined")
def test_refused_modules(capsys):
    status, plan = explained(capsys, f"{CLASSES}:Manual")
    assert status == 3 and "manual optimization" in plan["refused"]


def test_errors_of_the_user_are_shown(capsys):
    assert main(["explain", f"{CLASSES}:BrokenStep"]) == 3
    captured = capsys.readouterr()
    assert (
        "no such column" in captured.out and "command_line_classes.py" in captured.err and "Traceback" in captured.err
    )
    with pytest.raises(ValueError, match="the user's own"):
        main(["explain", f"{CLASSES}:BrokenConstructor"])


def test_the_nearest_good_layout_is_named():
    units = [{"cost_share": share} for share in (0.1, 0.3, 0.1, 0.3, 0.2)]
    stages = [{"pipeline_rank": rank, "cost_share": unit["cost_share"]} for rank, unit in enumerate(units)]
    assert balance_line(units, stages) == (
        "a bad layout: one of 5 pipeline ranks has 30% of the cost, and an equal share is 20%, so the others wait 33%"
        " of the time; the nearest good one is pp=3 (at most 40%)"
    )
    looped = [{**stage, "pipeline_rank": index % 2} for index, stage in enumerate(stages)]
    assert balance_line(units, looped) == ""
