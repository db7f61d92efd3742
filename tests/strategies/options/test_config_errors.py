"""Errors of jsonargparse on the strategy of a config name the option that was meant."""

import subprocess
import sys

import jsonargparse
import pytest
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


def test_misspelt_option_gets_the_nearest_names(capsys, tmp_path):
    config = tmp_path / "config.yaml"
    option = "pipeline_paralel_size: 2"
    config.write_text(f"trainer:\n  strategy:\n    class_path: {CLASS}\n    init_args:\n      {option}\n")
    text = errors_of(capsys, f"--config={config}")
    assert "no option 'pipeline_paralel_size'; did you mean pipeline_parallel_size" in text, text
    text = errors_of(capsys, f"--trainer.strategy={CLASS}", "--trainer.strategy.zero_stag=3")
    assert "did you mean zero_stage" in text, text


def test_options_of_a_name_get_the_class(capsys):
    text = errors_of(capsys, "--trainer.strategy=hybrid3d", "--trainer.strategy.zero_stage=3")
    assert f"--trainer.strategy {CLASS} --trainer.strategy.zero_stage 3" in text, text
    text = errors_of(capsys, "--trainer.strategy.zero_stag=3")
    assert f"'auto' is a name without options; name the class: --trainer.strategy {CLASS}" in text, text
    assert text.rstrip().endswith("--trainer.strategy.zero_stage 3"), text


def test_order_of_imports_does_not_matter():
    lines = "from lightning_hybrid import Hybrid3DStrategy", "from jsonargparse import ArgumentParser"
    for order in (lines, lines[::-1]):
        source = "\n".join(("import sys", *order, "ArgumentParser().error(sys.argv[1])"))
        message = "Problem with Hybrid3DStrategy: Option 'zero_stag' is not accepted"
        result = subprocess.run([sys.executable, "-c", source, message], capture_output=True, text=True, check=False)
        assert "did you mean zero_stage" in result.stderr, result.stderr


def test_other_errors_have_no_hint():
    assert hint("Option 'lr' is not accepted") == ""
