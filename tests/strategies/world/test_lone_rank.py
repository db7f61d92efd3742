"""What one rank does alone is answered or refused at once, and the run goes on; also metrics updated differently."""

import copy
import io
import pickle

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.errors import NotOnAllRanks, RanksDisagree
from models.tiny import FEATURES, Tiny, loader


class Logs(Tiny):
    """Its hyperparameters contain a metric that it updates."""

    def __init__(self, metric):
        super().__init__()
        self.save_hyperparameters()
        self.metric, self.val_metrics = metric, torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError()])

    def training_step(self, batch, batch_idx):
        out = self(batch["x"])
        self.metric.update(out, batch["y"])
        loss = torch.nn.functional.mse_loss(out, batch["y"])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("error", self.metric.compute())
        self.metric.reset()

    def validation_step(self, batch, batch_idx):
        self.val_metrics.update(self(batch["x"]), batch["y"])
        self.log_dict(self.val_metrics)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def answered(trainer, module):
    """Calls that need nothing of other ranks."""
    strategy, logger = trainer.strategy, trainer.logger
    properties = [name for name in dir(type(strategy)) if isinstance(getattr(type(strategy), name, None), property)]
    return [
        lambda: [str(module.metric), repr(module), repr(strategy), repr(trainer.optimizers[0])],
        lambda: [str(module.hparams), module.hparams_initial, logger.log_hyperparams(module.hparams_initial)],
        lambda: [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics],
        lambda: [getattr(strategy, name, None) for name in properties],
        lambda: [module.metric.state_dict(), sum(parameter.numel() for parameter in module.parameters())],
        lambda: [(callback.state_dict(), repr(callback)) for callback in trainer.callbacks],
        lambda: [trainer.precision_plugin.state_dict(), logger.save()],
    ]


def collective(trainer, module):
    """Calls that may need other ranks."""
    optimizer = trainer.optimizers[0]
    return [
        *(lambda thing=thing: pickle.dumps(thing) for thing in (module.metric, module.val_metrics, module.hparams)),
        lambda: copy.deepcopy(module.metric),
        lambda: module.metric.clone().compute(),
        module.metric.compute,
        module.state_dict,
        module.layers.state_dict,
        optimizer.state_dict,
        lambda: pickle.dumps(optimizer),
        lambda: copy.deepcopy(optimizer),
        lambda: torch.save(module.layers, io.BytesIO()),
        lambda: copy.deepcopy(module),
        lambda: [str(parameter) for parameter in module.parameters()],
        lambda: [float(parameter.norm()) for parameter in module.parameters()],
        lambda: [parameter.grad is not None and float(parameter.grad.norm()) for parameter in module.parameters()],
        lambda: module(torch.zeros(2, FEATURES, dtype=torch.float64)),
        trainer.strategy.lightning_module_state_dict,
        lambda: trainer.strategy.optimizer_state(optimizer),
    ]


class Alone(Callback):
    """Makes all calls on one rank, in one hook."""

    def __init__(self, rank, where):
        self.rank, self.where, self.refused, self.count = rank, where, [], 0

    def calls(self, where, trainer, module):
        self.count += where == self.where
        if where != self.where or self.count != 3 or trainer.strategy.mesh.rank != self.rank:
            return
        for call in answered(trainer, module):
            call()
        for call in collective(trainer, module):
            try:
                call()
            except (NotOnAllRanks, RanksDisagree) as error:
                self.refused.append(str(error))
            except RuntimeError as error:
                assert "state_dict() was called while" in str(error)

    def on_train_batch_end(self, trainer, module, *_):
        self.calls("training", trainer, module)

    def on_validation_batch_end(self, trainer, module, *_):
        self.calls("validation", trainer, module)


def run_alone(size, pp, options, rank, where, folder):
    ignore_warnings()
    alone = Alone(rank, where)
    logger = CSVLogger(folder)
    trainer = trainer_of(size, pp, strategy_options=options, callbacks=[alone], max_epochs=1, logger=logger)
    trainer.fit(Logs(torchmetrics.MeanAbsoluteError()), loader(2), loader(2))
    return alone.refused, float(trainer.callback_metrics["loss"])


OPTIONS = {
    "dp2": (2, 1, {}),
    "zero1": (2, 1, {"zero_stage": 1}),
    "zero2": (2, 1, {"zero_stage": 2}),
    "zero3": (2, 1, {"zero_stage": 3}),
    "zero3 layerwise": (2, 1, {"zero_stage": 3, "reshard_after_forward": True}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "dp2 x pp2": (4, 2, {"num_microbatches": 2}),
    "pp2 x tp2": (4, 2, {"tensor_parallel_size": 2}),
    "pp2": (2, 2, {"num_microbatches": 2}),
}
SLOW = ("zero1", "zero2", "zero3", "tp2", "dp2 x pp2", "pp2 x tp2")


@pytest.mark.parametrize("where", ["training", pytest.param("validation", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OPTIONS])
def test_calls_on_one_rank_wait_for_no_other(worlds, name, where, tmp_path):
    size, pp, options = OPTIONS[name]
    for rank in (0, size - 1):
        results = worlds.run(size, run_alone, size, pp, options, rank, where, str(tmp_path), timeout=40)
        assert len({loss for _, loss in results}) == 1  # the run has gone on
        assert all("needs all" in text and f"on rank {rank} " in text for text in results[rank][0])
        assert results[rank][0], "nothing was refused"


class Kept(torchmetrics.Metric):
    def __init__(self, reduce):
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx=reduce)

    def update(self, values):
        self.seen.append(values)

    def compute(self):
        return torchmetrics.utilities.dim_zero_cat(self.seen).sum()


class UpdatesDifferently(Tiny):
    """One replica updates its metric in each batch, the other in one or none."""

    def __init__(self, reduce, updates):
        super().__init__()
        self.kept, self.updates = Kept(reduce), updates

    def training_step(self, batch, batch_idx):
        out = self(batch["x"])
        if batch_idx < (2 if self.trainer.global_rank == 0 else self.updates):
            self.kept.update(torch.ones(1, 3, dtype=torch.float64))
        return torch.nn.functional.mse_loss(out, batch["y"])

    def on_train_epoch_end(self):
        self.total = float(self.kept.compute())


def run_differently(reduce, updates, options):
    ignore_warnings()
    model = UpdatesDifferently(reduce, updates)
    try:
        trainer_of(2, 1, strategy_options=options).fit(model, loader(4))
    except RanksDisagree as error:
        return str(error)
    return model.total


@pytest.mark.parametrize("options", [{}, {"zero_stage": 1}], ids=str)
def test_a_list_that_replicas_update_differently_is_named_with_both_numbers(worlds, options):
    for text in worlds.run(2, run_differently, None, 1, options, timeout=30):
        assert (
            "the metric 'kept' (Kept) was updated [2, 1] times" in text and "[2, 1] tensors in its list 'seen'" in text
        )
    assert worlds.run(2, run_differently, "cat", 0, options, timeout=30) == [6.0, 6.0]
