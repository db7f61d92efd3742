"""The exit status of each command, its JSON on standard output alone, and the examples of its help, which are run."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_hybrid.checkpoint.convert import to_folder
from lightning_hybrid.cli import main
from lightning_hybrid.cli.progress import Progress

CLASSES = "tests/models/command_line_classes.py"
STACK = f"{CLASSES}:Stack"
RUN = ["--module.num_layers", "2", "--steps", "2"]
OK, PROBLEM, USAGE, REFUSED = range(4)


@pytest.fixture
def checkpoints(tmp_path):
    """A file, the folder that it becomes, one with a byte less, and text that is no checkpoint."""
    checkpoint = {"state_dict": {"w": torch.ones(3)}, "global_step": 3, "epoch": 1, "optimizer_states": []}
    torch.save(checkpoint, tmp_path / "one.ckpt")
    for name in ("model.ckpt", "damaged.ckpt"):
        to_folder(tmp_path / "one.ckpt", tmp_path / name)
    [file] = (tmp_path / "damaged.ckpt").glob("__0_*")
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    return tmp_path


def status_of(line):
    """The exit status of the process: argparse ends it by itself."""
    try:
        return main(line)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("command", ["explain", "plan", "dryrun", "verify"])
def test_unknown_precision(command, capsys):
    assert status_of([command, STACK, "--precision", "fp8"]) == USAGE
    error = capsys.readouterr().err
    assert "argument --precision: invalid choice: 'fp8'" in error and "'bf16-mixed'" in error


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (["inspect", "model.ckpt"], OK),
        (["inspect", "damaged.ckpt"], PROBLEM),
        (["inspect", "missing.ckpt"], USAGE),
        (["inspect"], USAGE),
        (["verify", "model.ckpt"], OK),
        (["verify", "damaged.ckpt"], PROBLEM),
        (["verify", "missing.ckpt"], USAGE),
        (["verify", "model.ckpt", "--unknown"], USAGE),
        (["convert", "model.ckpt", "new.ckpt"], OK),
        (["convert", "one.ckpt", "new.ckpt"], OK),
        (["convert", "damaged.ckpt", "new.ckpt"], PROBLEM),
        (["convert", "text.ckpt", "new.ckpt"], PROBLEM),
        (["convert", "model.ckpt", "text.ckpt/new.ckpt"], PROBLEM),
        (["convert", "missing.ckpt", "new.ckpt"], USAGE),
        (["convert", "model.ckpt", "one.ckpt"], USAGE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_checkpoint(line, status, checkpoints, monkeypatch, capsys):
    monkeypatch.chdir(checkpoints)
    assert status_of(["checkpoint", *line]) == status
    captured = capsys.readouterr()
    assert captured.out if status == OK else captured.out + captured.err


@pytest.mark.parametrize(("source", "kinds"), [("model.ckpt", ("folder", "file")), ("one.ckpt", ("file", "folder"))])
def test_json_of_a_conversion(source, kinds, checkpoints, monkeypatch, capsys):
    monkeypatch.chdir(checkpoints)
    assert main(["checkpoint", "convert", source, "new.ckpt", "--json"]) == OK
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["source"], report["target"]) == (source, "new.ckpt")
    assert (report["source_kind"], report["target_kind"]) == kinds
    assert (checkpoints / "new.ckpt").is_dir() == (kinds[1] == "folder") and "convert 1 of" in captured.err


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"], OK),
        (["schedule", "1f1b", "--ranks", "two", "--microbatches", "2"], USAGE),
        (["schedule", "no_schedule", "--ranks", "2", "--microbatches", "2"], USAGE),
        (["hardware", "list"], OK),
        (["hardware", "show", "missing"], USAGE),
        (["env"], OK),
        (["env", "word"], USAGE),
        (["explain", STACK], OK),
        (["explain", STACK, "--layout", "pp=30"], REFUSED),
        (["explain", STACK, "--layout", "pp=0"], USAGE),
        (["explain", "missing.py:Net"], USAGE),
        (["verify", STACK, "--layout", "pp=x"], USAGE),
        (["verify", STACK, "--config", "missing.yaml"], USAGE),
        (["no_command"], USAGE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_other_commands(line, status, capsys):
    assert status_of(line) == status
    captured = capsys.readouterr()
    assert bool(captured.out) == (status in (OK, REFUSED)) and bool(captured.err) >= (status == USAGE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "status", "out", "err"),
    [
        ([STACK, *RUN, "--layout", "pp=2"], OK, "same", ""),
        ([f"{CLASSES}:CountsRanks", "--steps", "2", "--layout", "dp=2"], PROBLEM, "different", ""),
        ([f"{CLASSES}:BrokenConstructor"], PROBLEM, "failed", "command_line_classes.py"),
        ([STACK, *RUN, "--layout", "pp=30,strict_layout=true", "--layout", "pp=2"], REFUSED, "refused", ""),
    ],
    ids=["same", "different", "raises", "refused"],
)
def test_verify(line, status, out, err, capsys):
    assert main(["verify", *line]) == status
    captured = capsys.readouterr()
    assert out in captured.out and err in captured.err and "verify 1 of" in captured.err


def examples():
    """The lines of each command's help that follow its word "example", each once."""
    found = {}
    script = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "command_line_page.py"))
    for parser in script["commands"](script["main_parser"]()):
        lines = parser.epilog.split("example:\n")[1].split("\n\n")[0].splitlines()
        assert lines and all(line.startswith(f"  {parser.prog.split()[0]} ") for line in lines), parser.prog
        for line in lines:
            is_slow = any(words in line for words in (" verify ", " explain ", " hardware measure "))
            found[line] = pytest.param(line.strip(), marks=[pytest.mark.slow] if is_slow else [], id=line.strip())
    return list(found.values())


