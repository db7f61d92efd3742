"""Step outputs, read from `predict` and in hooks: on every rank of a pipeline they match one process."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from harness.trainer_runs import ignore_warnings, trainer_of
from models.tiny import FEATURES

SAMPLES, BATCH = 13, 8  # the last batch is a short one


class Predicts(LightningModule):
    """Each test defines what the steps return; `returned` is what hooks received."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.head = nn.Linear(FEATURES, 3)
        self.double()
        self.returned = []

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        out = self(batch["x"])
        loss = out.square().mean()
        return {"loss": loss, **self.extras(out, batch["name"]), "number": loss.item()}

    def validation_step(self, batch, batch_idx):
        return self.extras(self(batch["x"]), batch["name"])

    def extras(self, out, names):
        return {"names": names, "sum": out.detach().sum(), "count": len(out), "rows": list(out.detach())}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append({key: value for key, value in outputs.items() if key != "loss"})

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.returned.append(outputs)

    def predict_step(self, batch, batch_idx):
        return self.predictions(self(batch["x"]), batch["name"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Names(Predicts):
    def predictions(self, out, names):
        return {"names": names, "o": out, "count": len(out), "per": list(out[:, 0]), "columns": [out[:, 0], out[:, 1]]}


class Rows(Predicts):
    def predictions(self, out, names):
        return list(out)


class DictPerSample(Predicts):
    def predictions(self, out, names):
        return [{"name": name, "o": o, "best": o.argmax()} for name, o in zip(names, out, strict=True)]


class ByName(Predicts):
    def predictions(self, out, names):
        return dict(zip(names, out, strict=True))


class Classes(Predicts):
    def predictions(self, out, names):
        return out.argmax(-1).tolist()


class NumbersPerSample(Predicts):
    def predictions(self, out, names):
        return [(name, round(o.max().item(), 6), o.tolist()) for name, o in zip(names, out, strict=True)]


class OtherDimensions(Predicts):
    def predictions(self, out, names):
        return out.T, out.shape, {"sum": out.sum(), "largest": out.max(), "mean": out.mean(), "sums": out.sum(0)}


class Arrays(Predicts):
    def predictions(self, out, names):
        return {name: row for name, row in zip(names, out.unbind(), strict=True)}, out.detach().numpy()


PREDICTIONS = [Names, Rows, DictPerSample, ByName, Classes, NumbersPerSample, OtherDimensions, Arrays]


def data():
    x = torch.cos(torch.arange(SAMPLES * FEATURES, dtype=torch.float64).reshape(SAMPLES, FEATURES) ** 1.3)
    return DataLoader([{"x": row, "name": f"s{i}"} for i, row in enumerate(x)], batch_size=BATCH)


def predict(make, size):
    ignore_warnings()
    options = {"num_microbatches": 4} if size > 1 else {}
    return trainer_of(size, size, strategy_options=options).predict(make(), data())


def train(size):
    ignore_warnings()
    module, options = Predicts(), {"num_microbatches": 4} if size > 1 else {}
    trainer_of(size, size, strategy_options=options, num_sanity_val_steps=0).fit(module, data(), data())
    return module.returned


def assert_equal(actual, reference, where="output"):
    assert type(actual) is type(reference), f"{where}: {actual} and {reference}"
    if isinstance(actual, dict):
        assert list(actual) == list(reference), where
        for key in actual:
            assert_equal(actual[key], reference[key], f"{where}[{key!r}]")
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(reference), f"{where}: {actual} and {reference}"
        for place, (one, other) in enumerate(zip(actual, reference, strict=True)):
            assert_equal(one, other, f"{where}[{place}]")
    elif isinstance(actual, str | int):
        assert actual == reference, where
    else:
        torch.testing.assert_close(actual, reference, rtol=1e-10, atol=1e-12, msg=lambda text: f"{where}: {text}")


class StoresRows(Predicts):
    """An entry per sample: the step runs more operations on the full batch than on a microbatch."""

    def __init__(self):
        super().__init__()
        self.rows, self.outputs = [], []

    def validation_step(self, batch, batch_idx):
        out = self(batch["x"])
        self.rows.extend(out)
        self.outputs.append(out)


def validate(size):
    ignore_warnings()
    module, options = StoresRows(), {"num_microbatches": 4} if size > 1 else {}
    trainer_of(size, size, strategy_options=options).validate(module, data(), verbose=False)
    return module.rows, module.outputs


def test_rows_stored_one_by_one_match_one_process(worlds):
    [expected] = worlds.run(1, validate, 1)
    for kept in worlds.run(2, validate, 2):
        assert_equal(kept, expected)


@pytest.mark.parametrize("make", PREDICTIONS, ids=lambda make: make.__name__)
def test_predictions_match_one_process(worlds, make):
    [expected] = worlds.run(1, predict, make, 1)
    for predicted in worlds.run(2, predict, make, 2):
        assert_equal(predicted, expected)


def test_hooks_see_the_outputs_of_one_process(worlds):
    [expected] = worlds.run(1, train, 1)
    for returned in worlds.run(2, train, 2):
        assert len(returned) == 4
        assert_equal(returned, expected)
