"""``reshard_after_forward`` means what it means to FSDP2: the same gathers and reductions in a step."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from harness.fits import Run, fit
from models.cases import Samples
from models.hand_written import Layers

GATHER, REDUCE = "c10d::_allgather_base_", ("c10d::_reduce_scatter_base_", "c10d::alltoall_base_")
NUM_LAYERS = 5


def messages():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def counted(profile):
    """Gathers and reductions; gloo's reductions are exchanges and local sums in this package."""
    names = [event.name for event in profile.events()]
    return names.count(GATHER), sum(map(names.count, REDUCE))


class CountsMessages(Callback):
    """Of the last batch, up to its gradients."""

    recorded = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.profile = messages()
        self.profile.start()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.profile.stop()
        self.recorded = counted(self.profile)


def of_fsdp2(reshard, num_microbatches):
    """Microbatches as torch.distributed.pipelining runs them if layers stay full, and else as a loop of backwards."""
    module = Layers().double()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (*module.layers, module.head):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh)
    samples = Samples(module.kind, 4)
    batch = default_collate([samples[k] for k in range(4)])
    for _ in range(2):
        with messages() as profile:
            for number in range(num_microbatches):
                if reshard is False:
                    module.set_reshard_after_backward(number == num_microbatches - 1)
                    module.set_requires_gradient_sync(number == num_microbatches - 1)
                module.loss(batch).backward()
    return counted(profile)


def of_hybrid3d(reshard, num_microbatches):
    strategy = {"zero_stage": 3, "reshard_after_forward": reshard}
    run = Run("Layers", dp=2, microbatches=num_microbatches, num_batches=4, strategy=strategy, callback=CountsMessages)
    return fit(run).extra


@pytest.mark.parametrize(
    ("reshard", "num_microbatches", "gathers_per_layer", "reductions_per_layer"),
    [(True, 2, 4, 2), (False, 2, 1, 1), (None, 1, 2, 1), (True, 1, 2, 1), (False, 1, 1, 1)],
)
def test_messages_are_those_of_fsdp2(worlds, reshard, num_microbatches, gathers_per_layer, reductions_per_layer):
    expected = [(NUM_LAYERS * gathers_per_layer, NUM_LAYERS * reductions_per_layer)] * 2
    assert worlds.run(2, of_fsdp2, reshard, num_microbatches) == expected
    assert worlds.run(2, of_hybrid3d, reshard, num_microbatches) == expected
