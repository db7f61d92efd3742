"""Times and memory of actions on a CUDA device: `python -m pytest -m gpu tests/gpu`."""

import time

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.fits import trainer_of
from harness.one_gpu import on_one_gpu, prepare
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import PipelineTimeline
from lightning_hybrid.schedule import Kind

WIDTH = 4096
FEW = "needs {} CUDA device(s)"


class Wide(L.LightningModule):
    """The device takes much longer for a layer than the host takes to launch it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Measured(Callback):
    """Waits for the device before and after each step, and keeps the spans and the memory of the last one."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.strategy.recorder.memory_readers.add(self)
        torch.cuda.synchronize()
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.synchronize()
        self.end = time.perf_counter()
        self.spans, self.memory = trainer.strategy.spans, trainer.strategy.recorder.memory(0)


def fit_wide(options, path):
    """On a rank: the spans, the memory, and the start and the end of the last step on the clock of the host."""
    world_size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    prepare(options)
    measured = Measured()
    trainer = trainer_of(
        world_size,
        Hybrid3DStrategy(**options),
        [measured, PipelineTimeline(path, step=3)],
        accelerator="gpu",
        devices=world_size,
        max_steps=3,
    )
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(3 * 8192, WIDTH)), 8192))
    return measured.spans, measured.memory, measured.begin, measured.end


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(
            size,
            options,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < devices, reason=FEW.format(devices)),
            ],
            id=name,
        )
        for name, size, devices, options in (
            ("plain", 1, 1, {}),
            ("microbatches", 1, 1, {"num_microbatches": 4}),
            ("two stages on one rank", 1, 1, {"stages_per_rank": 2, "num_microbatches": 4}),
            ("two ranks", 2, 2, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
            ("two ranks on one", 2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 4, **on_one_gpu(2)}),
        )
    ],
)
def test_times_are_those_of_the_device(worlds, tmp_path, size, options):
    path = tmp_path / "timeline.svg"
    for spans, memory, begin, end in worlds.run(size, fit_wide, options, str(path), timeout=300):
        assert {Kind.F, Kind.B, Kind.OPTIMIZER} <= {span.action.kind for span in spans}
        assert all(begin - 1e-3 <= span.start <= span.end <= end + 1e-3 for span in spans)
        if size == 1:  # the host is done long before the device
            busy = sum(span.end - span.start for span in spans)
            assert busy > 0.5 * (end - begin)
        sizes = [sample.num_bytes for sample in memory]
        assert max(sizes) > min(sizes) > 2 * WIDTH * WIDTH * 4
    assert path.exists()
