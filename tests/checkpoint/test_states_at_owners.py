"""Optimizer states that are full on one rank: saved under one layout, resumed under others, in files and folders."""

import pytest
import torch

from harness.checkpoint_runs import (
    DP2PP2,
    PLAIN,
    PP1,
    PP2TP2,
    TP2,
    ZERO,
    Layout,
    assert_same_state,
    folders,
    loader_of,
    states_of,
)
from harness.fits import trainer_of
from models.cases import make
from models.full_parameter_optimizers import MODULES

ZERO_TP2 = Layout(1, dp=2, tp=2, options=(("zero_stage", 2),))
COPIES = Layout(1, dp=4, options=(("zero_stage", 3), ("shard_size", 2)))


def train(optimizer, layout, max_epochs, resume=None, save=None):
    """Fit, two batches of 8 samples over all replicas per epoch; the state of the module."""
    module = make(MODULES[optimizer])
    trainer = trainer_of(layout.world_size, layout.strategy(), [], max_epochs=max_epochs)
    trainer.fit(module, loader_of(module, layout, trainer), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value in module.state_dict().items()}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("optimizer", "saving", "loading"),
    [
        ("adafactor", folders(ZERO_TP2), [PP2TP2, PP1]),
        slow("adafactor", ZERO_TP2, [folders(PP2TP2), ZERO]),
        slow("muon", ZERO_TP2, [PP2TP2, PLAIN]),
        slow("muon", folders(COPIES), [TP2, PP1]),
        slow("muon", folders(PP2TP2), [ZERO_TP2, DP2PP2]),
        slow("muon", PLAIN, [ZERO_TP2, PP2TP2, COPIES]),
        slow("lamb", folders(ZERO_TP2), [PP2TP2, PP1]),
        slow("lars", ZERO_TP2, [PP2TP2, PLAIN]),
    ],
)
def test_resumed_by_other_layouts(worlds, tmp_path, optimizer, saving, loading):
    path, plain = tmp_path / "half.ckpt", tmp_path / "plain.ckpt"
    [expected] = worlds.run(1, train, optimizer, PLAIN, 2)
    worlds.run(1, train, optimizer, PLAIN, 1, None, str(plain))
    worlds.run(saving.world_size, train, optimizer, saving, 1, None, str(path), timeout=300)
    saved, of_one_process = states_of(path), states_of(plain)
    assert saved.keys() == of_one_process.keys()
    for number, entry in of_one_process.items():
        assert entry.keys() == saved[number].keys()
        for key, value in entry.items():
            torch.testing.assert_close(saved[number][key], value, rtol=1e-8, atol=1e-12)
    for layout in loading:
        for state in worlds.run(layout.world_size, train, optimizer, layout, 2, str(path), timeout=300):
            assert_same_state(state, expected)
