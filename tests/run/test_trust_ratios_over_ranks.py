"""LAMB and LARS over ranks that hold shards: norms count each element once, one message per step, and YAML."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from harness.fits import Run, check, fit
from lightning_hybrid.optim import LAMB
from models.cases import Samples
from models.full_parameter_optimizers import ByLamb
from models.hand_written import Layers
from models.mixtures import Mixtral


def by_lamb(module):
    module.configure_optimizers = lambda: LAMB(module.parameters(), lr=1e-2, weight_decay=0.1)


RUNS = {
    "key heads that two ranks hold": Run("Llama", tp=2, microbatches=1, change=by_lamb),
    "copies of shards": Run("Layers", dp=4, change=by_lamb, strategy={"zero_stage": 3, "shard_size": 2}),
    "stages, clipped": Run("Layers", pp=2, change=by_lamb, trainer={"gradient_clip_val": 0.05}),
    "offloaded": Run("Layers", dp=2, change=by_lamb, strategy={"zero_stage": 2, "offload": "cpu"}),
    "experts": Run(Mixtral, dp=2, ep=2, microbatches=1, change=by_lamb),
}


@pytest.mark.parametrize(
    "name", [n if n == "copies of shards" else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_each_element_counts_once(worlds, name):
    check(worlds, RUNS[name], timeout=300)


class CountsReductions(Callback):
    """Elements of each all-reduce in the last step of the optimizer."""

    def on_train_start(self, trainer, pl_module):
        trainer.optimizers[0].register_step_post_hook(lambda *_: setattr(dist, "all_reduce", self.original))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.recorded, self.original = [], dist.all_reduce
        dist.all_reduce = self.counted

    def counted(self, tensor, *args, **kwargs):
        self.recorded.append(tensor.numel())
        return self.original(tensor, *args, **kwargs)


def test_one_message_of_two_numbers_per_parameter(worlds):
    for rank in worlds.run(2, fit, Run(ByLamb, tp=2, callback=CountsReductions)):
        assert rank.extra == [2 * 17]


# --- LightningCLI ----------------------------------------------------------------------------------------------------


class Unconfigured(Layers):
    """LightningCLI gives it the optimizer of the YAML."""

    configure_optimizers = LightningModule.configure_optimizers


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Samples("vectors", 12, torch.float64), batch_size=4)


TRAINER = """
seed_everything: 0
trainer:
  accelerator: cpu
  devices: {devices}
  precision: 64-true
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  {strategy}
"""
TENSOR = """strategy:
    class_path: lightning_hybrid.Hybrid3DStrategy
    init_args:
      tensor_parallel_size: 2"""
OPTIMIZERS = {
    "lars": "optimizer: lightning_hybrid.optim.LARS\n",
    "lamb": "optimizer:\n  class_path: lightning_hybrid.optim.LAMB\n  init_args: {lr: 0.01, weight_decay: 0.1}\n",
}


def fit_by_yaml(path):
    cli = LightningCLI(Unconfigured, Data, args=["fit", "--config", path], save_config_callback=None)
    state = {name: value.clone() for name, value in cli.model.state_dict().items()}
    return type(cli.trainer.optimizers[0]).__name__, state


@pytest.mark.parametrize("optimizer", [pytest.param("lars", marks=pytest.mark.slow), "lamb"])
def test_yaml(worlds, tmp_path, optimizer):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(TRAINER.format(devices=1, strategy="") + OPTIMIZERS[optimizer])
    two.write_text(TRAINER.format(devices=2, strategy=TENSOR) + OPTIMIZERS[optimizer])
    [(name, expected)] = worlds.run(1, fit_by_yaml, str(one))
    assert name == optimizer.upper()
    for name, state in worlds.run(2, fit_by_yaml, str(two)):
        assert name == optimizer.upper() and state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)
