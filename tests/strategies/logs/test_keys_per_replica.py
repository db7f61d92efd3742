"""Replicas that log different keys, or in another order: each value is that of the replicas that logged it."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torchmetrics import MeanMetric

from harness.trainer_runs import ignore_warnings, trainer_of
from models.tiny import Tiny, loader

BATCHES = 4


class Logs(Tiny):
    """Replica r logs r + 1 in batch 0, r + 2 in batch 1 and so on, each under the keys that `keys` names for it."""

    keys = ()

    def training_step(self, batch, batch_idx):
        for key, options in self.keys(self.global_rank, batch_idx):
            self.log(key, float(self.global_rank + 1 + batch_idx), **options)
        return self.loss(batch)


class RecordsMetrics(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def run(size, pp, keys, module=Logs):
    ignore_warnings()
    recorder, model = RecordsMetrics(), module()
    model.keys = keys
    options = {"num_microbatches": 1, "data_parallel_size": size // pp}
    trainer = trainer_of(size, pp, strategy_options=options, limit_train_batches=BATCHES, callbacks=[recorder])
    trainer.fit(model, loader(2, 32))
    return recorder.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


def only_first(rank, batch_idx):
    if rank == 0:
        yield "first", {}


def only_second(rank, batch_idx):
    yield "all", {}
    if rank == 1:
        yield "second", {}


def by_turns(rank, batch_idx):
    """Sometimes one of them, sometimes both, sometimes none."""
    if (rank + 1) & batch_idx:
        yield "turns", {"on_epoch": True, "on_step": True, "batch_size": rank + 1}
    yield "all", {}


def in_another_order(rank, batch_idx):
    yield from [(key, {}) for key in (("a", "b") if rank else ("b", "a"))]


def reduced_otherwise(rank, batch_idx):
    if rank == batch_idx % 2 or batch_idx > 1:
        for how in ("sum", "max", "min"):
            yield how, {"reduce_fx": how}
    yield "all_max", {"reduce_fx": "max"}


def many(rank, batch_idx):
    """More keys than fit into one message."""
    for index in range(200 if rank or batch_idx % 2 else 10):
        yield f"key{index}", {}


def on_one_replica(only):
    """The value of a key that only replica `only` logs, after each batch."""
    return [float(only + 1 + batch_idx) for batch_idx in range(BATCHES)]


BOTH = [1.5 + batch_idx for batch_idx in range(BATCHES)]
SUMS = {
    "sum": [1.0, 3.0, 7.0, 9.0],
    "max": [1.0, 3.0, 4.0, 5.0],
    "min": [1.0, 3.0, 3.0, 4.0],
    "all_max": [2.0, 3.0, 4.0, 5.0],
}
CASES = [
    (only_first, {"first": on_one_replica(0)}),
    (only_second, {"all": BOTH, "second": on_one_replica(1)}),
    (in_another_order, {"a": BOTH, "b": BOTH}),
    (reduced_otherwise, SUMS),
    (many, {**{f"key{i}": BOTH for i in range(10)}, "key199": [2.0, 2.5, 4.0, 4.5]}),
]


@pytest.mark.parametrize(("keys", "expected"), CASES, ids=[keys.__name__ for keys, _ in CASES])
def test_each_key_is_reduced_over_the_replicas_that_logged_it(worlds, keys, expected):
    for seen, _ in worlds.run(2, run, 2, 1, keys):
        for name, values in expected.items():
            assert [metrics[name] for metrics in seen] == values, name


@pytest.mark.parametrize("keys", [only_second, many])
def test_keys_over_stages(worlds, keys):
    alone, staged = worlds.run(2, run, 2, 1, keys), worlds.run(4, run, 4, 2, keys)
    assert staged == [alone[0]] * 4 == [alone[1]] * 4


def test_epoch_mean_is_weighted_by_logged_batches(worlds):
    # Replica 0 logs in batches 1 and 3 with weight 1, replica 1 in batches 2 and 3 with weight 2.
    steps = [2.0, 4.0, (4.0 * 1 + 5.0 * 2) / 3]  # as in Lightning's sum of values times sizes over ranks
    mean = (steps[0] * 1 + steps[1] * 2 + steps[2] * 3) / 6
    for seen, metrics in worlds.run(2, run, 2, 1, by_turns):
        assert [batch["turns"] for batch in seen[1:]] == pytest.approx(steps) and "turns" not in seen[0]
        assert metrics["turns_epoch"] == pytest.approx(mean)


# -- metric objects ---------------------------------------------------------------------------------------------------


class LogsMetric(Logs):
    def __init__(self):
        super().__init__()
        self.metrics = torch.nn.ModuleDict({"mean": MeanMetric()})

    def training_step(self, batch, batch_idx):
        if self.keys(self.global_rank, batch_idx):
            self.metrics["mean"](float(self.global_rank + 1 + batch_idx))
            self.log("metric", self.metrics["mean"], on_step=True, on_epoch=True)
        return self.loss(batch)


def metric_by_turns(rank, batch_idx):
    return bool((rank + 1) & batch_idx)


def test_metric_object_is_found_on_non_logging_replicas(worlds):
    for seen, metrics in worlds.run(2, run, 2, 1, metric_by_turns, LogsMetric):
        assert [batch["metric"] for batch in seen[1:]] == [2.0, 4.0, 4.5]
        assert metrics["metric_epoch"] == pytest.approx((2.0 + 4.0 + 4.0 + 5.0) / 4)


# -- what it costs ----------------------------------------------------------------------------------------------------


def equal_keys(rank, batch_idx):
    yield from [("b", {}), ("a", {})] if rank else [("a", {}), ("b", {})]


def count_messages(keys):
    calls = []

    def counted(name):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with counted("all_gather"), counted("all_reduce"):
        run(2, 1, keys)
    return calls.count("all_gather"), calls.count("all_reduce")


def no_keys(rank, batch_idx):
    return ()


def test_equal_keys_need_one_message(worlds):
    [(gathered, silent), *_] = worlds.run(2, count_messages, no_keys)
    for count, reduced in worlds.run(2, count_messages, equal_keys):
        assert count == gathered and reduced == silent
    for count, _ in worlds.run(2, count_messages, only_first):
        assert count == gathered + BATCHES
