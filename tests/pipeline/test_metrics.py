"""torchmetrics objects: updated where their inputs are, synced over replicas, the same value on every rank."""

import pickle

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback

from harness.layouts import under_sizes
from harness.trainer_runs import assert_same, ignore_warnings, trainer_of
from models.tiny import FEATURES, Tiny, loader

LAYOUTS = under_sizes({"pp2": (2, 2), "dp2xpp2": (4, 2)})


class WithMetrics(Tiny):
    """Errors of the regression, over an epoch and per step."""

    def __init__(self):
        super().__init__()
        self.train_error = torchmetrics.MeanAbsoluteError()
        self.errors = torchmetrics.MetricCollection(
            {"mae": torchmetrics.MeanAbsoluteError(), "mse": torchmetrics.MeanSquaredError()}, prefix="val_"
        )
        self.at_end = torchmetrics.MeanSquaredError()
        self.computed = []

    def training_step(self, batch, batch_idx):
        predicted = self(batch["x"])
        self.train_error(predicted, batch["y"])
        self.log("train_mae", self.train_error, on_step=True, on_epoch=True)
        return torch.nn.functional.mse_loss(predicted, batch["y"])

    def validation_step(self, batch, batch_idx):
        predicted = self(batch["x"])
        self.errors.update(predicted, batch["y"])
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        self.at_end.update(predicted, batch["y"])

    def on_validation_epoch_end(self):
        value = self.at_end.compute()
        self.computed.append(float(value))
        self.log("val_end", value)
        self.at_end.reset()


def run_metrics(size, pp, batch_size, count):
    ignore_warnings()
    model = WithMetrics()
    options = {"num_microbatches": count} if size > 1 else {}
    trainer = trainer_of(size, pp, max_epochs=2, strategy_options=options)
    # Epochs of sharded samples: the replicas together see the samples of one process.
    trainer.fit(model, loader(batch_size, replicas=1 if size == pp else None), loader(batch_size))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, model.computed


