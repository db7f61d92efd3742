"""A run draws the samples that the plain Trainer draws, and a resumed one those of its epoch."""

import random

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy

SAMPLES, SIZE = 16, 4


class Numbers(Dataset):
    def __init__(self):
        self.noise = random.Random(0)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.as_tensor(index).reshape(-1 if isinstance(index, list) else 1, 1).double()


class Noisy(Numbers):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + self.noise.randrange(100)


class OfEpoch(Sampler):
    """Shuffles by the epoch that is set, as soon as it is iterated over."""

    def __init__(self, batch_size=None):
        self.epoch, self.batch_size = 0, batch_size

    def __len__(self):
        return SAMPLES // (self.batch_size or 1)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))

    def __iter__(self):
        order = self.order()
        return iter((order.view(-1, self.batch_size) if self.batch_size else order).tolist())


class Counting(OfEpoch):
    """Counts its epochs itself, in what it is asked for."""

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        self.epoch += 1
        return super().__iter__()


class Stream(IterableDataset):
    def __init__(self):
        self.orders, self.read = Counting(), []

    def __iter__(self):
        for number in self.orders:
            self.read.append(number)
            yield torch.tensor([float(number + len(self.read))], dtype=torch.float64)


def shuffled_batches(data):
    return BatchSampler(DistributedSampler(data, 1, 0, shuffle=True), SIZE, drop_last=False)


OF_EPOCHS = {
    "batches": lambda: DataLoader(Numbers(), sampler=shuffled_batches(Numbers()), batch_size=None),
    "sampler of batches": lambda: DataLoader(Numbers(), sampler=OfEpoch(SIZE), batch_size=None),
    "worker": lambda: DataLoader(Numbers(), sampler=OfEpoch(), batch_size=SIZE, num_workers=1),
    "several": lambda: {
        "a": DataLoader(Numbers(), sampler=OfEpoch(), batch_size=SIZE),
        "b": DataLoader(Numbers(), sampler=OfEpoch(SIZE), batch_size=None),
    },
}
COUNTING = {
    "sampler": lambda: DataLoader(Numbers(), sampler=Counting(), batch_size=SIZE),
    "sampler in batches": lambda: DataLoader(Numbers(), sampler=BatchSampler(Counting(), SIZE, False), batch_size=None),
    "stream": lambda: DataLoader(Stream(), batch_size=SIZE),
    "noise": lambda: DataLoader(Noisy(), batch_size=SIZE),
}
LAYOUTS = {
    "dp2": {},
    "zero3": {"zero_stage": 3},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "tp2": {"tensor_parallel_size": 2},
}


class Module(LightningModule):
    def __init__(self, asks):
        super().__init__()
        self.asks = asks
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()

    def training_step(self, batch, batch_idx):
        first = batch["a"] if isinstance(batch, dict) else batch
        return self.layers(first.reshape(-1, 1)).square().mean()

    def configure_optimizers(self):
        assert not self.asks or self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), 1e-4)


class Batches(Callback):
    def __init__(self, path=""):
        self.path, self.epochs = path, {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        parts = batch.values() if isinstance(batch, dict) else [batch]
        self.epochs.setdefault(trainer.current_epoch, []).append([part.flatten().tolist() for part in parts])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.path and trainer.is_last_batch and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def drawn(name, options, path="", when="", asks=False):
    """The batches of two epochs, and those after a checkpoint of the first one."""

    def fit(epochs, callback, **kwargs):
        devices = 1 if options is None else 2
        strategy = None if options is None else Hybrid3DStrategy(**options)
        trainer = trainer_of(devices, strategy, [callback], max_epochs=epochs)
        torch.manual_seed(0)
        trainer.fit(Module(asks), (OF_EPOCHS | COUNTING)[name](), **kwargs)
        if when == "after the fit" and epochs == 1:
            trainer.save_checkpoint(path)
        return callback.epochs

    full = fit(2, Batches())
    if not path:
        return full, None
    fit(1, Batches(path if when == "after the last batch" else ""))
    return full, fit(2, Batches(), ckpt_path=path)


SLOW = [pytest.mark.slow]


@pytest.mark.parametrize("when", ["after the fit", pytest.param("after the last batch", marks=SLOW)])
@pytest.mark.parametrize("asks", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("layout", ["dp2", *(pytest.param(name, marks=SLOW) for name in LAYOUTS if name != "dp2")])
@pytest.mark.parametrize("name", OF_EPOCHS)
def test_resumed_run_draws_the_order_of_its_epoch(worlds, tmp_path, name, layout, asks, when):
    path = str(tmp_path / "saved.ckpt")
    for full, resumed in worlds.run(2, drawn, name, LAYOUTS[layout], path, when, asks, timeout=60):
        assert resumed == {1: full[1]}
        if name != "batches":
            assert full[1] != full[0]


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2", marks=SLOW)])
@pytest.mark.parametrize("name", COUNTING)
def test_example_batch_leaves_what_samplers_and_datasets_count(worlds, name, layout):
    [plain, _], *_ = worlds.run(1, drawn, name, None, timeout=60)
    for full, _ in worlds.run(2, drawn, name, LAYOUTS[layout], timeout=60):
        assert full == plain
