"""What a user sees of a run: the start table, schedulers that follow a metric, logger files, the progress bar."""

import csv
import inspect
import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from harness.fits import Run, fit, reference_of
from harness.trainer_runs import ignore_warnings, lines_of_lightning, trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.predict.ranks import RankMemory
from lightning_hybrid.run.description.lines import (
    describe_batch,
    describe_batch_norm,
    describe_embeddings,
    describe_environment,
    describe_memory,
    describe_overhead,
)
from lightning_hybrid.run.description.table import _file_and_line
from lightning_hybrid.techniques.offload import Offload
from lightning_hybrid.techniques.zero import Zero
from models.tiny import Tiny, loader


def test_options_that_others_build_on():
    found = inspect.signature(Hybrid3DStrategy.__init__).parameters
    positional = {name: p.default for name, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD and name != "self"}
    timeout = positional.pop("timeout")
    assert timeout.total_seconds() > 0
    assert list(positional.items()) == [
        ("data_parallel_size", "auto"),
        ("tensor_parallel_size", "auto"),
        ("pipeline_parallel_size", "auto"),
        ("num_microbatches", "auto"),
        ("schedule", "auto"),
        ("stages_per_rank", "auto"),
        ("pipeline_cuts", None),
        ("batch_splitter", None),
        ("process_group_backend", None),
    ]


class Validated(Tiny):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def unwrapped(table):
    return table.replace("\n    ", " ").splitlines()


def run_table():
    ignore_warnings()
    module = Validated()
    trainer = trainer_of(4, 2, strategy_options={"num_microbatches": 2}, max_epochs=2)
    with lines_of_lightning(as_printed=True) as lines:
        trainer.fit(module, loader(4), loader(4))
    return [line for line in lines if line.startswith("hybrid3d")]


def test_table_is_printed_once_and_shows_placement(worlds):
    first, *others = worlds.run(4, run_table)
    assert others == [[], [], []]
    [table] = first
    assert all(len(line) <= 100 for line in table.splitlines())
    head, batch, parameters, environment, titles, *stages, memory = unwrapped(table)
    assert head == "hybrid3d: 4 ranks = pipeline 2 x data 2 x tensor 1, schedule 1f1b"
    assert batch.startswith("batch: 8 samples = 2 replicas x 2 microbatches of 2; predicted bubble ")
    assert parameters == "parameters: 85 trained, 0 frozen"
    assert "4 ranks on 1 node, precision 32-true, backend gloo, lightning-hybrid " in environment
    assert memory == (
        "estimated memory per rank: up to 2.5 KB = 360 B parameters + 360 B gradients + 0 B optimizer states"
        " + 208 B activations in flight + 1.58 KB working memory"
    )
    assert [title.strip() for title in titles.split("  ") if title.strip()] == [
        "stage",
        "units",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "cost",
        "sends",
    ]
    rows = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in stages]
    assert [row[0] for row in rows] == ["0", "1"]
    assert [row[1] for row in rows] == ["layers.0 .. layers.1 (2)", "layers.2 .. layers.4 (3)"]
    assert [row[2] for row in rows] == ["320 B", "360 B"]  # of 64-bit numbers
    assert [row[3:5] for row in rows] == [["320 B", "0 B"], ["360 B", "0 B"]]
    # Two samples of four numbers: two results, in flight twice; what arrives, two results, and the loss's input.
    assert [row[5] for row in rows] == ["256 B", "208 B"]
    assert sum(int(row[6].removesuffix(" %")) for row in rows) == 100
    assert [row[7] for row in rows] == ["64 B to 1", "-"]


def fit_of_many_layers(folder):
    ignore_warnings()
    torch.manual_seed(0)
    options = {"num_microbatches": 2, "stages_per_rank": 9, "schedule": "interleaved_1f1b"}
    trainer = trainer_of(2, 2, strategy_options=options, logger=CSVLogger(folder, "csv"), limit_train_batches=1)
    with lines_of_lightning() as lines, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*exists and is not empty.*")
        trainer.fit(Tiny(layers=20), loader(4))
    return [line for line in lines if line.startswith("hybrid3d")]


def test_details_of_many_stages_are_in_a_file(worlds, tmp_path):
    [[table], others] = worlds.run(2, fit_of_many_layers, str(tmp_path))
    path = tmp_path / "csv" / "version_0" / "hybrid3d_layout.txt"
    lines = unwrapped(table)
    assert others == [] and len(lines) == 6 and lines[-1].endswith(f" lines on stages and layers: {path}")
    full = path.read_text().splitlines()
    assert [line for line in full if line in lines] == lines[:-1]
    assert len(full) == len(lines) - 1 + int(lines[-1].split()[0])
    assert full[4].startswith("stage  rank") and any(line.startswith("17     1") for line in full)


