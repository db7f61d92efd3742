"""The callbacks for slow links from LightningCLI's YAML, and the program that shows them."""

import sys
from unittest import mock

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

from harness.example_programs import run_example
from lightning_hybrid.callbacks import GradientCompression, LocalSGD
from models.regression import Plain

YAML = """
seed_everything: 7
trainer:
  accelerator: cpu
  logger: false
  callbacks:
    - class_path: lightning_hybrid.callbacks.{callback}
      init_args: {arguments}
"""


@pytest.fixture
def callback_of(tmp_path):
    """Returns the callback of a class that LightningCLI makes with some arguments."""

    def make(kind, arguments):
        path = tmp_path / "slow.yaml"
        path.write_text(YAML.format(callback=kind.__name__, arguments=arguments))
        with mock.patch.object(sys, "argv", ["fit.py", "--config", str(path)]):
            cli = LightningCLI(Plain, run=False, save_config_callback=None)
        return next(callback for callback in cli.trainer.callbacks if isinstance(callback, kind))

    return make


def test_compression_from_yaml(callback_of):
    callback = callback_of(GradientCompression, "{method: topk, ratio: 0.1}")
    assert (callback.method, callback.ratio, callback.start_step) == ("topk", 0.1, 0)


def test_outer_optimizers_from_yaml(callback_of):
    parameter = nn.Parameter(torch.zeros(2))
    callback = callback_of(LocalSGD, "{every: 5, outer_optimizer: nesterov}")
    assert callback.every == 5 and callback.make_outer_optimizer([parameter]).defaults["lr"] == 0.7
    own = "{class_path: torch.optim.SGD, init_args: {lr: 0.5, momentum: 0.9}}"
    outer = callback_of(LocalSGD, f"{{every: 6, outer_optimizer: {own}}}").make_outer_optimizer([parameter])
    assert type(outer) is torch.optim.SGD and outer.defaults["lr"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ratio"), [(["--compression", "powersgd"], 3), (["--every", "2", "--outer", "nesterov"], 2)], ids=str
)
def test_example_counts_bytes(tmp_path, monkeypatch, flags, ratio):
    small = ["--steps", "4", "--width", "32", "--layers", "1", "--length", "32"]
    output = run_example(monkeypatch, tmp_path, "slow_link.py", *small, *flags)
    [line] = [line for line in output.splitlines() if line.startswith("ratio")]
    assert float(line.split()[1]) >= ratio
    assert "validation loss" in output
