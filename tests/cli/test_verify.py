"""The `verify` command: results by rank; a rank that fails, dies or hangs is reported, and no process is left."""

import json
import os
import time

import pytest

from lightning_hybrid.cli import main
from lightning_hybrid.verify import Report
from lightning_hybrid.verify.ranks import RanksFailed, run_ranks

DIGITS = ["examples/digits.py:ResNet", "--data", "examples/digits.py:Digits", "--data.batch_size", "16"]
SMALL = ["--module.channels", "4", "--module.blocks", "2", "--steps", "2"]


def rank_and_pid():
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.getpid()


def fail_on_rank_1(how):
    if os.environ["RANK"] == "1":
        if how == "raises":
            raise ValueError("rank 1 cannot")
        if how == "dies":
            os._exit(3)
        time.sleep(600)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ranks_return_results_and_exit():
    results = run_ranks(2, rank_and_pid, timeout=60)
    assert [result[:2] for result in results] == [("0", "2"), ("1", "2")]
    assert not any(is_running(pid) for *_, pid in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"), [("raises", "rank 1: ValueError: rank 1 cannot"), ("dies", "rank 1: the process died")]
)
def test_failing_rank_is_reported(how, text):
    with pytest.raises(RanksFailed, match=text):
        run_ranks(2, fail_on_rank_1, how, timeout=60)


@pytest.mark.slow
def test_hanging_rank_is_killed():
    with pytest.raises(RanksFailed, match=r"ranks \[1\] of 2 still run after 20 s"):
        run_ranks(2, fail_on_rank_1, "hangs", timeout=20)


@pytest.mark.slow
def test_command_on_an_example(capfd):
    assert main(["verify", *DIGITS, *SMALL, "--layout", "pp=2", "--layout", "dp=2"]) == 0
    out = capfd.readouterr().out
    assert out.count("same") == 2 and "mixes samples" in out


@pytest.mark.slow
def test_command_reports_a_refusal(capfd):
    command = ["verify", *DIGITS, *SMALL, "--layout", "pp=2,stages=40,strict_layout=true"]
    assert main(command) == 3 and main([*command, "--strict"]) == 1
    assert "refused" in capfd.readouterr().out


def test_no_step_is_no_count(capsys):
    assert main(["verify", "x:Y", "--steps", "0"]) == 2
    assert "--steps 0" in capsys.readouterr().err


OUTCOMES = {"pp=2": "same", "pp=3": "refused", "pp=4": "different", "pp=5": "failed"}


class Verdicts:
    """Stands for `Verification`: the outcome follows from the layout."""

    def __init__(self, experiment, *, timeout, on_phase):
        self.on_phase = on_phase

    def check(self, layout):
        self.on_phase("a phase")
        notes = ("noise is large", f"{layout.num_stages} stages")
        return Report(
            layout.name,
            OUTCOMES[layout.name],
            "why",
            floor=float("nan"),
            notes=notes,
            traceback="the user's traceback",
        )


@pytest.mark.parametrize(
    ("layouts", "status", "strict_status"),
    [
        (["pp=2"], 0, 0),
        (["pp=2", "pp=3"], 3, 1),
        (["pp=3", "pp=4"], 1, 1),
        (["pp=5", "pp=2"], 1, 1),
    ],
)
def test_exit_status_and_json(layouts, status, strict_status, monkeypatch, capsys):
    monkeypatch.setattr("lightning_hybrid.verify.Verification", Verdicts)
    command = [
        "verify",
        "models.command_line_classes:Stack",
        *(word for layout in layouts for word in ("--layout", layout)),
    ]
    assert main([*command, "--json"]) == status
    captured = capsys.readouterr()
    assert [report["outcome"] for report in json.loads(captured.out)] == [OUTCOMES[layout] for layout in layouts]
    assert "the user's traceback" in captured.err
    assert f"verify 1 of {len(layouts)}: {layouts[0]}: a phase" in captured.err
    assert main([*command, "--strict"]) == strict_status
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert notes[0] == f"note on {', '.join(layouts)}: noise is large"
    assert notes[1] == f"note on {layouts[0]}: {layouts[0][-1]} stages"
