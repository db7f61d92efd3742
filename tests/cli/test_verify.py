"""The `verify` command: results by rank; a rank that fails, dies or hangs is reported, and no process is left."""

import os
import time

import pytest

from lightning_hybrid.cli import main
from lightning_hybrid.cli.verify import Target, arguments_of
from lightning_hybrid.verify.rank_launcher import RanksFailed, run_ranks

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
    command = ["verify", *DIGITS, *SMALL, "--layout", "pp=2,stages=40"]
    assert main(command) == 0 and main([*command, "--strict"]) == 1
    assert "refused" in capfd.readouterr().out


def test_constructor_arguments():
    others = ["--module.width", "8", "--data.names=['a']", "--module.act", "gelu", "--data.rate", "1e-3"]
    assert arguments_of(others) == ({"width": 8, "act": "gelu"}, {"names": ["a"], "rate": 1e-3})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["x:Y", "--modul.width", "8"], "--modul.width"),
        (["nothing"], "names no class"),
        (["no_such_module:Y"], "no_such_module"),
        (["examples/digits.py:Nothing"], "Nothing"),
        (["examples/missing.py:X"], "there is no file"),
        (["x:Y", "--layout", "pp"], "name=value"),
        (["x:Y", "--layout", "pp=2", "--layout", "xx=2"], "'xx' is no option of the strategy"),
        (["x:Y", "--layout", "zero_stag=2"], "nearest: ['zero_stage'"),
        (["x:Y", "--steps", "0"], "--steps=0"),
        (["x:Y", "--data.a", "1"], "without --data"),
    ],
)
def test_command_line_errors(arguments, text, capsys):
    assert main(["verify", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_target_is_called_with_its_arguments():
    assert Target("fractions:Fraction", {"numerator": 3})() == 3
