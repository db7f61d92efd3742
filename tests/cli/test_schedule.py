"""The `schedule` command: the numbers of docs/schedules.md, without torch."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from harness.schedule_proof import check_schedule
from lightning_hybrid.cli import main
from lightning_hybrid.cli.schedule import most_in_flight
from lightning_hybrid.schedule import SCHEDULE_NAMES, chain, make_schedule

SIZES = ["--ranks", "4", "--microbatches", "8"]


@pytest.mark.parametrize(
    ("name", "bubble", "most"),
    [("gpipe", "27.3%", "8, 8, 8, 8"), ("1f1b", "27.3%", "4, 3, 2, 1"), ("zero_bubble", "11.1%", "4, 4, 4, 4")],
)
def test_drawing(name, bubble, most, capsys):
    assert main(["schedule", name, *SIZES]) == 0
    out = capsys.readouterr().out
    assert "rank 3 ..." in out and f"bubble {bubble}" in out and f"in flight, by rank: {most}" in out


def test_search_for_the_given_times(capsys):
    for limit, bubble in (("4", "27.3%"), ("6", "15.8%")):
        arguments = ["zero_bubble_searched", *SIZES, "--transfer-ms", "0.5", "--max-microbatches-in-flight", limit]
        assert main(["schedule", *arguments]) == 0
        out = capsys.readouterr().out
        assert f"bubble {bubble}" in out and f"in flight, by rank: {', '.join([limit] * 4)}" in out


def test_stages_in_v_placement(capsys):
    assert main(["schedule", "zero_bubble_v", *SIZES, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stages_per_rank"] == 2 and report["bubble"] == pytest.approx(3 / 51)
    assert {span["action"][0] for span in report["spans"] if span["rank"] == 0} == {"0", "7"}


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_microbatches_in_flight(name):
    schedule = make_schedule(name, 4, 8)
    assert tuple(most_in_flight(schedule)) == check_schedule(schedule, chain(schedule.num_stages))


def test_json_and_svg(tmp_path, capsys):
    picture = tmp_path / "picture.svg"
    assert main(["schedule", "1f1b", "--ranks", "2", "--microbatches", "3", "--json", "--svg", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["makespan_ms"] == pytest.approx(12) and report["bubble"] == pytest.approx(0.25)
    assert report["most_in_flight"] == [2, 1] and report["spans"][0]["action"] == "0F0"
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1f1b", "--ranks", "0", "--microbatches", "8"], "num_ranks=0"),
        (["zero_bubble", *SIZES, "--stages-per-rank", "2"], "one stage per rank"),
        (["dualpipe_v", *SIZES, "--stages-per-rank", "3"], "two stages per rank"),
        (["1f1b", *SIZES, "--max-microbatches-in-flight", "3"], "zero_bubble_searched"),
        (["1f1b", *SIZES, "--forward-ms", "-1"], "0 or more"),
        (["1f1b", *SIZES, "--forward-ms", "nan"], "--forward-ms nan; times must be 0 or more"),
        (["1f1b", *SIZES, "--transfer-ms", "inf"], "--transfer-ms inf; times must be 0 or more"),
        (["1f1b", *SIZES, "--forward-ms", "0", "--backward-ms", "0"], "nothing to draw"),
        (["1f1b", *SIZES, "--svg", "picture.png"], "--svg picture.png must end in .svg"),
        (["1f1b", *SIZES, "--svg", "/no/such/folder/picture.svg"], "--svg"),
    ],
)
def test_invalid_sizes(arguments, text, capsys):
    assert main(["schedule", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_no_torch_is_imported():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'lightning', 'numpy')));"
        "from lightning_hybrid.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    subprocess.run([sys.executable, "-c", program, "schedule", "gpipe", *SIZES], check=True, capture_output=True)
