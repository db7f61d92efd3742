"""Blocks that are recomputed as one, whose parts ZeRO gathers and frees one by one."""

import pytest
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zero.test_recomputed_layers import BY_LAYER, CountsFullLayers

from harness.fits import Run, fit
from models.hand_written import WIDTH, Lit, mlp


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(mlp() for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


class Nested(Lit):
    """Two lists, one inside of the other."""

    by_user = False

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Parts() for _ in range(3)), nn.Linear(WIDTH, 4)

    def loss(self, batch):
        x = batch["x"]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_user else block(x)
        return F.cross_entropy(self.head(x), batch["label"])


class ByUser(Nested):
    by_user = True


@pytest.mark.parametrize(("case", "recompute", "most"), [(Nested, [Parts], 3), (ByUser, None, 3), (Nested, "full", 2)])
def test_parts_are_gathered_twice(worlds, case, recompute, most):
    """For the forward and for the recomputation, after which they stay until the backward has left them."""
    strategy = {**BY_LAYER, "recompute": recompute}
    run = Run(case, dp=2, num_batches=2, strategy=strategy, callback=CountsFullLayers)
    for rank in worlds.run(2, fit, run):
        counted = rank.extra
        # Two microbatches of two batches, and five forwards more where the first batch is compared with its shares.
        assert counted["gathers"] <= (2 * 2 * 2 + 5) * counted["layers"] + 3 * counted["outside"]
        assert counted["most"] <= most and counted["referenced"] == 0
