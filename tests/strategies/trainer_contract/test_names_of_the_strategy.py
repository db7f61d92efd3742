"""The strategy by its names: in LightningCLI's files, in the registry, and as public classes."""

import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_hybrid
from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.callbacks import GradientCompression
from models.tiny import Samples, Tiny

CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_hybrid.Hybrid3DStrategy
    init_args:
      pipeline_parallel_size: 2
      num_microbatches: 4
      tensor_parallel_plan:
        "layers.*.0": colwise
model:
  layers: 3
"""


class WithData(Tiny):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(Samples(), batch_size=8)


def run_cli(config):
    ignore_warnings()
    cli = LightningCLI(WithData, args=["fit", "--config", config], save_config_callback=None)
    strategy = cli.trainer.strategy
    return type(strategy).__name__, strategy.layout.pipeline_parallel_size, weights_of(cli.model)


def run_fit(layers):
    ignore_warnings()
    model = WithData(layers)
    trainer_of(1, 1).fit(model)
    return weights_of(model)


def test_cli_names_the_strategy_by_class_path(worlds, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    [expected] = worlds.run(1, run_fit, 3)
    for name, stages, weights in worlds.run(2, run_cli, str(config)):
        assert (name, stages) == ("Hybrid3DStrategy", 2)
        assert_same(weights, expected)


def test_cli_names_the_strategy_by_its_registered_name(worlds, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.split("  strategy:")[0] + "  strategy: hybrid3d\n")
    for name, stages, _ in worlds.run(2, run_cli, str(config)):
        assert (name, stages) == ("Hybrid3DStrategy", 1)


@pytest.mark.parametrize(
    "imports",
    [
        # Also in tests/test_namespace.py, where the other namespace is missing.
        pytest.param("import lightning_hybrid, lightning.pytorch as pl", marks=pytest.mark.slow),
        # The order of every rank of these tests: the server that they are forked from has Lightning loaded.
        pytest.param("import lightning.pytorch as pl, lightning_hybrid", marks=pytest.mark.slow),
    ],
)
def test_strategy_is_registered_in_any_import_order(imports):
    code = f"{imports}; print(type(pl.Trainer(accelerator='cpu', devices=1, strategy='hybrid3d').strategy).__name__)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert "Hybrid3DStrategy" in done.stdout, done.stderr


def test_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="strategy='hybrid3d_pp2'") as error:
        Trainer(strategy="hybrid3d_pp2")
    message = str(error.value)
    assert "one of hybrid3d, hybrid3d_fork, " in message and "Hybrid3DStrategy(pipeline_parallel_size=2)" in message
    assert "ddp" not in message  # Lightning's own names
    with pytest.raises(ValueError, match="strategy='ddpp'") as error:
        Trainer(strategy="ddpp")
    assert "hybrid3d" not in str(error.value)


def test_public_names():
    assert lightning_hybrid.Hybrid3DStrategy.strategy_name == "hybrid3d"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "hybird3d"}, "did you mean 'hybrid3d'?"),
        ({"strategy": "hybrid3d_zero4"}, "did you mean 'hybrid3d_zero3'?"),
        ({"strategy": "hybrid3d", "precision": "bf16-mix"}, "did you mean 'bf16-mixed'?"),
        ({"strategy": lightning_hybrid.Hybrid3DStrategy(), "precision": "fp16"}, "set precision to one of 32-true,"),
    ],
    ids=["letters swapped", "another number", "precision", "precision of another library"],
)
def test_errors_of_lightning_name_the_nearest(arguments, words):
    with pytest.raises(ValueError, match=r"hybrid|Precision") as caught:
        Trainer(accelerator="cpu", devices=2, logger=False, **arguments)
    assert words in str(caught.value) and "Allowed" not in str(caught.value)


def test_names_of_others_are_left_to_lightning():
    for arguments in {"strategy": "dpp"}, {"precision": "bf16-mix"}:
        with pytest.raises(ValueError, match=r"dpp|bf16-mix") as caught:
            Trainer(accelerator="cpu", devices=2, logger=False, **arguments)
        assert "hybrid" not in str(caught.value) and "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ({"strategy": Hybrid3DStrategy}, "give the strategy an object, not its class: strategy=Hybrid3DStrategy()"),
        ({"strategy": "hybrid"}, "did you mean 'hybrid3d'?"),
        ({"strategy": "hybrid3d(pipeline_parallel_size=2)"}, "strategy=Hybrid3DStrategy(pipeline_parallel_size=2)"),
        ({"plugins": [Hybrid3DStrategy(zero_stage=1)]}, "pass it as strategy=Hybrid3DStrategy(...)"),
        ({"pipeline_parallel_size": 2}, "set it in the strategy: strategy=Hybrid3DStrategy(pipeline_parallel_size=2)"),
        ({"strategy": "hybrid3d", "zero_stge": 3}, "argument 'zero_stge'; did you mean 'zero_stage'?"),
        (
            {"strategy": "hybrid3d", "precision": "bf16-true", "plugins": [HybridPrecision("16-true")]},
            "; delete precision='bf16-true' to train as the plugin says, or the plugin to train in bf16-true",
        ),
        (
            {"strategy": "hybrid3d", "callbacks": [GradientCompression("fp16"), GradientCompression("bf16")]},
            "type `GradientCompression`; leave one of them out",
        ),
    ],
)
def test_errors_of_the_trainer_end_with_what_was_meant(arguments, meant):
    with pytest.raises((ValueError, TypeError, RuntimeError, MisconfigurationException)) as caught:
        Trainer(accelerator="cpu", devices=2, **arguments)
    assert meant in str(caught.value)
    files = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[0] == Path(__file__).name and {*files[1:]} == {"namespace.py", "registration.py"}


def test_unknown_arguments_of_other_trainers_are_left_to_python():
    for arguments in {"strategy": "ddp", "zero_stage": 3}, {"nosuch": 1}:
        with pytest.raises(TypeError, match=r"argument '\w+'$"):
            Trainer(accelerator="cpu", devices=2, logger=False, **arguments)
