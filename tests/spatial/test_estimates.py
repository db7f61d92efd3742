"""Estimates of spatial parallelism without ranks: a dry run counts a rank's rows, and what it sends of them."""

import json

import pytest

from lightning_hybrid.cli import main

CLASSES = "tests/models/command_line_classes.py"
MODULE = f"{CLASSES}:Images"
LIMIT = "404MB"  # of which the framework takes 400


def dry_run(capsys, layout):
    assert main(["dryrun", MODULE, "--layout", layout, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rank"][0]


def test_a_rank_holds_its_rows_and_sends_those_at_borders(capsys):
    alone, shared = (dry_run(capsys, layout) for layout in ("dp=2", "spatial_parallel_size=2"))
    assert shared["bytes"]["activations"] == pytest.approx(alone["bytes"]["activations"] / 2, rel=0.02)
    assert shared["bytes"]["parameters"] == alone["bytes"]["parameters"]
    sent = {each["content"]: each for each in shared["messages"]}
    borders = sent["rows at borders"]
    # Two convolutions of 3 x 3, of 3 and 8 channels: one row to the neighbour, and the gradient of one from it.
    assert (borders["axis"], borders["count"]) == ("context", 4)
    assert borders["nbytes"] == 2 * 4 * 64 * (3 + 8) * 4
    assert sent["gradients of kernels"]["nbytes"] == 4 * 9 * (3 * 8 + 8 * 2)


def planned(capsys, module, *arguments):
    assert main(["plan", f"{CLASSES}:{module}", "--hardware", "cpu", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("module", ["Segmentation", "Volumes", "Images"])
def test_plans_and_dry_runs_agree_on_activations(capsys, module):
    fixed = "spatial=2,dp=1,zero=0,recompute=none,offload=null"
    plan = planned(capsys, module, "--devices", "2", "--fix", fixed)["plans"][0]
    assert plan["options"] == {"spatial_parallel_size": 2}
    assert main(["dryrun", f"{CLASSES}:{module}", "--layout", "spatial=2", "--json"]) == 0
    rank = json.loads(capsys.readouterr().out)["rank"][0]["bytes"]
    assert plan["memory_of_ranks"][0]["activations"] == pytest.approx(rank["activations"], rel=0.15)
    assert plan["memory_of_ranks"][0]["parameters"] == rank["parameters"]


def test_a_plan_shares_images_that_do_not_fit(capsys):
    content = planned(
        capsys, "Segmentation", "--devices", "4", "--fix", "recompute=none,pp=1,tp=1", "--max-memory", LIMIT
    )
    best = content["plans"][0]
    assert best["options"]["spatial_parallel_size"] > 1 and best["fields"]["spatial"]
    assert f"spatial_parallel_size={best['fields']['context']}" in content["trainer"]
    roomy = planned(capsys, "Segmentation", "--devices", "4")
    assert roomy["plans"][0]["options"].keys() <= {"zero_stage"} and roomy["plans"][0]["fields"]["shard"] in (1, 4)


def test_why_explains_spatial_ranks(capsys):
    arguments = ["plan", f"{CLASSES}:Segmentation", "--hardware", "cpu", "--devices", "2"]
    assert main([*arguments, "--why", "spatial=2"]) == 0
    text = capsys.readouterr().out
    assert "dp=1,spatial=2 against the chosen" in text and "spatial ranks" in text


def test_a_plan_names_it_where_it_was_not_tried(capsys):
    arguments = ["--hardware", "cpu", "--devices", "2", "--max-memory", "1MB"]
    assert main(["plan", MODULE, *arguments, "--fix", "dp=2"]) == 3
    assert "spatial_parallel_size" in capsys.readouterr().out
    main(["plan", f"{CLASSES}:Stack", *arguments])
    assert "spatial_parallel_size" not in capsys.readouterr().out
