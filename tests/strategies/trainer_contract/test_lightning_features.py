"""Lightning's callbacks and Trainer options under stages and replicas match one process."""

import os
from datetime import timedelta
from unittest import mock

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
    device_stats_monitor,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.feature_runs import LAYOUTS, SHARED_OUT, check
from harness.layouts import each_under_names
from models.transfer_learning import Net

EVERYWHERE = {**LAYOUTS, **SHARED_OUT}

# -- Trainer options --------------------------------------------------------------------------------------------------

OPTIONS = {
    "overfit_batches": {"overfit_batches": 1, "max_epochs": 3},
    "fast_dev_run": {"fast_dev_run": 2},
    "detect_anomaly": {"detect_anomaly": True},
    "max_time": {"max_time": timedelta(hours=1), "max_epochs": 2},
    "max_time_over": {"max_time": timedelta(0)},
    "max_steps": {"max_steps": 3, "max_epochs": 5},
    "val_check_interval": {"val_check_interval": 0.5},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "val_check_over_epochs": {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": 2},
    "reload_dataloaders": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "clip_norm": {"gradient_clip_val": 0.1},
    "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clip_accumulated": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 2},
}


class Option:
    def __init__(self, name):
        self.name = name

    def __call__(self, run):
        module = Net()
        trainer = run.trainer(**OPTIONS[self.name])
        trainer.fit(module, run.data(), run.val_data())
        return run.numbers(trainer, module)

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name


COVERED_OPTIONS = {
    "clip_norm": "clip_accumulated",
    "max_time": "max_time_over",
    "val_check_over_epochs": "val_check_interval",
}
OF_REPLICAS = ["overfit_batches", "clip_accumulated", "limits"]


@each_under_names("name", list(OPTIONS), EVERYWHERE, replicated=OF_REPLICAS, covered_by=COVERED_OPTIONS)
def test_trainer_options(worlds, tmp_path, name, layout):
    check(worlds, tmp_path, Option(name), layout)


# -- averages of weights ----------------------------------------------------------------------------------------------


def swa(run):
    module = Net()
    trainer = run.trainer(callbacks=[StochasticWeightAveraging(0.02, 1, 2)], max_epochs=4)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module)


def ema(run):
    module = Net()
    average = EMAWeightAveraging(decay=0.7, update_every_n_steps=2)
    trainer = run.trainer(callbacks=[average], max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module)


def mean_of_epochs(run):
    class ByEpoch(WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None

    module = Net()
    trainer = run.trainer(callbacks=[ByEpoch()], max_epochs=2)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module)


# -- searches ---------------------------------------------------------------------------------------------------------


def lr_finder(run):
    module = Net()
    finder = LearningRateFinder(num_training_steps=8, min_lr=1e-3, max_lr=0.5)
    trainer = run.trainer(callbacks=[finder], max_epochs=2)
    trainer.fit(module, run.data(), run.val_data())
    results = {f"found {k}": torch.tensor(v, dtype=torch.float64) for k, v in finder.optimal_lr.results.items()}
    return run.numbers(trainer, module, chosen=module.lr, **results)


def tuner_lr_find(run):
    module = Net()
    trainer = run.trainer(max_epochs=1)
    found = Tuner(trainer).lr_find(module, run.data(), run.val_data(), num_training=8, min_lr=1e-3, max_lr=0.5)
    results = {f"found {k}": torch.tensor(v, dtype=torch.float64) for k, v in found.results.items()}
    between = {f"before {name}": p.detach().clone() for name, p in module.named_parameters()}
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module, chosen=module.lr, **results, **between)


# -- schedules of what is trained -------------------------------------------------------------------------------------


def finetuning(run):
    module = Net()
    callback = BackboneFinetuning(1, backbone_initial_ratio_lr=0.1, lambda_func=double)
    trainer = run.trainer(callbacks=[callback], max_epochs=3)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module)


def double(epoch):
    return 2.0


def accumulation(run):
    module = Net()
    trainer = run.trainer(callbacks=[GradientAccumulationScheduler({1: 2, 2: 4})], max_epochs=3)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module)


# -- ends -------------------------------------------------------------------------------------------------------------


def timer(run):
    module, timer = Net(), Timer("00:01:00:00")
    trainer = run.trainer(callbacks=[timer], max_epochs=2)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module, timed=timer.time_elapsed("train") > 0)


def early_stopping(run):
    module = Net(lr=1.5)
    trainer = run.trainer(callbacks=[EarlyStopping("val", patience=1)], max_epochs=20)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module, stopped=trainer.current_epoch < 20)


