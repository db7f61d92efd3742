"""Which samples and draws the ranks see: equal within a replica, in the order of one process."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.augmented import Augmented, SeesNoise
from models.tiny import Tiny, loader


class RecordsSamples(Tiny):
    """Records the samples and the random glue of its steps."""

    def __init__(self):
        super().__init__()
        self.seen, self.drawn, self.validated = [], [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["index"].tolist())
        mix = random.random(), float(np.random.beta(0.4, 0.4)), int(np.random.permutation(4)[0])
        self.drawn.append((*mix, float(torch.rand(()))))
        x = batch["x"] * mix[0] + batch["x"].flip(0) * mix[1]
        return torch.nn.functional.mse_loss(self(x), batch["y"])

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["index"].tolist())
        self.log("val", self.loss(batch))


def run_recorded(size, pp, seeded, shuffle, options):
    ignore_warnings()
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    np.random.seed(100 + rank)
    random.seed(100 + rank)
    if seeded:
        seed_everything(7, verbose=False)
    model = RecordsSamples()
    trainer = trainer_of(size, pp, strategy_options=options, max_epochs=2)
    trainer.fit(model, loader(4, shuffle=shuffle), loader(4))
    return model.seen, model.drawn, model.validated, weights_of(model)


@pytest.mark.parametrize(
    "seeded", [pytest.param(True, marks=pytest.mark.slow), False], ids=["seed_everything", "unseeded"]
)
def test_ranks_of_one_replica_see_the_same_batch_and_draws(worlds, seeded):
    results = worlds.run(4, run_recorded, 4, 2, seeded, True, {"num_microbatches": 2})
    for first, second in ((0, 2), (1, 3)):
        assert results[first][:3] == results[second][:3]
    # Two replicas share each epoch's 16 samples.
    for epoch in range(2):
        seen_indices = [
            index for rank in (0, 1) for step in results[rank][0][epoch * 2 : epoch * 2 + 2] for index in step
        ]
        assert sorted(seen_indices) == list(range(16))
    assert results[0][0][:2] != results[0][0][2:]
    for result in results:
        assert_same(result[3], results[0][3])


def test_one_replica_keeps_the_user_order(worlds):
    for seen, _, validated, _ in worlds.run(2, run_recorded, 2, 2, True, False, {"num_microbatches": 1}):
        in_order = [list(range(start, start + 4)) for start in range(0, 16, 4)]
        assert seen == in_order * 2
        assert validated[-4:] == in_order


class OnlyRecords(RecordsSamples):
    def training_step(self, batch, batch_idx):
        self.seen.append(batch["index"].tolist())
        return self.loss(batch)


def run_after_a_draw(size, pp):
    ignore_warnings()
    seed_everything(7, verbose=False)
    torch.rand(3)  # such as initial weights: the order of samples is drawn after them
    model = OnlyRecords()
    options = {"num_microbatches": 1} if pp > 1 else {}
    trainer = trainer_of(size, pp, strategy_options=options, max_epochs=2)
    trainer.fit(model, loader(4, shuffle=True), loader(4))
    return model.seen


def test_stages_shuffle_as_one_process(worlds):
    [expected] = worlds.run(1, run_after_a_draw, 1, 1)
    seen, _ = worlds.run(2, run_after_a_draw, 2, 2)
    assert len(expected) == 8 and expected[:4] != expected[4:]
    assert seen == expected


def run_augmented(size, pp, workers, seed_workers):
    ignore_warnings()
    seed_everything(7, workers=seed_workers, verbose=False)
    model = SeesNoise()
    trainer_of(size, pp, max_epochs=2).fit(model, DataLoader(Augmented(), batch_size=8, num_workers=workers))
    return model.noise


def test_random_augmentation_is_equal_within_a_replica(worlds):
    results = worlds.run(4, run_augmented, 4, 2, 0, False)
    assert results[0] == results[2] and results[1] == results[3]


class Branches(Tiny):
    """Its step runs on shares of the batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 1e9:
            raise ValueError
        return loss


class CustomBatch:
    """A batch of a custom class."""

    def __init__(self, content):
        self.content = content

    def to(self, device, **_):
        return self


class OnObjects(Tiny):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch.content, batch_idx)


def as_object(samples):
    return CustomBatch(torch.utils.data.default_collate(samples))


def run_differing(make, collate):
    samples = torch.randperm(16, generator=torch.Generator().manual_seed(torch.distributed.get_rank())).tolist()
    model = make()
    before = weights_of(model)
    try:
        trainer_of(2, 2).fit(model, loader(4, sampler=samples, collate_fn=collate))
    except Exception as error:
        return type(error).__name__, str(error)
    return before


@pytest.mark.parametrize(("make", "collate"), [(Tiny, None), (Branches, None), (OnObjects, as_object)])
def test_loader_that_differs_within_a_replica_is_detected(worlds, make, collate):
    for name, message in worlds.run(2, run_differing, make, collate):
        assert name == "RanksDisagree"
        assert "batch differs" in message and "pipeline ranks 0 to 1" in message and "seed" in message
