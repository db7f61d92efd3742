"""Classes by their paths, and their arguments as jsonargparse spells them."""

import pytest

from lightning_hybrid.cli import main
from lightning_hybrid.cli.class_targets import Target, arguments_of, split_class_flags, targets, value_of
from lightning_hybrid.cli.exit_status import UsageError

CLASSES = "tests/models/command_line_classes.py"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("false", False), ("true", True), ("null", None), ("None", None), ("True", True)),
        *(("3", 3), ("-3", -3), ("1e-3", 1e-3), ("gelu", "gelu"), ("07", "07"), ("", ""), ('"3"', "3")),
        *(("[1, null]", [1, None]), ("[a, b]", ["a", "b"]), ("{a: 1}", {"a": 1}), ("['a']", ["a"]), ("[a", "[a")),
        *(("(1, 2)", (1, 2)), ("path/to.csv", "path/to.csv")),
    ],
)
def test_values_follow_jsonargparse(text, value):
    assert value_of(text) == value and type(value_of(text)) is type(value)


def test_class_flags_may_stand_anywhere():
    line = ["verify", "--module.depth", "-3", "x:Y", "--data.flag=false", "--json", "--module.rate=1e-3"]
    others, flags = split_class_flags(line)
    assert others == ["verify", "x:Y", "--json"]
    assert arguments_of(flags) == ({"depth": -3, "rate": 1e-3}, {"flag": False})


@pytest.mark.parametrize("flags", [["--module.a"], ["--module.a", "--module.b", "1"], ["--other.a", "1"], ["word"]])
def test_invalid_flags(flags):
    with pytest.raises(UsageError):
        arguments_of(flags)


def test_target_is_called_with_its_arguments():
    assert Target("fractions:Fraction", {"numerator": 3})() == 3
    module, data = targets(f"{CLASSES}:Stack", None, ["--module.flag", "false", "--module.name", "null"])
    assert data is None and (module().flag, module().name) == (False, None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["x:Y", "--modul.width", "8"], "--modul.width"),
        (["nothing"], "names no class"),
        (["no_such_module:Y"], "no_such_module"),
        ([f"{CLASSES}:Stak"], "nearest: Stack"),
        (["examples/missing.py:X"], "there is no file"),
        ([f"{CLASSES}:Stack", "--module.num_layer", "2"], "it has num_layers"),
        ([f"{CLASSES}:Stack", "--data.a", "1"], "without --data"),
        (["x:Y", "--layout", "pp"], "name=value"),
        (["x:Y", "--layout", "xx=2"], "'xx' is no option of the strategy"),
        (["x:Y", "--layout", "zero_stag=2"], "nearest: ['zero_stage'"),
        (["x:Y", "--layout", "schedule=none"], "schedule='none' is unknown"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "explain"])
def test_invalid_command_lines(command, arguments, text, capsys):
    assert main([command, *arguments]) == 2
    assert text in capsys.readouterr().err


def test_errors_of_imported_code_are_raised(tmp_path):
    (tmp_path / "imports_what_is_missing.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        main(["explain", f"{tmp_path}/imports_what_is_missing.py:Net"])
    (tmp_path / "raises_when_imported.py").write_text("raise ValueError('the user\\'s own')\n")
    with pytest.raises(ValueError, match="the user's own"):
        main(["verify", f"{tmp_path}/raises_when_imported.py:Net"])


@pytest.mark.parametrize("arguments", [["env", "--module.a", "1"], ["env", "--nothing"], ["env", "word"]])
def test_other_commands_take_no_arguments_of_classes(arguments, capsys):
    assert main(arguments) == 2
    assert "unknown argument" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("lightning-hybrid ")


@pytest.mark.parametrize(
    "command",
    [
        ["verify"],
        ["explain"],
        ["schedule"],
        ["env"],
        ["checkpoint"],
        *(["checkpoint", a] for a in ("inspect", "verify")),
    ],
)
def test_help_has_an_example_and_the_exit_statuses(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert f"lightning-hybrid {' '.join(command)}" in text.split("example:")[1] and "exit status: 0" in text
