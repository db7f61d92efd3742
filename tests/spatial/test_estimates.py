"""Estimates of spatial parallelism without ranks: a dry run counts a rank's rows, and what it sends of them."""

import json

import pytest

from lightning_hybrid.cli import main

MODULE = "tests/models/command_line_classes.py:Images"


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


def test_a_plan_names_it_where_images_do_not_fit(capsys):
    status = main(["plan", MODULE, "--hardware", "cpu", "--devices", "2", "--max-memory", "401MB"])
    assert status == 3 and "spatial_parallel_size" in capsys.readouterr().out
    main(["plan", "tests/models/command_line_classes.py:Stack", "--hardware", "cpu", "--max-memory", "1MB"])
    assert "spatial_parallel_size" not in capsys.readouterr().out
