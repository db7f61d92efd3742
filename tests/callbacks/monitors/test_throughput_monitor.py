"""ThroughputMonitor counts the FLOPs of a step, tokens, waits and messages, equally under all layouts."""

import pickle
from unittest import mock

import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from harness.fits import trainer_of
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import ThroughputMonitor
from lightning_hybrid.callbacks.monitors import throughput
from lightning_hybrid.callbacks.monitors.throughput import StepFlopCounter
from models.cases import Samples, make
from models.hand_written import LENGTH, WIDTH
from models.plain_gpt import PlainGPT

BATCH = 4


class GPT(PlainGPT):
    """Its embedding and its first block are frozen: a part of the backward is left out."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.h[0].requires_grad_(False)


class Records(CSVLogger):
    def log_metrics(self, metrics, step=None):
        self.seen = {**getattr(self, "seen", {}), **metrics}


def counted_by_torch():
    module = make(GPT)
    batch = next(iter(DataLoader(Samples("tokens", BATCH), batch_size=BATCH)))
    with FlopCounterMode(display=False) as counter:
        module.loss(batch).backward()
    return counter.get_total_flops()


def fit(devices, options, folder, monitor=None, module=GPT, **trainer_options):
    ignore_warnings()
    monitor = monitor or ThroughputMonitor(window_size=2, available_flops=1e9)
    logger = Records(folder)
    strategy = None if options is None else Hybrid3DStrategy(**options)
    loader = DataLoader(Samples("tokens", 8 * BATCH), batch_size=BATCH)
    defaults = {"max_steps": 4, "logger": logger, "log_every_n_steps": 1}
    trainer_of(devices, strategy, [monitor], **{**defaults, **trainer_options}).fit(make(module), loader)
    return monitor.flops_per_sample, getattr(logger, "seen", {})


TRAINED = sum(p.nbytes for p in make(GPT).parameters() if p.requires_grad)
HIDDEN = 8 * BATCH * LENGTH * WIDTH  # bytes of the hidden states of a batch
# Layouts, and bytes that a rank sends along an axis by the formulas of docs/communication.md.
LAYOUTS = [
    (2, {}, ("data", TRAINED)),
    (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}, ("pipeline", HIDDEN)),
    (2, {"tensor_parallel_size": 2}, None),
    (2, {"context_parallel_size": 2}, None),
    (2, {"zero_stage": 3, "recompute": "full"}, None),
    (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "recompute": "full"}, None),
]


@pytest.mark.parametrize(("devices", "options", "sent"), LAYOUTS, ids=str)
def test_flops_are_those_that_torch_counts_in_one_process(worlds, tmp_path, devices, options, sent):
    expected = counted_by_torch()
    flops, seen = worlds.run(devices, fit, devices, options, str(tmp_path))[0]
    assert flops * BATCH == expected
    assert seen["train/flops_per_sec"] == pytest.approx(seen["train/batches_per_sec"] * expected)
    assert seen["train/device/mfu"] == pytest.approx(seen["train/flops_per_sec"] / devices / 1e9)
    assert seen["train/items_per_sec"] == pytest.approx(seen["train/batches_per_sec"] * BATCH * LENGTH)
    assert seen["train/samples_per_sec"] == pytest.approx(seen["train/batches_per_sec"] * BATCH)
    assert 0 < seen["train/input_wait_share"] < 1
    if sent is not None:
        axis, nbytes = sent
        assert 0 <= seen[f"train/sent_bytes/{axis}"] - nbytes <= 2048  # flags of gradients, logged numbers


class Branches(GPT):
    """It branches on a value of the model, so that no recording has all of its operations."""

    def loss(self, batch):
        x = self.embed(batch["input_ids"])
        for block in self.h:
            x = block(x)
            if x.mean().item() > 1e9:
                x = x / 2
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


def fit_branches(devices, options, folder):
    with mock.patch.object(throughput, "rank_zero_info") as info:
        flops, seen = fit(devices, options, folder, module=Branches)
    return flops, seen, [call.args[0] for call in info.call_args_list]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"context_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "num_microbatches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_flops_of_steps_that_are_not_recorded_are_right_or_left_out(worlds, tmp_path, options):
    (flops, seen, lines), _ = worlds.run(2, fit_branches, 2, options, str(tmp_path))
    names = {name for name in seen if "flops" in name or "mfu" in name}
    if flops is None:
        [line] = lines
        assert line.startswith("ThroughputMonitor logs no FLOPs: ") and "the training step could not" in line
        assert not names
    else:
        assert flops * BATCH == counted_by_torch()
        assert names and not lines


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("options", [None, {"recompute": "full"}, {"num_microbatches": 2}], ids=str)
def test_one_device_counts_the_same(tmp_path, options, accumulated):
    flops, seen = fit(1, options, tmp_path, accumulate_grad_batches=accumulated)
    assert flops * BATCH == counted_by_torch()
    assert seen["train/device/tflops_per_sec"] == pytest.approx(seen["train/flops_per_sec"] / 1e12)
    assert not [name for name in seen if "sent_bytes" in name]


def test_share_of_waits_for_input(tmp_path):
    """Each reading of the clock adds half a second: one wait between two readings, of all readings of a step."""
    clock = mock.Mock(side_effect=(n / 2 for n in range(1000)))
    with mock.patch.object(throughput, "perf_counter", clock):
        _, seen = fit(1, None, tmp_path)
    assert seen["train/input_wait_share"] == pytest.approx(1 / 3)  # before the fetch, after it, at the log


def test_module_counts_its_own_flops_and_finds_no_tokens(tmp_path):
    class Own(GPT):
        flops_per_batch = 12.0

    ignore_warnings()
    monitor, logger = ThroughputMonitor(window_size=2, batch_size_fn=lambda batch: 2), Records(tmp_path)
    monitor._finds_tokens = False
    loader = DataLoader(Samples("tokens", 8 * BATCH), batch_size=BATCH)
    trainer_of(1, None, [monitor], max_steps=3, logger=logger, log_every_n_steps=1).fit(make(Own), loader)
    assert logger.seen["train/flops_per_sec"] == pytest.approx(12 * logger.seen["train/batches_per_sec"])
    assert logger.seen["train/samples_per_sec"] == pytest.approx(2 * logger.seen["train/batches_per_sec"])
    assert "train/items_per_sec" not in logger.seen and "train/device/mfu" not in logger.seen


def test_attention_of_the_cpu_counts_as_that_of_a_gpu():
    query = torch.randn(2, 3, 8, 4, requires_grad=True)
    with StepFlopCounter() as counter:
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    assert counter.flops == 3.5 * 2 * (2 * 2 * 3 * 8 * 8 * 4)  # two products forward, five backward


def test_it_is_pickled_after_a_run(tmp_path):
    monitor = ThroughputMonitor(window_size=2)
    fit(1, None, tmp_path, monitor)
    assert pickle.loads(pickle.dumps(monitor)).flops_per_sample == monitor.flops_per_sample
    assert isinstance(monitor, lightning_callbacks.ThroughputMonitor)


@pytest.mark.parametrize("options", [{"window_size": 1}, {"available_flops": 0}], ids=str)
def test_refused_values(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ThroughputMonitor(**options)


def test_batch_without_samples_is_refused():
    with pytest.raises(ValueError, match="batch_size_fn"):
        ThroughputMonitor().batch_size_fn("text")
