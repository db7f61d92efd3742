"""MemoryMonitor measures what a rank holds, beside the prediction, and explains out-of-memory errors."""

import pickle

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import MemoryMonitor, ThroughputMonitor
from lightning_hybrid.callbacks.monitors.holders import PeakMeter
from lightning_hybrid.errors import is_out_of_memory
from models.cases import Samples, make
from models.hand_written import Layers

BATCH = 4


class Stack(Layers):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Exhausted(Stack):
    """The third batch needs more memory than there is."""

    def __init__(self):
        super().__init__()
        self.error = MemoryError("no room")

    def training_step(self, batch, batch_idx=0):
        if batch_idx == 2:
            raise self.error
        return super().training_step(batch, batch_idx)


class Records(CSVLogger):
    def log_metrics(self, metrics, step=None):
        self.seen = {**getattr(self, "seen", {}), **metrics}


def fit(devices, options, monitor, folder, module=None, further=(), **arguments):
    ignore_warnings()
    module = module or make(Stack)
    logger = Records(folder)
    loader = DataLoader(Samples(module.kind, 8 * BATCH), batch_size=BATCH)
    strategy = None if options is None else Hybrid3DStrategy(**options)
    defaults = {"max_steps": 3, "logger": logger, "default_root_dir": folder}
    trainer_of(devices, strategy, [monitor, *further], **{**defaults, **arguments}).fit(module, loader)
    return monitor.measured, getattr(logger, "seen", {})


def on_rank(devices, options, folder):
    return fit(devices, options, MemoryMonitor(), folder)


def parameter_bytes():
    return sum(p.nbytes for p in make(Stack).parameters())


def test_one_device_holds_parameters_gradients_and_two_states(tmp_path):
    nbytes, steps = parameter_bytes(), 4 * len(list(make(Stack).parameters()))
    [rank], seen = fit(1, {}, MemoryMonitor(tmp_path / "memory.svg"), tmp_path)
    assert rank["parameters"] == rank["gradients"] == rank["predicted_parameters"] == nbytes
    assert rank["optimizer_states"] == 2 * nbytes + steps  # AdamW's two moments and its numbers of steps
    assert rank["peak"] == sum(rank[kind] for kind in ("parameters", "gradients", "optimizer_states", "rest"))
    assert rank["rest"] > 0
    assert seen["memory/peak"] == seen["memory/peak/rank_0"] == rank["peak"]
    assert seen["memory/predicted_peak"] == rank["predicted_total"]
    assert "<svg" in (tmp_path / "memory.svg").read_text()


def test_peak_is_that_of_tensors(tmp_path):
    """Memory that is allocated and freed in a step is in its peak, and only once."""

    class Allocates(Stack):
        def training_step(self, batch, batch_idx=0):
            for _ in range(3):
                torch.zeros(2**22, dtype=torch.uint8)
            return super().training_step(batch, batch_idx)

    [rank], _ = fit(1, None, MemoryMonitor(), tmp_path, make(Allocates))
    assert 2**22 <= rank["rest"] + rank["gradients"] < 2**22 + 2**21
    assert rank["predicted_total"] == -1  # another strategy predicts nothing


def test_released_memory_of_several_tensors_counts_once():
    bucket = torch.zeros(2**20, dtype=torch.uint8)
    meter = PeakMeter(torch.device("cpu"))
    meter.start(bucket.split(2**18))
    del bucket
    held = torch.zeros(2**22, dtype=torch.uint8)
    assert meter.stop(2**20) == pytest.approx(held.nbytes, abs=2**12)


def test_releases_of_memory_of_earlier_measurements_do_not_count():
    """Torch's profiler reports these, with the sizes that their addresses had."""
    first, second = PeakMeter(torch.device("cpu")), PeakMeter(torch.device("cpu"))
    first.start()
    earlier, gradient = torch.zeros(2**20, dtype=torch.uint8), torch.zeros(2**18, dtype=torch.uint8)
    assert first.stop(0) == pytest.approx(2**20 + 2**18, abs=2**12)
    second.start([gradient])
    del earlier, gradient
    held = torch.zeros(2**22, dtype=torch.uint8)
    assert second.stop(2**18) == pytest.approx(held.nbytes, abs=2**12)