@LAYOUTS
def test_metrics_match_one_process_on_every_rank(worlds, size, pp):
    [(expected, computed)] = worlds.run(1, run_metrics, 1, 1, 8, 1)
    results = worlds.run(size, run_metrics, size, pp, 8 * pp // size, 2)
    for values, at_ends in results:
        # A step's value is that of the replica's batch.
        actual = {name: value for name, value in values.items() if name != "train_mae_step"}
        one_process = {name: value for name, value in expected.items() if name != "train_mae_step"}
        assert_same(actual, one_process, rtol=1e-6)
        assert at_ends == pytest.approx(computed, rel=1e-6)


class ForwardValue(Tiny):
    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanAbsoluteError()
        self.steps = []
        self.means = []

    def training_step(self, batch, batch_idx):
        predicted = self(batch["x"])
        self.means.append(predicted.detach().mean())
        self.log("batch_mae", self.error(predicted, batch["y"]))
        return torch.nn.functional.mse_loss(predicted, batch["y"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps.append(float(self.trainer.callback_metrics["batch_mae"]))

    def on_train_epoch_end(self):
        self.log("epoch_mae", self.error.compute())
        self.error.reset()


def run_forward(size, pp):
    ignore_warnings()
    model = ForwardValue()
    trainer = trainer_of(size, pp, max_epochs=2)
    trainer.fit(model, loader(8))
    return model.steps, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_forward_value_is_that_of_the_full_batch(worlds):
    [(steps, end)] = worlds.run(1, run_forward, 1, 1)
    for actual, our_end in worlds.run(2, run_forward, 2, 2):
        assert actual == pytest.approx(steps, rel=1e-6)
        assert_same(our_end, end, rtol=1e-6)


class OnFirstStage(Tiny):
    """The metric's inputs live on the first stage; nothing of it reaches the loss."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        hidden = self.layers[0](batch["x"])
        assert hidden.shape[1] == FEATURES
        self.mean.update(hidden.abs())
        self.log("hidden", self.mean, on_step=False, on_epoch=True)
        return torch.nn.functional.mse_loss(self.layers[1:](hidden), batch["y"])


def run_first_stage(size, pp):
    ignore_warnings()
    trainer = trainer_of(size, pp)
    trainer.fit(OnFirstStage(), loader(8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_metric_with_inputs_on_one_stage(worlds):
    [expected] = worlds.run(1, run_first_stage, 1, 1)
    for result in worlds.run(2, run_first_stage, 2, 2):
        assert_same(result, expected, rtol=1e-6)


class Validated(Tiny):
    """A metric on the validation monitored by a scheduler and by nothing else."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="binary")

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch["x"]).squeeze(1).sigmoid(), (batch["y"].squeeze(1) > 0).long())
        self.log("accuracy", self.accuracy, prog_bar=True)


def run_validated(size, pp):
    ignore_warnings()
    [result] = trainer_of(size, pp).validate(Validated(), loader(8 * pp // size), verbose=False)
    return result


@LAYOUTS
def test_validate_counts_every_sample_once(worlds, size, pp):
    [expected] = worlds.run(1, run_validated, 1, 1)
    for result in worlds.run(size, run_validated, size, pp):
        assert_same(result, expected, rtol=1e-6)


class Total(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def update(self, values):
        self.total += values.sum()

    def compute(self):
        return self.total


class KeptInHyperparameters(Tiny):
    """A metric that is saved with the hyperparameters, is never logged, and is read after the run."""

    def __init__(self, metric):
        super().__init__()
        self.save_hyperparameters()
        self.metric = metric

    def training_step(self, batch, batch_idx):
        out = self(batch["x"])
        self.metric.update((out - batch["y"]).abs())
        return torch.nn.functional.mse_loss(out, batch["y"])


class SavesAtEnds(Callback):
    """Saves in some hooks at the end of a run, and keeps a metric that each rank updates by itself."""

    def __init__(self, hooks, folder):
        self.hooks, self.folder, self.samples, self.files = hooks, folder, torchmetrics.SumMetric(), []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.samples.update(len(batch["x"]))

    def save(self, trainer, hook):
        if hook in self.hooks:
            self.files.append(f"{self.folder}/{hook}.ckpt")
            trainer.save_checkpoint(self.files[-1])

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer, "epoch")

    def on_train_end(self, trainer, module):
        self.save(trainer, "end")

    def on_fit_end(self, trainer, module):
        self.save(trainer, "fit")
        self.at_end = float(module.metric.compute())


def run_kept(size, pp, options, hooks, folder):
    ignore_warnings()
    metric, saves = Total(), SavesAtEnds(hooks, folder)
    replicas = 1 if options.get("tensor_parallel_size") else size // pp
    trainer = trainer_of(size, pp, strategy_options=options, callbacks=[saves])
    trainer.fit(KeptInHyperparameters(metric), loader(8 // replicas, replicas=1 if replicas == 1 else None))
    local = float(metric.total)
    saves.save(trainer, "after")
    files = [torch.load(file, weights_only=False)["hyper_parameters"]["metric"] for file in saves.files]
    assert pickle.loads(pickle.dumps(metric)).dist_sync_fn is None
    metric._computed = None
    values = [saves.at_end, float(metric.clone().compute()), float(metric.compute())]
    samples = float(saves.samples.compute())
    saves.samples.reset()
    saves.samples.update(1.0)  # of no replica: each rank's own
    return [float(file.total) for file in files], local, values, [samples, float(saves.samples.compute())]


KEPT = {
    "pp2": (2, 2, {"num_microbatches": 2}, [[0, 1]]),
    "dp2xpp2": (4, 2, {"num_microbatches": 2}, [[0, 2], [1, 3]]),
    "zero3": (2, 1, {"zero_stage": 3}, [[0], [1]]),
    "tp2": (2, 1, {"tensor_parallel_size": 2}, [[0, 1]]),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("zero3", "tp2"))) for n in KEPT])
@pytest.mark.parametrize("hooks", [("epoch", "end", "fit", "after"), ("fit", "after")], ids=["", "late"])
def test_after_a_run_and_in_files_ranks_hold_their_replicas_state_which_counts_once(worlds, hooks, name, tmp_path):
    size, pp, options, replicas = KEPT[name]
    (tmp_path / "one").mkdir()
    [(_, total, [value, *_], [samples, _])] = worlds.run(1, run_kept, 1, 1, {}, (), str(tmp_path / "one"))
    results = worlds.run(size, run_kept, size, pp, options, hooks, str(tmp_path), timeout=60)
    states = [results[ranks[0]][1] for ranks in replicas]
    assert sum(states) == pytest.approx(total, rel=1e-10) and total == value
    assert all(results[rank][1] == state for ranks, state in zip(replicas, states, strict=True) for rank in ranks)
    for saved, _, values, counts in results:
        assert saved == [states[0]] * len(hooks)
        assert values == pytest.approx([value] * 3, rel=1e-10) and counts == [samples, size]