@pytest.mark.sampled
@pytest.mark.parametrize("line", examples())
def test_examples_of_the_help(line, checkpoints, monkeypatch, capsys, tmp_path):
    program, *arguments = shlex.split(line)
    if "train.py" in line or "main.py" in line:  # of the user: a wheel has no examples
        config = "3d.yaml" if arguments[0] == "explain" else "pipeline.yaml"
        copies = {"train.py": "quickstart.py", "main.py": "gpt_cli.py", "gpt.py": "gpt.py"}
        for name, source in {**copies, "config.yaml": f"configs/{config}"}.items():
            shutil.copy(Path(__file__).parents[2] / "examples" / source, tmp_path / name)
        monkeypatch.chdir(tmp_path)
    if "config.json" in arguments:
        sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 1024}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 512, **sizes}))
        monkeypatch.chdir(tmp_path)
    if arguments[0] == "migrate":
        content = {"zero_optimization": {"stage": 2}} if arguments[1].endswith(".json") else {"fsdp_config": {}}
        path = (tmp_path / arguments[1].removeprefix("~/")).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
    if arguments[0] in ("checkpoint", "hardware"):
        monkeypatch.chdir(checkpoints)
        (checkpoints / "one.ckpt").unlink()
    assert program == "lightning-hybrid" and main(arguments) == OK
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", ["", "verify", "explain", "schedule", "hardware list", "env", "checkpoint convert"])
def test_help_has_an_example_and_the_exit_statuses(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert re.search(rf"example:\n  lightning-hybrid {command}", text) and "exit status: 0" in text


class Terminal:
    """Standard error that is a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_is_lines_without_a_terminal(capsys):
    with Progress("read") as progress:
        progress("a", 0, 2)
        progress("b", 1, 2)
    with Progress("read", interval=3600) as progress:
        progress("c", 0, 2)
        progress("d", 1, 2)
    captured = capsys.readouterr()
    assert (
        captured.err.splitlines() == ["read 1 of 2: a", "read 2 of 2: b", "read 1 of 2: c", "read 2 of 2: d"]
        and not captured.out
    )


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("read") as progress:
        progress("a", 0, 2)
        progress("b", 1, 2)
        assert "50%" in sys.stderr.text and "b" in sys.stderr.text and "\n" not in sys.stderr.text


def test_phases_are_lines_with_the_seconds_so_far(capsys):
    with Progress("verify") as progress:
        progress.phase("importing")
        progress.start("pp=2", 1, 3)
        progress.phase("one process")
    lines = capsys.readouterr().err.splitlines()
    heads = [re.sub(r"\d+\.\d s", "N s", line) for line in lines]
    assert heads == [
        "verify: importing (after N s)",
        "verify 2 of 3: pp=2: one process (after N s)",
        "verify: ended after N s",
    ]


def test_phases_are_one_line_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("verify") as progress:
        progress.start("pp=2", 1, 3)
        progress.phase("one process")
        assert "33%" in sys.stderr.text and "pp=2: one process" in sys.stderr.text and "\n" not in sys.stderr.text


@pytest.mark.parametrize("command", ["inspect", "schedule"])
def test_a_reader_that_ends_first_is_no_error(tmp_path, command):
    """As with ``| head``; the first command prints more than a buffer, the second less."""
    arguments = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"]
    if command == "inspect":
        torch.save({"state_dict": {f"layers.{n}.weight": torch.ones(1) for n in range(500)}}, tmp_path / "model.ckpt")
        arguments = ["checkpoint", "inspect", str(tmp_path / "model.ckpt")]
    reader, writer = os.pipe()
    os.close(reader)
    run = [sys.executable, "-m", "lightning_hybrid.cli", *arguments]
    ended = subprocess.run(run, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