def fit_replicas(options):
    ignore_warnings()
    trainer = trainer_of(2, strategy_options={"data_parallel_size": 2, **options}, limit_train_batches=1)
    module = Tiny()
    module.layers[0].requires_grad_(False)
    with lines_of_lightning() as lines:
        trainer.fit(module, loader(4))
    return [line for line in lines if line.startswith("hybrid3d")]


class MakesLoader(Tiny):
    def train_dataloader(self):
        return loader(4)


def fit_with_loader_of_hook(options):
    ignore_warnings()
    trainer = trainer_of(2, strategy_options=options, limit_train_batches=1)
    with lines_of_lightning() as lines:
        trainer.fit(MakesLoader())
    return [line for each in lines for line in each.splitlines() if line.startswith("batch: ")]


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}])
def test_batches_of_a_loader_that_a_hook_makes_are_printed_once(worlds, options):
    [[line], others] = worlds.run(2, fit_with_loader_of_hook, options)
    assert line == f"batch: 8 samples = 2 replicas x {'2 microbatches of 2' if options else '4'}" and others == []


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, "8 samples = 2 replicas x 4"),
        ({"num_microbatches": 2}, "8 samples = 2 replicas x 2 microbatches of 2"),
    ],
)
def test_table_of_replicas(worlds, options, batch):
    [[table], _] = worlds.run(2, fit_replicas, options)
    head, batches, parameters, environment, memory = unwrapped(table)
    assert head == "hybrid3d: 2 ranks = pipeline 1 x data 2 x tensor 1" and batches == f"batch: {batch}"
    assert parameters == "parameters: 65 trained, 20 frozen" and environment.startswith(
        "environment: 2 ranks on 1 node"
    )
    assert memory == (
        "estimated memory per rank: 1.2 KB = 680 B parameters + 520 B gradients + 0 B optimizer states"
        "; the first step measures activations"
    )


MB = 10**6
STATES = RankMemory(50 * MB, 50 * MB, 100 * MB, None, 200 * MB)


@pytest.mark.parametrize(
    ("memory", "line"),
    [
        (
            STATES,
            "200 MB between steps (50 MB parameters + 50 MB gradients + 100 MB optimizer states), 400 MB within a step"
            " (200 MB gathered by ZeRO); the first step measures activations",
        ),
        (
            replace(STATES, activations=MB, places={"parameters": "files", "optimizer_states": "files"}),
            "50 MB between steps (50 MB gradients), 251 MB within a step (200 MB gathered by ZeRO + 1 MB activations in"
            " flight); in files 150 MB (50 MB parameters + 100 MB optimizer states)",
        ),
        (
            replace(STATES, gathered=0, activations=MB, places={"optimizer_states": "host"}),
            "101 MB = 50 MB parameters + 50 MB gradients + 1 MB activations in flight; on the host 100 MB"
            " (100 MB optimizer states)",
        ),
        (
            replace(STATES, gathered=0, activations=MB, optimizer_states=None),
            "101 MB = 50 MB parameters + 50 MB gradients + 1 MB activations in flight + unknown optimizer states",
        ),
    ],
)
def test_memory_between_steps_within_a_step_and_offloaded(memory, line):
    assert describe_memory([memory], is_upper_bound=False) == f"estimated memory per rank: {line}"


@pytest.mark.parametrize(
    ("stage", "per_layer", "names_option"), [(3, False, True), (3, True, False), (2, False, False)]
)
def test_zero_line_names_the_option_that_needs_less_memory(stage, per_layer, names_option):
    def line(reshard):
        technique = Zero(stage, [None])
        technique._per_layer = per_layer
        setting = SimpleNamespace(
            options=SimpleNamespace(reshard_after_forward=reshard), trainer=SimpleNamespace(callbacks=[])
        )
        [text] = technique.lines(
            SimpleNamespace(setting=setting, mesh=SimpleNamespace(size=lambda axis: 2, sharded_axes=()))
        )
        return text

    assert (
        line("auto").endswith(" (memory is ample; reshard_after_forward=True holds two layers at a time)")
        == names_option
    )
    assert "ample" not in line(per_layer)


