"""Steps that write into their batch, in some batches."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.tiny import Tiny, loader


class CutMix(Tiny):
    """As published: a region of some batches is overwritten by that of other samples."""

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["y"]
        if np.random.rand() < 0.5:
            index, share = torch.randperm(len(x)), np.random.beta(1, 1)
            x[:, :2] = x[index, :2]
            out = self(x)
            return share * F.mse_loss(out, y) + (1 - share) * F.mse_loss(out, y[index])
        return F.mse_loss(self(x), y)


def mixed(size, pp, options):
    ignore_warnings()
    model = CutMix()
    trainer_of(size, pp, strategy_options=options, max_epochs=3).fit(model, loader(4, 16))
    return weights_of(model)


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_step_that_writes_into_some_batches(worlds, stages_per_rank):
    [expected] = worlds.run(1, mixed, 1, 1, {"num_microbatches": 2})
    for weights in worlds.run(2, mixed, 2, 2, {"num_microbatches": 2, "stages_per_rank": stages_per_rank}):
        assert_same(weights, expected)
