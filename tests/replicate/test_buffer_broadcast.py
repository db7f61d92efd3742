"""Buffers of replicas are broadcast as by DDP: those of the first replica are sent to all before each step."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from harness.fits import Run, _fit, fit
from lightning_hybrid.replicate.buffers import ReplicaBufferBroadcast
from models.hand_written import BatchNorms


class RecordsBuffers(Callback):
    """Records the buffers of this rank around steps and validation."""

    def __init__(self):
        self.recorded = []

    def see(self, when, module):
        clones = {name: b.detach().clone() for name, b in module.named_buffers() if b.is_floating_point()}
        self.recorded.append((when, clones))

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.see("step", pl_module)

    def on_validation_batch_end(self, trainer, pl_module, *_):
        self.see("validation", pl_module)


class RecordsLateBuffers(RecordsBuffers):
    """Registers a buffer once training starts, and one in another shape in each batch, and writes them."""

    def on_train_start(self, trainer, pl_module):
        pl_module.register_buffer("late", torch.zeros(3, dtype=torch.float64))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.late += 1 + trainer.global_rank
        pl_module.register_buffer("grows", torch.full((1 + batch_idx,), trainer.global_rank, dtype=torch.float64))
        super().on_train_batch_end(trainer, pl_module)


def under_ddp(run):
    return _fit(run, run.dp, DDPStrategy(process_group_backend="gloo"), batch_size=run.batch_size)


def assert_same(run, ranks, expected):
    """Each rank has the records of its replica under DDP."""
    val_loss = sum(each.logged["val_loss"] for each in expected) / run.dp  # there each rank logs its own value
    for rank, fitted in enumerate(ranks):
        replica = rank % run.dp
        assert [when for when, _ in fitted.extra] == [when for when, _ in expected[replica].extra]
        for (when, clones), (_, reference) in zip(fitted.extra, expected[replica].extra, strict=True):
            assert clones.keys() == reference.keys()
            for name, buffer in clones.items():
                if run.pp > 1 and not any(name.startswith(f"{unit}.") for unit in fitted.units[rank // run.dp]):
                    continue  # of a layer of another stage
                torch.testing.assert_close(buffer, reference[name], rtol=1e-10, atol=1e-12, msg=f"{rank} {when} {name}")
        assert fitted.logged["val_loss"] == pytest.approx(val_loss, rel=1e-9)


ACCUMULATED = {"accumulate_grad_batches": 2, "val_check_interval": 2}
RUNS = {
    "dp2": Run("BatchNorms", dp=2, microbatches=1, num_batches=3, validate=True, callback=RecordsBuffers),
    "accumulated": Run(
        "BatchNorms", dp=2, microbatches=1, num_batches=5, validate=True, callback=RecordsBuffers, trainer=ACCUMULATED
    ),
    "pp2": Run("BatchNorms", pp=2, dp=2, microbatches=1, num_batches=3, validate=True, callback=RecordsBuffers),
    "zero": Run(
        "BatchNorms",
        dp=2,
        microbatches=1,
        num_batches=3,
        validate=True,
        callback=RecordsBuffers,
        strategy={"zero_stage": 3},
    ),
    "late": Run("BatchNorms", dp=2, microbatches=1, num_batches=5, validate=True, callback=RecordsLateBuffers),
}


@pytest.mark.parametrize("run", list(RUNS.values()), ids=list(RUNS))
def test_matches_ddp(worlds, run):
    expected = worlds.run(2, under_ddp, run)
    last = [clones for when, clones in expected[0].extra if when == "step"][-1]
    others = [clones for when, clones in expected[1].extra if when == "step"][-1]
    assert any((last[name] != others[name]).any() for name in last), "replicas have statistics of their own in a step"
    assert_same(run, worlds.run(run.world_size, fit, run, timeout=60), expected)


# --- the message ------------------------------------------------------------------------------------------------------


class Many(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("flag", torch.tensor([bool(value)] * 3))
        self.register_buffer("number", torch.tensor(float(value), dtype=torch.float64))
        self.register_buffer("turned", torch.full((2, 3), value, dtype=torch.complex64).t())
        self.register_buffer("count", torch.tensor(value, dtype=torch.int16))
        self.register_buffer("small", torch.full((5,), value, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("none", None)
        self.register_buffer("ours", torch.tensor([value]), persistent=False)
        self._ddp_params_and_buffers_to_ignore = ["ours"]


def shared():
    rank = dist.get_rank()
    module = Many(7 if rank == 0 else 0)
    buffers = ReplicaBufferBroadcast(module, dist.group.WORLD, torch.device("cpu"))
    if rank == 1:
        module.small = torch.zeros(2, dtype=torch.bfloat16)  # a recreated cache, of another size
    buffers.share()
    first = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.number.fill_(rank)
    buffers.share()
    undue = float(module.number)
    buffers.after_step(averaged=False)
    buffers.share()
    buffers.after_step(averaged=True)
    buffers.share()
    return first, undue, float(module.number)


def test_buffers_of_every_kind(worlds):
    expected = dict(Many(7).named_buffers())
    for rank, (first, undue, number) in enumerate(worlds.run(2, shared)):
        assert first.keys() == expected.keys()
        for name, buffer in first.items():
            if rank == 1 and name in ("ours", "small"):
                assert not buffer.any(), name
            else:
                assert torch.equal(buffer, expected[name]) and buffer.stride() == expected[name].stride(), name
        assert (undue, number) == (rank, 0.0)


def test_one_replica_sends_nothing():
    module = BatchNorms()

    class SingleRank:
        def size(self):
            return 1

    ReplicaBufferBroadcast(module, SingleRank(), torch.device("cpu")).share()


def averaged():
    module = Many(dist.get_rank())
    buffers = ReplicaBufferBroadcast(module, dist.group.WORLD, torch.device("cpu"))
    module.register_buffer("late", torch.full((2,), 2.0 * dist.get_rank()))
    buffers.average()
    return float(module.number), module.late.tolist(), bool(module.flag.any())


def test_buffers_registered_late_are_averaged(worlds):
    assert worlds.run(2, averaged) == [(0.5, [1.0, 1.0], False)] * 2
