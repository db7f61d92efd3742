"""Logged values are the same on every rank, and match one process."""

import math

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from harness.layouts import under_sizes
from harness.trainer_runs import assert_same, ignore_warnings, trainer_of
from models.tiny import Tiny, loader

LAYOUTS = under_sizes({"pp2": (2, 2), "dp2xpp2": (4, 2)})


class Logs(Tiny):
    """Logs in every way, in training and validation."""

    def log_all(self, stage, batch, loss):
        everywhere = {"sync_dist": True, "on_step": False, "on_epoch": True, "batch_size": len(batch["x"])}
        self.log(f"{stage}_loss", loss, prog_bar=True, **everywhere)
        self.log(f"{stage}_item", loss.item(), **everywhere)
        self.log(f"{stage}_float", float(loss.detach()), **everywhere)
        self.log(f"{stage}_exp", math.exp(loss.item()), **everywhere)
        self.log(f"{stage}_half", loss.item() / 2 + 1, **everywhere)
        self.log(f"{stage}_mean_index", batch["index"].double().mean(), **everywhere)
        self.log(f"{stage}_python", 3, **everywhere)
        for how in ("mean", "sum", "max", "min"):
            self.log(f"{stage}_{how}", loss, reduce_fx=how, **everywhere)
        self.log(f"{stage}_torch_max", loss, reduce_fx=torch.max, **everywhere)
        self.log_dict({f"{stage}_a": loss * 2, f"{stage}_b": batch["x"].sum()}, reduce_fx="sum", **everywhere)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log_all("train", batch, loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log_all("val", batch, self.loss(batch))


def run_logs(size, pp, batch_size, options, **trainer_options):
    if size == 1 and "accumulate_grad_batches" not in trainer_options:
        trainer_options["accumulate_grad_batches"] = 1
    trainer = trainer_of(size, pp, max_epochs=2, strategy_options=options, **trainer_options)
    train = loader(batch_size, 18, replicas=1 if size == pp else None)
    trainer.fit(Logs(), train, loader(batch_size, 18))
    as_numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    bar = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    return as_numbers, bar, logged


@LAYOUTS
def test_epoch_values_match_replicas_without_stages(worlds, size, pp):
    replicas = size // pp
    expected = worlds.run(replicas, run_logs, replicas, 1, 6 // replicas, {})[0]
    results = worlds.run(size, run_logs, size, pp, 6 // replicas, {"num_microbatches": 6 // replicas})
    for result in results:
        for actual, plain in zip(result, expected, strict=True):
            # Nonlinear functions in Python are means over microbatches.
            linear = [{name: value for name, value in each.items() if "_exp" not in name} for each in (actual, plain)]
            assert_same(*linear, rtol=1e-6)  # numbers read with .item() are logged in float32


class LogsSteps(Tiny):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("step", loss)
        self.log("mean_index", batch["index"].double().mean(), on_step=True, on_epoch=True)
        return {"loss": loss, "doubled": loss * 2}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps = [
            *getattr(self, "steps", []),
            {
                **{name: float(value) for name, value in self.trainer.logged_metrics.items()},
                **{f"bar_{name}": float(value) for name, value in self.trainer.progress_bar_metrics.items()},
                "output": float(outputs["loss"]),
                "doubled": float(outputs["doubled"]),
                "len": len(batch["x"]),
            },
        ]


def run_steps(size, pp, options):
    model = LogsSteps()
    # The last batch is short: the epoch's mean weighs by batch size.
    trainer = trainer_of(size, pp, max_epochs=2, strategy_options=options, log_every_n_steps=1)
    trainer.fit(model, loader(6, 16))
    end = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return model.steps, end


@pytest.mark.parametrize("count", [1, 3, "auto"])
def test_step_values_and_outputs_match_one_process(worlds, count):
    [(steps, end)] = worlds.run(1, run_steps, 1, 1, {})
    for actual, our_end in worlds.run(2, run_steps, 2, 2, {"num_microbatches": count}):
        assert len(actual) == len(steps) == 6
        for our_step, step in zip(actual, steps, strict=True):
            assert_same(our_step, step)
        assert_same(our_end, end)


class LogsInHooks(Tiny):
    """Logs from hooks of the module, and stores outputs as in Lightning's documentation."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train", loss)
        return loss

    def on_validation_epoch_start(self):
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.outputs.append(loss)
        return loss

    def on_validation_epoch_end(self):
        self.log("val", torch.stack(self.outputs).mean(), sync_dist=True)

    def on_train_epoch_end(self):
        self.log("epoch_twice", self.current_epoch * 2.0)


def run_monitors(size, pp, folder):
    stopping = EarlyStopping("val", min_delta=0.02, patience=1)
    saving = ModelCheckpoint(folder, monitor="val", save_top_k=2, filename="{epoch}")
    trainer = trainer_of(size, pp, max_epochs=20, callbacks=[stopping, saving], enable_checkpointing=True)
    trainer.fit(LogsInHooks(), loader(4), loader(4))
    return (
        trainer.current_epoch,
        stopping.stopped_epoch,
        float(stopping.best_score),
        float(saving.best_model_score),
        saving.best_model_path.rsplit("/", 1)[-1],
        sorted(path.rsplit("/", 1)[-1] for path in saving.best_k_models),
    )


@under_sizes({"pp2": (2, 2), "dp2xpp2": (4, 2)}, also=["pp2"])
def test_monitor_on_nonzero_rank(worlds, tmp_path, size, pp):
    results = worlds.run(size, run_monitors, size, pp, tmp_path / "hybrid")
    assert all(result == results[0] for result in results)
    assert 1 < results[0][0] < 20
    if size == pp:
        [expected] = worlds.run(1, run_monitors, 1, 1, tmp_path / "one")
        assert results[0][2:4] == pytest.approx(expected[2:4])
        assert (*results[0][:2], *results[0][4:]) == (*expected[:2], *expected[4:])


class LogsOnOneStage(Tiny):
    """The value lives on the first stage only; the loss on the last."""

    def training_step(self, batch, batch_idx):
        hidden = self.layers[0](batch["x"])
        self.log("hidden", hidden.abs().mean())
        self.log("hidden_item", hidden.abs().max().item(), reduce_fx="max")
        return nn_mse(self.layers[1:](hidden), batch["y"])


def nn_mse(a, b):
    return torch.nn.functional.mse_loss(a, b)


def run_one_stage(size, pp):
    trainer = trainer_of(size, pp)
    trainer.fit(LogsOnOneStage(), loader(8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_metric_logged_on_one_stage_only(worlds):
    [expected] = worlds.run(1, run_one_stage, 1, 1)
    for result in worlds.run(2, run_one_stage, 2, 2):
        assert_same(result, expected)


class CountsEpoch(Tiny):
    """Logs a metric of each epoch, and reads its weights as the epoch ends."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.norm = float(sum(p.detach().square().sum() for p in self.parameters()))


class BarOfFirstRank(Callback):
    """Reads metrics on one rank, as progress bars do."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.seen = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


def run_with_bar(size, pp):
    model, bar = CountsEpoch(), BarOfFirstRank()
    trainer = trainer_of(size, pp, max_epochs=2, callbacks=[bar])
    trainer.fit(model, loader(4, replicas=size // pp))
    return float(trainer.callback_metrics["mean"]), model.norm, getattr(bar, "seen", None)


@LAYOUTS
def test_progress_bar_reads_metrics_before_collective_hooks(worlds, size, pp):
    (mean, norm, seen), *others = worlds.run(size, run_with_bar, size, pp)
    assert seen == {"mean": mean} and math.isfinite(mean)
    assert all(other == (mean, norm, None) for other in others)


class CountsEvaluations(Tiny):
    """Logs metrics of evaluations, reads its weights as they end, and then changes one of the metrics."""

    def __init__(self):
        super().__init__()
        self.mean, self.later, self.reset = (torchmetrics.MeanMetric() for _ in range(3))

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        for name in ("mean", "later", "reset"):
            metric = getattr(self, name)
            metric(loss)
            self.log(name, metric)

    test_step = validation_step

    def on_validation_epoch_end(self):
        self.norm = float(sum(p.detach().square().sum() for p in self.parameters()))
        self.later.update(torch.tensor(5.0))
        self.reset.reset()
        self.reset.update(torch.tensor(3.0))
        self.log("norm", self.norm)

    on_test_epoch_end = on_validation_epoch_end


class BarOfEvaluations(Callback):
    """Reads metrics on one rank."""

    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.seen = {name: float(value) for name, value in trainer.callback_metrics.items()}

    on_test_epoch_end = on_validation_epoch_end


def run_evaluations_with_bar(size, pp):
    ignore_warnings()
    bar, numbers = BarOfEvaluations(), []
    model, data = CountsEvaluations(), loader(2)
    for call in ("fit", "validate", "test"):
        trainer = trainer_of(size, pp, callbacks=[bar])
        getattr(trainer, call)(model, *([loader(4)] if call == "fit" else []), data)
        seen = {name: value for name, value in getattr(bar, "seen", {}).items() if name != "norm"}
        numbers.append({name: float(value) for name, value in trainer.callback_metrics.items()} | {"seen": len(seen)})
        numbers[-1] |= {f"seen {name}": value for name, value in seen.items()}
    return numbers


@LAYOUTS
def test_progress_bar_reads_evaluation_metrics(worlds, size, pp):
    [expected] = worlds.run(1, run_evaluations_with_bar, 1, 1, timeout=60)
    first, *others = worlds.run(size, run_evaluations_with_bar, size, pp, timeout=60)
    for index, numbers in enumerate(first):
        assert numbers["seen"] == 4
        if size == pp:
            assert_same(numbers, expected[index])
        for other in others:
            assert other[index] == {k: v for k, v in numbers.items() if "seen" not in k} | {"seen": 0}


def run_profiled():
    trainer = trainer_of(2, 2, profiler="simple", max_steps=1)
    trainer.fit(Tiny(), loader(8))
    return [name for name in trainer.profiler.recorded_durations if name.startswith("[Callback]")]


def test_profiler_shows_callback_class_names(worlds):
    for names in worlds.run(2, run_profiled):
        assert "[Callback]FullAtTrainEnd.on_train_end" in names
        assert not [name for name in names if "<locals>" in name]
