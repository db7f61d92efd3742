"""The rest of Lightning's surface under stages: what a user's Trainer, callbacks and hooks see."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn

from harness.layouts import under_sizes
from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.tiny import FEATURES, Tiny, loader

LAYOUTS = under_sizes({"pp2": (2, 2), "dp2xpp2": (4, 2)})

# -- loops ------------------------------------------------------------------------------------------------------------


class AllSteps(Tiny):
    def __init__(self):
        super().__init__()
        self.order = []

    def training_step(self, batch, batch_idx):
        self.order.append("train")
        return self.loss(batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.order.append("val")
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return {"y": self(batch["x"]), "index": batch["index"]}


def run_all(size, pp):
    ignore_warnings()
    model = AllSteps()
    options = {"num_microbatches": 2} if size > 1 else {}
    trainer = trainer_of(size, pp, strategy_options=options, limit_val_batches=2, max_steps=3)
    each = 8 * pp // size
    train = loader(each, replicas=1 if size == pp else None)
    trainer.fit(model, train, [loader(each), loader(each, 8)])
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    numbers |= {
        f"validate_{i}": sum(result.values())
        for i, result in enumerate(trainer.validate(model, [loader(each), loader(each, 8)], verbose=False))
    }
    numbers |= trainer.test(model, loader(each), verbose=False)[0]
    predicted = trainer.predict(model, loader(each))
    return numbers, predicted, model.order.count("val"), model.order[0], weights_of(model)


@LAYOUTS
def test_fit_validate_test_and_predict_match_one_process(worlds, size, pp):
    [(numbers, predicted, _, _, weights)] = worlds.run(1, run_all, 1, 1)
    every = worlds.run(size, run_all, size, pp)
    for actual, our_predicted, _, first, our_weights in every:
        assert first == "val"
        assert_same(actual, numbers, rtol=1e-6)
        assert_same(our_weights, weights)
        if size == pp:
            for batch, expected in zip(our_predicted, predicted, strict=True):
                torch.testing.assert_close(batch, expected)
    if size != pp:
        rows = {int(i): y for _, p, *_ in every for batch in p for i, y in zip(batch["index"], batch["y"], strict=True)}
        expected_rows = {int(i): y for batch in predicted for i, y in zip(batch["index"], batch["y"], strict=True)}
        torch.testing.assert_close(rows, expected_rows)


class RecordsSanityCheck(Callback):
    def on_sanity_check_end(self, trainer, pl_module):
        self.order = list(pl_module.order)


def run_sanity(size, pp):
    ignore_warnings()
    model, recorder = AllSteps(), RecordsSanityCheck()
    trainer_of(size, pp, num_sanity_val_steps=2, callbacks=[recorder]).fit(model, loader(8), loader(8))
    return recorder.order, weights_of(model)


def test_validation_before_first_training_step(worlds):
    [(_, expected)] = worlds.run(1, run_sanity, 1, 1)
    for order, weights in worlds.run(2, run_sanity, 2, 2):
        assert set(order) == {"val"}
        assert_same(weights, expected)


def run_small_batches(size, pp):
    ignore_warnings()
    model = AllSteps()
    trainer = trainer_of(size, pp, strategy_options={"num_microbatches": 4} if size > 1 else {})
    before = trainer.predict(model, loader(1, 5))
    trainer.fit(model, loader(4), loader(1, 3))
    fitted = float(trainer.callback_metrics["val"])
    tested = trainer.test(model, loader(2, 5), verbose=False)
    return before, trainer.predict(model, loader(1, 5)), fitted, tested, weights_of(model)


def test_evaluation_with_fewer_samples_than_microbatches(worlds):
    [expected] = worlds.run(1, run_small_batches, 1, 1)
    for actual in worlds.run(2, run_small_batches, 2, 2):
        torch.testing.assert_close(actual, expected)


# -- optimizers -------------------------------------------------------------------------------------------------------


class Optimizers(Tiny):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        if self.form == "groups":
            bias = [p for name, p in self.named_parameters() if "bias" in name]
            rest = [p for name, p in self.named_parameters() if "bias" not in name]
            return torch.optim.AdamW([{"params": bias, "weight_decay": 0.0}, {"params": rest, "lr": 0.01}], lr=0.02)
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.form == "lists":
            return [sgd], [torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)]
        if self.form == "step":
            scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1 / (1 + step))
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        if self.form == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, threshold=10.0)
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}
        if self.form == "cycle":
            total = self.trainer.estimated_stepping_batches
            return [sgd], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total), "interval": "step"}]
        return sgd


def run_optimizer(form, size, pp):
    ignore_warnings()
    model = Optimizers(form)
    trainer = trainer_of(size, pp, max_epochs=3, gradient_clip_val=0.5)
    trainer.fit(model, loader(8))
    return weights_of(model), [group["lr"] for group in trainer.optimizers[0].param_groups]


def also_in_idioms(form):
    """Among the forms of `idioms/parameters/test_optimizers.py` too."""
    return pytest.param(form, marks=pytest.mark.slow)


FORMS = [
    also_in_idioms("one"),
    "groups",
    also_in_idioms("lists"),
    also_in_idioms("step"),
    "plateau",
    also_in_idioms("cycle"),
]


@pytest.mark.parametrize("form", FORMS)
def test_optimizers_of_every_form_match_one_process(worlds, form):
    [(weights, rates)] = worlds.run(1, run_optimizer, form, 1, 1)
    for actual, our_rates in worlds.run(2, run_optimizer, form, 2, 2):
        assert_same(actual, weights)
        assert our_rates == pytest.approx(rates)


class TwoOptimizers(Tiny):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        first, *rest = self.layers
        return torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(nn.ModuleList(rest).parameters(), 0.1)


def run_two_optimizers(size):
    ignore_warnings()
    model = TwoOptimizers()
    trainer_of(size, 1).fit(model, loader(8 // size, replicas=1 if size == 1 else None))
    return weights_of(model)


def test_manual_optimization_averages_gradients_over_replicas(worlds):
    [expected] = worlds.run(1, run_two_optimizers, 1)
    for actual in worlds.run(2, run_two_optimizers, 2):
        assert_same(actual, expected)


# -- modules ----------------------------------------------------------------------------------------------------------


class Configured(LightningModule):
    """Layers made in configure_model; the loss in forward; a step without batch_idx."""

    def configure_model(self):
        if not hasattr(self, "layers"):
            torch.manual_seed(2)
            self.layers = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4))).double()

    def forward(self, x, y=None):
        out = self.layers(x).sum(1, keepdim=True)
        return out if y is None else {"loss": nn.functional.mse_loss(out, y), "out": out}

    def training_step(self, batch):
        return self(batch["x"], batch["y"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outs = [*getattr(self, "outs", []), outputs["out"].detach().clone()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def run_configured(size, pp):
    ignore_warnings()
    model = Configured()
    trainer_of(size, pp).fit(model, loader(8))
    return weights_of(model), model.outs


def test_configure_model_and_a_loss_in_forward(worlds):
    [(expected, outs)] = worlds.run(1, run_configured, 1, 1)
    for actual, our_outs in worlds.run(2, run_configured, 2, 2):
        assert_same(actual, expected)
        torch.testing.assert_close(our_outs, outs)


def run_init_module(size, pp, empty):
    ignore_warnings()
    trainer = trainer_of(size, pp)
    with trainer.init_module(empty_init=empty):
        model = Tiny()
    dtypes = {p.dtype for p in model.parameters()}
    if empty:
        model.load_state_dict(Tiny().state_dict())
    trainer.fit(model, loader(8))
    return dtypes, weights_of(model)


@pytest.mark.parametrize("empty", [True, False])
def test_init_module(worlds, empty):
    [(_, expected)] = worlds.run(1, run_init_module, 1, 1, empty)
    for _, actual in worlds.run(2, run_init_module, 2, 2, empty):
        assert_same(actual, expected)


# -- trainer options and callbacks ------------------------------------------------------------------------------------


class Logged(Tiny):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


OPTIONS = {
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 1, "max_epochs": 3},
    "detect_anomaly": {"detect_anomaly": True},
    "accumulate": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "double": {"precision": "64-true"},
    "val_interval": {"val_check_interval": 0.5, "limit_val_batches": 1},
}


def run_option(name, size, pp):
    ignore_warnings()
    model = AllSteps()
    trainer_of(size, pp, **OPTIONS[name]).fit(model, loader(4), loader(8))
    return weights_of(model)


# The others are also among those of `test_lightning_features.py`.
ALONE = ("accumulate", "double", "val_interval")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ALONE else [pytest.mark.slow]) for n in OPTIONS])
def test_trainer_options_match_one_process(worlds, name):
    [expected] = worlds.run(1, run_option, name, 1, 1)
    for actual in worlds.run(2, run_option, name, 2, 2):
        assert_same(actual, expected)


class RecordsSteps(Callback):
    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(trainer.global_step)


def run_callbacks(size, pp, folder):
    ignore_warnings()
    model = Logged()
    callbacks = [
        LearningRateMonitor("step"),
        GradientAccumulationScheduler({0: 1, 1: 2}),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch["x"]), window_size=2),
        TQDMProgressBar(),
        watches := RecordsSteps(),
    ]
    loggers = [CSVLogger(folder, "csv", flush_logs_every_n_steps=1), TensorBoardLogger(folder, "board")]
    trainer = trainer_of(
        size, pp, callbacks=callbacks, logger=loggers, log_every_n_steps=1, max_epochs=2, enable_progress_bar=True
    )
    trainer.fit(model, loader(4))
    return weights_of(model), watches.norms, float(trainer.logged_metrics["loss"])


def test_callbacks_and_loggers(worlds, tmp_path):
    [expected] = worlds.run(1, run_callbacks, 1, 1, str(tmp_path / "one"))
    for actual in worlds.run(2, run_callbacks, 2, 2, str(tmp_path / "two")):
        assert_same(actual[0], expected[0])
        assert actual[1] == expected[1]
        assert actual[2] == pytest.approx(expected[2])
    # What ThroughputMonitor logs depends on the size of the world.
    columns = [
        {name for name in path.read_text().splitlines()[0].split(",") if not name.startswith("train/")}
        for path in sorted(tmp_path.glob("*/csv/*/metrics.csv"))
    ]
    assert columns == [{"epoch", "loss", "lr-SGD", "step"}] * 2


def run_rich(size, pp):
    ignore_warnings()
    trainer_of(size, pp, callbacks=[RichProgressBar()], enable_progress_bar=True, enable_model_summary=True).fit(
        Logged(), loader(8)
    )
    return True


def test_rich_progress_bar_and_model_summary(worlds):
    assert worlds.run(2, run_rich, 2, 2) == [True, True]


def run_one_device():
    model = Logged()
    trainer = trainer_of(1, 1, strategy="hybrid3d")
    trainer.fit(model, loader(8))
    return weights_of(model), type(trainer.strategy).__name__


def run_reference():
    model = Logged()
    trainer_of(1, 1).fit(model, loader(8))
    return weights_of(model)


def test_hybrid3d_by_name_on_one_device(worlds):
    [(weights, name)] = worlds.run(1, run_one_device)
    assert name == "Hybrid3DStrategy"
    assert_same(weights, worlds.run(1, run_reference)[0])


# -- the command line -------------------------------------------------------------------------------------------------