@pytest.mark.parametrize("options", [{"zero_stage": 3}, {"pipeline_parallel_size": 2}], ids=str)
def test_each_rank_holds_what_is_predicted(worlds, tmp_path, options):
    ranks, seen = worlds.run(2, on_rank, 2, options, str(tmp_path))[0]
    assert len(ranks) == 2
    for number, rank in enumerate(ranks):
        assert rank["parameters"] == rank["gradients"] == rank["predicted_parameters"]
        assert abs(rank["optimizer_states"] - rank["predicted_optimizer_states"]) <= 4 * 64
        assert seen[f"memory/peak/rank_{number}"] == rank["peak"]
    assert sum(rank["parameters"] for rank in ranks) == parameter_bytes()


class OfUser(Callback):
    """Where it runs, the default process group has replicas alone."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert dist.get_world_size() == 1


def beside_others(devices, options, folder):
    memory, throughput = MemoryMonitor(), ThroughputMonitor(window_size=2)
    _, seen = fit(devices, options, memory, folder, further=[OfUser(), throughput], log_every_n_steps=1)
    counts = dict(throughput._sent.counts)
    return memory.measured, seen, counts["pipeline"]


def test_ranks_are_counted_beside_callbacks_of_the_user(worlds, tmp_path):
    options = {"pipeline_parallel_size": 2, "num_microbatches": 1}
    (ranks, seen, first), (_, _, last) = worlds.run(2, beside_others, 2, options, str(tmp_path))
    assert len(ranks) == 2 and seen["memory/peak"] == max(rank["peak"] for rank in ranks)
    assert seen["train/sent_bytes/pipeline"] == pytest.approx((first + last) / 2, abs=1)


def test_largest_holders_are_named_and_the_error_goes_on(tmp_path):
    module = make(Exhausted)
    with pytest.raises(MemoryError, match="no room") as raised:
        fit(1, {}, MemoryMonitor(num_largest=2), tmp_path, module)
    [note] = [note for note in raised.value.__notes__ if "out of memory on rank 0" in note]
    assert (tmp_path / "out_of_memory_rank_0.txt").read_text() == note + "\n"
    assert "in Exhausted (" in note
    sizes = {name: p.nbytes for name, p in module.named_parameters()}
    largest = sorted(sizes, key=sizes.get, reverse=True)[:2]
    smallest = min(sizes, key=sizes.get)
    for name in largest:
        assert note.count(f"    {name} ") == 3  # as parameter, as gradient of the second batch, and as states
    assert f"    {smallest} " not in note
    assert "predicted)" in note


def test_other_errors_are_not_explained(tmp_path):
    module = make(Exhausted)
    module.error = KeyError("no such column")
    with pytest.raises(KeyError) as raised:
        fit(1, None, MemoryMonitor(), tmp_path, module)
    assert not [note for note in getattr(raised.value, "__notes__", []) if "out of memory" in note]
    assert not list(tmp_path.glob("out_of_memory*"))


def test_errors_of_allocators():
    caused = RuntimeError("a stage failed")
    caused.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(caused)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_it_is_pickled_after_a_run(tmp_path):
    monitor = MemoryMonitor()
    measured, _ = fit(1, {}, monitor, tmp_path)
    assert pickle.loads(pickle.dumps(monitor)).measured == measured


@pytest.mark.parametrize(
    ("options", "error"),
    [({"step": 0}, ValueError), ({"every_n_steps": 1.5}, TypeError), ({"path": "memory.txt"}, ValueError)],
    ids=str,
)
def test_refused_values(options, error):
    with pytest.raises(error, match=next(iter(options))):
        MemoryMonitor(**options)


def test_released_gradients_do_not_count_in_the_backward(tmp_path):
    """Those of the step before are there until the backward, and the profiler does not see their release."""

    class Wide(Layers):
        def __init__(self):
            super().__init__()
            self.wide = torch.nn.Linear(1000, 1000)

        def training_step(self, batch, batch_idx=0):
            return self.wide(torch.ones_like(self.wide.bias)).mean() + 0 * super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)

    [rank], _ = fit(1, {}, MemoryMonitor(), tmp_path, module=make(Wide))
    assert rank["parameters"] == rank["gradients"] > 4_000_000
    assert rank["peak"] < 2.5 * rank["parameters"]


def test_states_in_a_file_do_not_count(tmp_path):
    [rank], _ = fit(1, {"offload": {"optimizer_states": f"disk:{tmp_path}"}}, MemoryMonitor(), tmp_path)
    assert rank["optimizer_states"] < parameter_bytes() / 10
