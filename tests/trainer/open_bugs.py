"""Tests that do not pass yet; not collected by default. Run: pytest tests/trainer/open_bugs.py"""

import pytest
from lightning.pytorch import seed_everything
from lightning_runs import ignore_warnings, trainer_of
from test_loaders import Augmented, SeesNoise
from torch.utils.data import DataLoader


def run_augmented(size, pp, workers, seed_workers):
    ignore_warnings()
    seed_everything(7, workers=seed_workers, verbose=False)
    model = SeesNoise()
    trainer_of(size, pp, max_epochs=2).fit(model, DataLoader(Augmented(), batch_size=8, num_workers=workers))
    return model.noise


# All ranks wait for their loader workers, which never reach worker_init_fn. Without seed_everything, and with two ranks
# that ran other tests before, the same loader works (test_loaders.py, kind "workers"). The world or the package?
@pytest.mark.parametrize("seed_workers", [False, True])
def test_random_augmentation_in_workers_is_alike_within_a_replica(worlds, seed_workers):
    results = worlds.run(4, run_augmented, 4, 2, 2, seed_workers)
    assert results[0] == results[2] and results[1] == results[3]
    if seed_workers:
        assert results[0] != results[1]
