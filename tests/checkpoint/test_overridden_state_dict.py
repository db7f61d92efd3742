"""A module's own `state_dict` and `load_state_dict` decide what its checkpoints hold, inside of a fit and after it."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from lightning_hybrid.checkpoint.read import SavedFolder
from models.regression import FEATURES, Regression, regression_data


class LeavesOut(Regression):
    """Leaves the frozen encoder out."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.strict_loading = False

    def forward(self, x):
        return super().forward(self.encoder(x))

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("encoder.")}


class Renames(Regression):
    def state_dict(self, *args, **kwargs):
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict({name.removeprefix("net."): value for name, value in state.items()}, strict)


def add_sum(module, state, prefix, metadata):
    state["sum"] = state["layers.1.0.weight"].sum()


class Adds(Regression):
    """Adds what it computes of a parameter, by its method and by a hook."""

    def __init__(self):
        super().__init__()
        self.strict_loading = False
        self.register_state_dict_post_hook(add_sum)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {**state, "scaled": 2 * state["layers.0.0.weight"]}


class SavesInside(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if self.path is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path / "inside")


def fit(module, size, options, path, resume=None):
    ignore_warnings()
    torch.manual_seed(0)
    model = module().double()
    trainer = trainer_of(size, strategy_options=options, callbacks=[SavesInside(path)], max_epochs=2)
    trainer.fit(model, regression_data()["val_dataloaders"], ckpt_path=resume)
    if path is not None:
        trainer.save_checkpoint(path / "after")
    return weights_of(model)


def saved_by(path):
    checkpoint = SavedFolder(path).checkpoint() if path.is_dir() else torch.load(path, weights_only=False)
    return checkpoint["state_dict"]


FOLDERS = {"save_distributed_checkpoint": True}
PP2, TP2 = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (LeavesOut, PP2),
        (LeavesOut, {**TP2, **FOLDERS}),
        (Adds, TP2),
        pytest.param(LeavesOut, TP2, marks=pytest.mark.slow),
        pytest.param(Renames, PP2, marks=pytest.mark.slow),
        pytest.param(Renames, {**PP2, **FOLDERS}, marks=pytest.mark.slow),
        pytest.param(Adds, PP2, marks=pytest.mark.slow),
    ],
)
def test_saved_and_resumed(worlds, tmp_path, module, options):
    for name in ("plain", "own"):
        (tmp_path / name).mkdir()
    [expected] = worlds.run(1, fit, module, 1, {}, tmp_path / "plain")
    worlds.run(2, fit, module, 2, options, tmp_path / "own")
    for when in ("inside", "after"):
        assert_same(saved_by(tmp_path / "own" / when), saved_by(tmp_path / "plain" / when))
    for weights in worlds.run(2, fit, module, 2, options, None, tmp_path / "own" / "inside"):
        assert_same(weights, expected)
