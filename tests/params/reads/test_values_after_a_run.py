"""Tensors that hooks compute from parameters are plain tensors: in pickles inside of a fit, in files, and after it."""

import copy
import io

import pytest
import torch
from lightning.pytorch import Callback

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of
from models.regression import Regression, regression_data

OPTIONS = {"pp2": {"pipeline_parallel_size": 2}, "tp2 x pp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}}


class Shadow(Callback):
    """Keeps averages and norms, as an EMA does, and pickles them inside of a hook."""

    def __init__(self):
        self.values = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, p in pl_module.named_parameters():
            self.values[name] = p.detach().clone() if name not in self.values else 0.9 * self.values[name] + 0.1 * p
        self.values["norm"] = torch.stack([p.norm() for p in pl_module.parameters()]).norm()
        stream = io.BytesIO()
        torch.save({**self.values, **{f"copy of {name}": v for name, v in copy.deepcopy(self.values).items()}}, stream)
        self.pickled = stream.getvalue()

    def state_dict(self):
        return self.values


def fit(size, options, path):
    ignore_warnings()
    torch.manual_seed(0)
    model, shadow = Regression().double(), Shadow()
    trainer = trainer_of(size, strategy_options=options, callbacks=[shadow], max_steps=2)
    trainer.fit(model, regression_data()["val_dataloaders"])
    trainer.save_checkpoint(path)
    assert not [name for value in shadow.values.values() for name in vars(value)]
    return torch.load(io.BytesIO(shadow.pickled), weights_only=True)


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2 x pp2", marks=pytest.mark.slow)])
def test_plain_tensors(worlds, tmp_path, layout):
    [expected] = worlds.run(1, fit, 1, {}, tmp_path / "plain.ckpt")
    size = 2 ** len(OPTIONS[layout])
    for pickled in worlds.run(size, fit, size, OPTIONS[layout], tmp_path / "one.ckpt"):
        assert_same(pickled, expected)
    plain, saved = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["callbacks"] for name in ("plain", "one"))
    assert_same(saved["Shadow"], plain["Shadow"])
