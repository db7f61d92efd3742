"""Ranks whose loaders have different lengths are told so, instead of waiting for each other."""

import time
from datetime import timedelta

import pytest
import torch
from torch.utils.data import IterableDataset

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.errors import RanksDisagree
from models.tiny import FEATURES, Tiny, loader

LAYOUTS = [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}]
SECONDS = 60


class Stream(IterableDataset):
    def __init__(self, num):
        self.num = num

    def __iter__(self):
        for index in range(self.num):
            x = torch.full((FEATURES,), float(index), dtype=torch.float64)
            yield {"x": x, "y": x[:1]}


class Evaluated(Tiny):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch["x"])


def data_of(case, more):
    """The call of a Trainer, and its loaders, of which one is longer on some ranks."""
    even, uneven = loader(4), loader(4, 16 + 4 * more)
    stream = torch.utils.data.DataLoader(Stream(16 + 4 * more), batch_size=4)
    fits = {"train": (uneven,), "stream": (stream,), "steps": (stream,), "val": (even, uneven)}
    return ("fit", fits[case]) if case in fits else (case, (uneven,))


def run_uneven(case, layout):
    ignore_warnings()
    options = {**layout, "timeout": timedelta(seconds=2 * SECONDS)}
    more = {"num_sanity_val_steps": 0, "use_distributed_sampler": False, "max_steps": 4 if case == "steps" else -1}
    trainer = trainer_of(2, 1, strategy_options=options, **more)
    method, data = data_of(case, trainer.strategy.launcher is None and torch.distributed.get_rank())
    start = time.monotonic()
    try:
        getattr(trainer, method)(Evaluated(), *data)
    except Exception as error:
        return type(error), " ".join([str(error), *getattr(error, "__notes__", [])]), time.monotonic() - start
    return None, "", 0.0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: next(iter(layout)))
@pytest.mark.parametrize("case", ["train", "val", "test", "predict", "stream"])
def test_lengths_are_named_soon(worlds, case, layout):
    ranks = worlds.run(2, run_uneven, case, layout)
    assert max(seconds for *_, seconds in ranks) < SECONDS
    texts = [text for kind, text, _ in ranks if kind is RanksDisagree]
    wanted = ["ends after 4 batches on rank 0", "goes on to batch 5"] if case == "stream" else ["4", "5", "on rank 1"]
    assert texts and all(word in texts[0] for word in wanted), ranks


@pytest.mark.parametrize("case", ["train", "stream"])
def test_lengths_of_replicas_are_named_soon(worlds, case):
    ranks = worlds.run(2, run_uneven, case, {})
    assert max(seconds for *_, seconds in ranks) < SECONDS
    texts = [text for kind, text, _ in ranks if kind is RanksDisagree]
    wanted = ["ends after 4 batches on rank 0 (replica 0)", "goes on to batch 5"]
    if case == "train":
        assert len(texts) == 2
        wanted = ["on the replicas: 4 on replica 0, 5 on replica 1"]
    assert texts and all(word in texts[0] for word in [*wanted, "limit_train_batches=4"]), ranks


@pytest.mark.parametrize("layout", [{}, *LAYOUTS], ids=["replicas", "stages", "tensor"])
def test_streams_may_differ_behind_the_last_step(worlds, layout):
    assert [kind for kind, *_ in worlds.run(2, run_uneven, "steps", layout)] == [None, None]


@pytest.mark.parametrize("case", ["val", "test", "predict"])
def test_replicas_may_evaluate_different_numbers_of_batches(worlds, case):
    assert [kind for kind, *_ in worlds.run(2, run_uneven, case, {})] == [None, None]


def run_even_stream(layout):
    ignore_warnings()
    trainer = trainer_of(2, 1, strategy_options=layout, max_epochs=2)
    trainer.fit(Evaluated(), torch.utils.data.DataLoader(Stream(16), batch_size=4), loader(4))
    return trainer.global_step


def test_equal_streams_are_read_to_their_end(worlds):
    assert worlds.run(2, run_even_stream, LAYOUTS[0]) == [8, 8]
