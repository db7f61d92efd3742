"""Checkpoints that a step itself writes: once per batch, with the weights of one process, and none of a recording."""

import pytest
import torch
from torch.nn import functional as F

from harness.stored_values import StoresValues, assert_equal, run
from harness.worlds.worlds_plugin import RankError


class Saves(StoresValues):
    """At the end of its first step, and in a validation step."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def save(self, name):
        self.trainer.save_checkpoint(f"{self.folder}/{name}-{self.global_step}.ckpt")

    def store(self, loss, out, batch, batch_idx):
        self.save("training")

    def validation_step(self, batch, batch_idx):
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]))
        self.save("validation")


class SavesManually(Saves):
    """Between two steps of its optimizer."""

    def __init__(self, folder):
        super().__init__(folder)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
            optimizer.step()
            self.save("training")


def run_in(folder, make, size, options):
    folder.mkdir(exist_ok=True)
    run(lambda: make(folder), size, dict(options), steps=2)


def saved(folder):
    found = {}
    for path in sorted(folder.iterdir()):
        content = torch.load(path, weights_only=False)
        weights = {name: tensor.tolist() for name, tensor in content["state_dict"].items()}
        found[path.name] = content["global_step"], weights
    return {name: list(each) for name, each in found.items()}


LAYOUTS = {
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "tp2": {"tensor_parallel_size": 2, "num_microbatches": 2},
    "zero3": {"zero_stage": 3},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [Saves, SavesManually])
def test_checkpoints_of_a_step(worlds, tmp_path, make, layout):
    run_in(tmp_path / "plain", make, 1, {})
    expected = saved(tmp_path / "plain")
    worlds.run(2, run_in, tmp_path / "ranks", make, 2, LAYOUTS[layout], timeout=60)
    found = saved(tmp_path / "ranks")
    if layout == "zero3":  # its ranks train on other batches
        assert found.keys() == expected.keys()
    else:
        assert_equal(found, expected)


def test_a_step_in_the_backward_comes_too_early(worlds, tmp_path):
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2, "optimizer_in_backward": True}
    with pytest.raises(RankError) as error:
        worlds.run(2, run_in, tmp_path / "ranks", Saves, 2, options, timeout=60)
    assert str(error.value).count("explain-error save-in-step") == 2  # on both ranks
