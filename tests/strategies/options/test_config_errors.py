"""Errors of jsonargparse on the strategy of a config name the option that was meant."""

import subprocess
import sys

import jsonargparse
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_hybrid.strategies.options.config_errors import hint, hint_at_options
from models.tiny import Tiny

CLASS = "lightning_hybrid.Hybrid3DStrategy"


def errors_of(capsys, *arguments):
    hint_at_options(jsonargparse)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", ["train.py"])  # Lightning warns of two command lines
        LightningCLI(Tiny, args=list(arguments), run=False, save_config_callback=None)
    return capsys.readouterr().err


def errors_of_config(capsys, folder, config):
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": config}, sort_keys=False))
    text = errors_of(capsys, f"--config={folder}/config.yaml", "--seed_everything=false")
    assert text.startswith("error: ") and "usage" not in text and len(text.splitlines()) <= 4, text
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"strategy": {"class_path": CLASS, "init_args": {"zero_stge": 3}}},
            "config.yaml, line 5: the strategy has no option 'zero_stge'; did you mean 'zero_stage'?",
        ),
        (
            {"strategy": {"class_path": CLASS, "zero_stage": 3}},
            "config.yaml, line 4: put zero_stage under init_args of the strategy, beside class_path: " + CLASS,
        ),
        (
            {"strategy": {"class_path": CLASS, "init_args": {"fsdp_sharding_strategy": "NO_SHARD"}}},
            "line 5: fsdp_sharding_strategy='NO_SHARD' is a keyword of accelerate: set zero_stage=3",
        ),
        (
            {"strategy": {"class_path": CLASS, "init_args": {"pipeline_parallel_size": "two"}}},
            "line 5: Hybrid3DStrategy(pipeline_parallel_size=two): use a whole number or 'auto'",
        ),
        (
            {"strategy": {"class_path": CLASS, "init_args": {"schedule": "2F2B"}}},
            "line 5: schedule='2F2B' is unknown; use one of gpipe, 1f1b",
        ),
        (
            {"strategy": {"class_path": "lightning_hybrid.Hybrid3DStratgy"}},
            f"line 3: there is no class lightning_hybrid.Hybrid3DStratgy; did you mean '{CLASS}'?",
        ),
        (
            {"strategy": {"class_path": "Hybrid3DStratgy"}},
            f"line 3: there is no class Hybrid3DStratgy; did you mean '{CLASS}'?",
        ),
        (
            {"strategy": {"class_path": "hybrid3d", "init_args": {"zero_stage": 1}}},
            f"line 3: 'hybrid3d' is a name without options; use class_path: {CLASS}",
        ),
        (
            {"callbacks": [{"class_path": "lightning_hybrid.callbacks.ThroughputMonitr"}]},
            "line 3: there is no class lightning_hybrid.callbacks.ThroughputMonitr; did you mean"
            " 'lightning_hybrid.callbacks.ThroughputMonitor'?",
        ),
        (
            {"callbacks": [{"class_path": "lightning_hybrid.callbacks.ThroughputMonitor", "init_args": {"windw": 3}}]},
            "line 5: ThroughputMonitor has no argument 'windw'; did you mean 'window_size'?",
        ),
        (
            {"plugins": [{"class_path": "lightning_hybrid.HybridPrecision", "init_args": {"precison": "32-true"}}]},
            "line 5: HybridPrecision has no argument 'precison'; did you mean 'precision'?",
        ),
        (
            {"strategy": {"class_path": CLASS, "init_args": {"precision_plugin": "16-true"}}},
            "line 5: Hybrid3DStrategy(precision_plugin=16-true): use a class_path with init_args or null",
        ),
        (
            {"precision": "bf16-mxed"},
            "line 2: trainer.precision=bf16-mxed: use one of 32-true, bf16-mixed, bf16-true, 16-mixed, 16-true,"
            " 64-true; did you mean 'bf16-mixed'?",
        ),
        (
            {"zero_stage": 1},
            "line 2: zero_stage is an option of the strategy, not of the Trainer: set trainer.strategy.class_path:"
            f" {CLASS} and trainer.strategy.init_args.zero_stage",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_of_a_config_is_one_line_with_its_place_and_the_nearest_names(capsys, tmp_path, config, message):
    text = errors_of_config(capsys, tmp_path, config)
    assert message in text, text


def test_an_option_of_the_command_line(capsys):
    text = errors_of(capsys, f"--trainer.strategy={CLASS}", "--trainer.strategy.zero_stag=3")
    assert text == "error: the strategy has no option 'zero_stag'; did you mean 'zero_stage'?\n"


def test_options_of_a_name_get_the_class(capsys):
    text = " ".join(errors_of(capsys, "--trainer.strategy=hybrid3d", "--trainer.strategy.zero_stage=3").split())
    assert text.endswith(f"use --trainer.strategy {CLASS} --trainer.strategy.zero_stage 3"), text
    text = " ".join(errors_of(capsys, "--trainer.strategy.zero_stag=3").split())
    assert f"'auto' is a name without options; use --trainer.strategy {CLASS}" in text, text
    assert text.endswith("--trainer.strategy.zero_stage 3"), text


def test_order_of_imports_does_not_matter():
    lines = "from lightning_hybrid import Hybrid3DStrategy", "from jsonargparse import ArgumentParser"
    for order in (lines, lines[::-1]):
        source = "\n".join(("import sys", *order, "ArgumentParser().error(sys.argv[1])"))
        message = f"Problem with given class_path '{CLASS}':\n    Option 'zero_stag' is not accepted"
        result = subprocess.run([sys.executable, "-c", source, message], capture_output=True, text=True, check=False)
        assert "did you mean 'zero_stage'" in result.stderr, result.stderr


def test_other_errors_are_left_as_they_are(capsys):
    assert not hint("Option 'lr' is not accepted")
    assert "usage: " in errors_of(capsys, "--trainer.max_epchs=3")
