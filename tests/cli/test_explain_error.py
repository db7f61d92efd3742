"""`lightning-hybrid explain-error` has an entry for each error that names one."""

import re
from pathlib import Path

import pytest

import lightning_hybrid
from lightning_hybrid.cli import main
from lightning_hybrid.errors import LayoutError

PACKAGE = Path(lightning_hybrid.__file__).parent


def test_each_entry_that_the_code_names_is_found(capsys):
    names = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r'entry="([\w-]+)"', path.read_text())}
    assert len(names) > 100
    for name in names:
        assert main(["explain-error", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name}\n")


def test_the_note_of_an_error_is_a_command(capsys):
    [note] = LayoutError("m", entry="world-size").__notes__
    command = re.search(r"lightning-hybrid (explain-error [\w-]+)", note)[1]
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "The product of the sizes must be the number of processes" in out and "[" not in out and "`" not in out


def test_words_of_a_message_are_found(capsys):
    assert main(["explain-error", "the", "world has"]) == 0
    assert "world-size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "entry"),
    [
        ("ValueError: Tried to step 9 times. The specified number of total steps is 8", "schedule-ended"),
        ("layout needs a multiple of pp = 2 = 2 ranks but the world has 3; set pipeline_parallel_size=1", "world-size"),
        ("rank 1 stopped: rank 0 failed (see there)", "rank-failed"),
    ],
)
def test_a_message_is_found_by_what_its_entry_quotes(capsys, message, entry):
    assert main(["explain-error", message]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{entry}\n") and "\n\n" not in out


def test_the_nearest_name_is_given(capsys):
    assert main(["explain-error", "wrld-size"]) == 2
    assert "did you mean 'world-size'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["help"], ["help", "plan"]])
def test_help(capsys, arguments):
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 0
    assert f"lightning-hybrid {' '.join(arguments[1:])}".strip() in capsys.readouterr().out