@pytest.mark.parametrize(
    ("replicas", "accumulated", "microbatches", "loader_size", "line"),
    [
        (2, 1, None, 4, "8 samples = 2 replicas x 4"),
        (2, 2, None, 4, "16 samples = 2 replicas x 2 accumulated batches of 4"),
        (2, 1, 2, 5, "10 samples = 2 replicas x 2 microbatches of up to 3"),
        (2, 1, None, None, "2 replicas, each with its own batches"),
        (1, 1, None, None, "1 replica, batches of unknown size"),
        (2, 1, 2, None, "2 replicas x 2 microbatches of each batch"),
    ],
)
def test_batch_line_without_a_recorded_step(replicas, accumulated, microbatches, loader_size, line):
    data = None if loader_size is None else DataLoader(range(20), loader_size)
    loop = SimpleNamespace(_combined_loader=None, _data_source=SimpleNamespace(instance=data))
    setting = SimpleNamespace(
        layout=SimpleNamespace(data_parallel_size=replicas),
        trainer=SimpleNamespace(accumulate_grad_batches=accumulated, fit_loop=loop),
        options=SimpleNamespace(microbatches=microbatches),
    )
    assert describe_batch(SimpleNamespace(setting=setting), None, None) == f"batch: {line}"


@pytest.mark.parametrize(
    ("given", "samples", "flops", "fewer"),
    [(None, 16, 1e5, 2), (None, 16, 1e8, 0), (8, 16, 1e5, 0), (None, 11, 1e5, 0), (None, None, 1e5, 0)],
    ids=["small", "large operations", "given", "no divisor", "unknown"],
)
def test_line_on_small_default_microbatches(given, samples, flops, fewer):
    layout, options = SimpleNamespace(pipeline_parallel_size=2), SimpleNamespace(microbatches=given)
    run = SimpleNamespace(setting=SimpleNamespace(layout=layout, options=options))
    stages = SimpleNamespace(costs=lambda: [5 * flops, 5 * flops], graph=SimpleNamespace(nodes=[None] * 10))
    lines = describe_overhead(run, SimpleNamespace(samples=samples, num_microbatches=8), stages)
    assert [f"num_microbatches={fewer}, of 8 samples each" in line for line in lines] == [True] * bool(fewer)
    assert describe_overhead(run, SimpleNamespace(samples=16, num_microbatches=8), None) == []


@pytest.mark.parametrize(
    ("microbatches", "replicas", "layer_sync", "line"),
    [
        (1, 2, None, []),
        (4, 1, None, ["BatchNorm: 1 layer averages 8 samples (a microbatch), and 32 in one process"]),
        (4, 2, None, ["; Trainer(sync_batchnorm=True) adds those of the other replicas"]),
        (4, 2, object(), ["16 samples (a microbatch of all replicas), and 64 in one process"]),
        (2, 1, None, ["; num_microbatches=1 gives 32 (larger bubble)"]),
    ],
)
def test_batch_norm_line_has_both_numbers_of_samples(microbatches, replicas, layer_sync, line):
    setting = SimpleNamespace(
        module=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
        layout=SimpleNamespace(data_parallel_size=replicas, pipeline_parallel_size=2),
        trainer=SimpleNamespace(strategy=SimpleNamespace(_layer_sync=layer_sync)),
    )
    lines = describe_batch_norm(setting, SimpleNamespace(samples=32, num_microbatches=microbatches))
    assert len(lines) == len(line) and all(part in each for part, each in zip(line, lines, strict=True))
    if layer_sync is not None:
        assert "sync_batchnorm" not in lines[0]


@pytest.mark.parametrize(
    ("device", "offloaded", "says"),
    [
        ("cpu", {"optimizer_states": "cpu"}, True),
        ("cpu", {"optimizer_states": "disk:/x"}, False),
        ("cuda", {"optimizer_states": "cpu"}, False),
    ],
)
def test_offload_to_the_host_is_said_to_change_nothing_on_a_cpu_device(device, offloaded, says):
    run = SimpleNamespace(setting=SimpleNamespace(device=torch.device(device)))
    lines = Offload(offloaded).lines(run)[1:]
    assert lines == ["offload: 'cpu' changes no memory on a CPU device; 'disk:PATH' does"] * says


def test_lines_of_installed_packages_are_named_with_the_package():
    assert _file_and_line("/env/lib/site-packages/transformers/loss/loss_utils.py:42") == (
        "transformers/loss/loss_utils.py:42"
    )
    assert _file_and_line("/home/user/train.py:31") == "train.py:31"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_line_says_what_was_not_tried(device):
    world = SimpleNamespace(num_nodes=2, num_processes=8)
    strategy = SimpleNamespace(parallel_devices=[torch.device(device)])
    setting = SimpleNamespace(
        world=world,
        trainer=SimpleNamespace(strategy=strategy),
        precision=SimpleNamespace(precision="bf16-mixed"),
        device=torch.device(device),
    )
    environment, *cuda = describe_environment(setting)
    assert environment.startswith("environment: 8 ranks on each of 2 nodes, precision bf16-mixed, ")
    assert len(cuda) == (device == "cuda") and all("several GPUs, NCCL" in line for line in cuda)


# --- rates that follow a metric ---------------------------------------------------------------------------------------