def best_and_last(run):
    """Equal file names; validate, test and predict read the best and the last."""
    module = Net(lr=0.5)
    saved = ModelCheckpoint(
        f"{run.folder}/saved", "{step}", monitor="val", save_top_k=2, save_last=True, every_n_train_steps=None
    )
    every = ModelCheckpoint(f"{run.folder}/every", "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = run.trainer(callbacks=[saved, every], max_epochs=4, enable_checkpointing=True)
    trainer.fit(module, run.data(), run.val_data())
    numbers = run.numbers(trainer, module, best=float(saved.best_model_score))
    trainer.strategy.barrier()
    for folder in ("saved", "every"):
        numbers |= {f"{folder} {name}": 1 for name in sorted(os.listdir(f"{run.folder}/{folder}"))}
    for path in ("best", "last"):
        [found] = trainer.validate(dataloaders=run.val_data(), ckpt_path=path, verbose=False)
        numbers |= {f"{path} {name}": value for name, value in found.items()}
        [found] = trainer.test(module, run.val_data(), ckpt_path=path, verbose=False)
        numbers |= {f"{path} {name}": value for name, value in found.items()}
        predicted = torch.cat(trainer.predict(module, run.val_data(), ckpt_path=path))
        numbers[f"{path} predicted"] = trainer.strategy.reduce(predicted.sum(), reduce_op="sum")
    return numbers


# -- observers --------------------------------------------------------------------------------------------------------


class Shown(Net):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.ones(2, 4, dtype=torch.float64)


def shown(run):
    module = Shown()
    logger = CSVLogger(run.folder, flush_logs_every_n_steps=1)
    trainer = run.trainer(
        callbacks=[ModelSummary(-1), TQDMProgressBar(), LearningRateMonitor("step", log_momentum=True)],
        logger=logger,
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module)


class ShownDistribution(Net):
    """Its forward checks values of the model where the summary runs it."""

    def __init__(self):
        super().__init__()
        self.example_input_array = torch.ones(2, 4, dtype=torch.float64)

    def forward(self, x):
        out = super().forward(x)
        return out if self.training else torch.distributions.Normal(out, out.exp()).mean


def shown_distribution(run):
    module = ShownDistribution()
    trainer = run.trainer(callbacks=[ModelSummary(-1)], enable_model_summary=True)
    trainer.fit(module, run.data())
    return run.numbers(trainer, module)


def graph(run):
    module = Shown()
    trainer = run.trainer(logger=TensorBoardLogger(run.folder, log_graph=True))
    trainer.fit(module, run.data(), run.val_data())
    trainer.validate(module, run.val_data(), verbose=False)
    trainer.strategy.barrier()
    events = EventAccumulator(trainer.logger.log_dir).Reload()
    return run.numbers(trainer, module, nodes=len(events.Graph().node))


def throughput(run):
    module = Net()
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch["x"]), window_size=2)
    trainer = run.trainer(callbacks=[monitor], logger=CSVLogger(run.folder, flush_logs_every_n_steps=1))
    trainer.fit(module, run.data(), run.val_data())
    replicas = 1 if run.plain else trainer.strategy.layout.data_parallel_size
    # Samples of all ranks per second, by those of one replica.
    counted = monitor._throughputs[RunningStage.TRAINING].world_size / replicas
    return run.numbers(trainer, module, counted=counted)


def device_stats(run):
    module = Net()
    trainer = run.trainer(callbacks=[DeviceStatsMonitor()], logger=CSVLogger(run.folder, flush_logs_every_n_steps=1))
    # Its CPU statistics need another package.
    known = mock.patch.object(device_stats_monitor, "_PSUTIL_AVAILABLE", True, create=True)
    with known, mock.patch.object(CPUAccelerator, "get_device_stats", lambda self, device: {"cpu_percent": 1.0}):
        trainer.fit(module, run.data(), run.val_data())
    trainer.strategy.barrier()
    with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
        columns = [name for name in file.readline().strip().split(",") if "cpu_percent" in name]
    return run.numbers(trainer, module, **{f"column {name.rpartition('/')[2]}": 1 for name in columns})


def rich(run):
    module = Net()
    trainer = run.trainer(callbacks=[RichProgressBar()], enable_progress_bar=True, enable_model_summary=True)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module)


def profiled(make):
    def fit(run):
        module = Net()
        trainer = run.trainer(profiler=make(run.folder))
        trainer.fit(module, run.data(), run.val_data())
        return run.numbers(trainer, module)

    return fit


def simple_profiler(run):
    return profiled(lambda folder: SimpleProfiler(folder, "simple"))(run)


def advanced_profiler(run):
    return profiled(lambda folder: AdvancedProfiler(folder, "advanced"))(run)


def pytorch_profiler(run):
    return profiled(lambda folder: PyTorchProfiler(folder, "torch", export_to_chrome=False))(run)


CALLBACKS = [
    swa,
    ema,
    mean_of_epochs,
    lr_finder,
    tuner_lr_find,
    finetuning,
    accumulation,
    timer,
    early_stopping,
    best_and_last,
    shown,
    shown_distribution,
    graph,
    throughput,
    device_stats,
    rich,
    simple_profiler,
    advanced_profiler,
    pytorch_profiler,
]


# What all replicas did counts for these.
OVER_REPLICAS = [mean_of_epochs, lr_finder, early_stopping]
# Between their hooks the other profilers are Lightning's code only.
COVERED = {tuner_lr_find: lr_finder, pytorch_profiler: simple_profiler, advanced_profiler: simple_profiler}


@each_under_names("feature", CALLBACKS, EVERYWHERE, replicated=OVER_REPLICAS, covered_by=COVERED)
def test_callbacks(worlds, tmp_path, feature, layout):
    check(worlds, tmp_path, feature, layout)
