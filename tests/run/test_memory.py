"""Neither a step nor a run leaves tensors to Python's garbage collector."""

import ctypes
import gc
import multiprocessing
import re
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.shared_memory import transfers as transfers


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_over_stages(devices, num_microbatches, **options):
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=devices, num_microbatches=num_microbatches),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def num_slots():
    """Tensors over shared memory: the maximal number of messages in flight."""
    made = [made[1] for made in transfers.transfers_of.__self__._made.values() if made is not None]
    return sum(len(memory._contents) for one in made for memory in one._memories.values())


class Count(pl.Callback):
    def __init__(self):
        self.tensors = []

    def on_train_batch_end(self, *_):
        alive = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        self.tensors.append(alive - num_slots())


def count_tensors(devices):
    count = Count()
    trainer = trainer_over_stages(devices, 4, max_epochs=1, callbacks=[count])
    gc.disable()
    try:
        trainer.fit(Small(), DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=8))
    finally:
        gc.enable()
    return count.tensors


def test_steps_leave_no_tensors_to_the_garbage_collector(worlds):
    for tensors in [*worlds.run(1, count_tensors, 1), *worlds.run(2, count_tensors, 2)]:
        assert len(tensors) == 12
        # One leaked tensor per microbatch would be 40 here; messages in flight come and go.
        assert tensors[-1] - tensors[1] < 10, f"live tensors after each step: {tensors}"


def count_workers_after_fit(devices):
    trainer = trainer_over_stages(devices, 2, max_steps=1)
    gc.disable()
    try:
        trainer.fit(Small(), DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4, num_workers=1))
        return len(multiprocessing.active_children())
    finally:
        gc.enable()


def test_loader_workers_end_with_the_run(worlds):
    # The garbage collector would wait 5 s for each: it closes their queues before it stops them.
    assert worlds.run(2, count_workers_after_fit, 2) == [0, 0]


class Wide(pl.LightningModule):
    """200 MB of parameters in eight layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(2500, 2500) for _ in range(8)))

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Resident(pl.Callback):
    def __init__(self):
        self.megabytes = 0.0

    def on_train_batch_end(self, *_):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # pages that the allocator caches are not the run's
        status = Path("/proc/self/status").read_text()
        self.megabytes = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024


def measure_resident(devices):
    before, after = Resident(), Resident()
    before.on_train_batch_end()
    trainer = trainer_over_stages(devices, 2, max_steps=2, callbacks=[after])
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(8, 2500)), batch_size=4))
    return after.megabytes - before.megabytes


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status and calls glibc")
def test_each_of_two_ranks_stores_half_of_a_large_model(worlds):
    [alone] = worlds.run(1, measure_resident, 1, timeout=200)
    # Parameters, gradients and two states of Adam: 800 MB on one rank.
    assert alone > 600, f"{alone:.0f} MB"
    for rank, megabytes in enumerate(worlds.run(2, measure_resident, 2, timeout=200)):
        assert megabytes < 0.7 * alone, f"rank {rank} holds {megabytes:.0f} MB, one process {alone:.0f} MB"