class Plateau(Tiny):
    """The metric rises in some epochs and falls in others."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) + (0.5 if self.current_epoch in (2, 3, 5) else 0.0), sync_dist=True)

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, factor=0.5)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Rates(Callback):
    def __init__(self):
        self.recorded = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.recorded.append(trainer.optimizers[0].param_groups[0]["lr"])


def run_plateau(size, pp):
    ignore_warnings()
    rates = Rates()
    options = {"num_microbatches": 2} if size > 1 else {}
    trainer = trainer_of(size, pp, max_epochs=7, callbacks=[rates], strategy_options=options)
    batch_size, replicas = 8 * pp // size, 1 if size == pp else None
    trainer.fit(Plateau(), loader(batch_size, replicas=replicas), loader(batch_size))
    return rates.recorded


def test_plateau_scheduler_steps_on_all_ranks(worlds):
    [expected] = worlds.run(1, run_plateau, 1, 1)
    assert len(set(expected)) == 4 and expected[:3] == [0.05] * 3, "it must fall in some epochs and not in others"
    for size in (2, 4):
        assert worlds.run(size, run_plateau, size, 2) == [expected] * size


# --- a loss scale -----------------------------------------------------------------------------------------------------


def without_first_layers(module):
    plain = module.loss
    module.loss = lambda batch: plain(batch) * 1e3
    module.optimizer = "sgd"
    module.layers[:2].requires_grad_(False)


def test_loss_scale_changes_on_all_ranks_with_a_frozen_stage(worlds):
    options = {"dtype": torch.float32, "precision": "16-mixed", "num_batches": 4, "change": without_first_layers}
    run = Run("Layers", pp=2, **options)
    expected = reference_of(worlds, run)
    ranks = worlds.run(2, fit, run)
    assert ranks[0].units[0] == ["layers.0", "layers.1"], "the first stage must be fully frozen"
    assert not any(ranks[0].grads), "it has no gradients"
    assert 1.0 < expected.scale < 2.0**16, "gradients must have overflown"
    assert [rank.scale for rank in ranks] == [expected.scale] * 2


# --- loggers and the bar ----------------------------------------------------------------------------------------------


class Logged(Tiny):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("hidden", self.layers[0](batch["x"]).mean(), prog_bar=True)  # on the first stage
        return loss


def run_loggers(size, pp, folder):
    ignore_warnings()
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch["x"]), window_size=2)
        trainer = trainer_of(
            size,
            pp,
            callbacks=[monitor, TQDMProgressBar(refresh_rate=1)],
            logger=[CSVLogger(folder, "csv", flush_logs_every_n_steps=1), TensorBoardLogger(folder, "board")],
            log_every_n_steps=1,
            enable_progress_bar=True,
            max_epochs=2,
        )
        trainer.fit(Logged(), loader(4))
    shown = (out.getvalue() + err.getvalue()).replace("\r", "\n").splitlines()
    last = [line.split("hidden=")[1] for line in shown if "hidden=" in line][-1:]
    return [line.split(",")[0].strip() for line in last], [line.count("loss=") for line in shown if "loss=" in line][
        -1:
    ]


def numbers_of(folder):
    [path] = folder.glob("csv/*/metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    [board] = folder.glob("board/*")
    events = EventAccumulator(str(board)).Reload()
    return {
        "csv": [(int(row["step"]), float(row["loss"]), float(row["hidden"])) for row in rows if row["loss"]],
        "samples": [float(row["train/samples"]) for row in rows if row.get("train/samples")],
        "board": [(event.step, event.value) for event in events.Scalars("loss")],
    }


def test_loggers_and_progress_bar_match_one_process(worlds, tmp_path):
    [(bar, _)] = worlds.run(1, run_loggers, 1, 1, tmp_path / "one")
    expected = numbers_of(tmp_path / "one")
    assert bar and len(expected["csv"]) == len(expected["board"]) == 8 and expected["samples"]
    first, second = worlds.run(2, run_loggers, 2, 2, tmp_path / "two")
    assert first == (bar, [1]) and second == ([], []), "one rank has a bar"
    found = numbers_of(tmp_path / "two")
    assert found["samples"] == expected["samples"]
    for kind in ("csv", "board"):
        for row, known in zip(found[kind], expected[kind], strict=True):
            assert row == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize(("replicas", "num_lines"), [(1, 0), (2, 2)])
def test_embeddings_that_differ_between_replicas_are_named(replicas, num_lines):
    words = torch.nn.Sequential(
        torch.nn.Embedding(4, 2, max_norm=1.0), torch.nn.Embedding(4, 2, scale_grad_by_freq=True)
    )
    setting = SimpleNamespace(module=words, layout=SimpleNamespace(data_parallel_size=replicas))
    assert [line[:2] for line in describe_embeddings(setting)] == ["1:", "0:"][:num_lines]
