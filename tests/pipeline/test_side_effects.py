"""Steps that store values at positions in buffers: the side-effect run finds the buffers as the step did."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.stored_values import StoresValues, assert_equal, run
from models.regression import FEATURES


class Queue(nn.Module):
    """Keys of the last batches, at the position in a buffer: MoCo's memory bank."""

    def __init__(self, size=12):
        super().__init__()
        self.register_buffer("keys", torch.ones(size, FEATURES, dtype=torch.float64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, queries):
        known = self.keys.clone()
        self.put(queries.detach())
        return F.mse_loss(queries @ known.T, torch.zeros(len(queries), len(known), dtype=queries.dtype))

    def put(self, new):
        count, place = len(new), int(self.place)
        if place + count >= len(self.keys):
            self.keys[place:] = new[: len(self.keys) - place]
            self.place.zero_()
        else:
            self.keys[place : place + count] = new
            self.place[0] = place + count


class Contrasts(StoresValues):
    def __init__(self):
        super().__init__()
        self.queue, self.spread = Queue(), 0.0

    def training_step(self, batch, batch_idx):
        hidden = self.body(batch[0])
        loss = F.mse_loss(self.head(hidden), batch[1]) + self.queue(hidden)
        self.spread = 0.9 * self.spread + 0.1 * hidden.detach().std(0).mean().item()
        return loss


@pytest.mark.parametrize("count", [1, 2])
def test_buffer_pointer_selects_the_written_slot(worlds, count):
    [expected] = worlds.run(1, run, Contrasts, 1, {}, 5)
    options = {"pipeline_parallel_size": 2, "num_microbatches": count}
    for rank in worlds.run(2, run, Contrasts, 2, options, 5):
        for actual, wanted in zip(rank, expected, strict=True):
            assert_equal(actual, wanted)
