"""AdaScale's gains and steps equal fairscale's on the same gradients."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks.adascale import AdaScale
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.replicate.reducer import GradientReducer

NUM_STEPS = 6


def batches(accumulate, index=0, replicas=1):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_STEPS * accumulate * replicas * 4, 3, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(len(x), 1, generator=generator, dtype=torch.float64)
    return [(x[i : i + 4], y[i : i + 4]) for i in range(4 * index, len(x), 4 * replicas)]


def loss_of(net, batch):
    x, y = batch
    return (net(x) - y).square().mean()


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def make_optimizer(net):
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.5)


def fairscale_run(accumulate, scale=None, smoothing=None):
    """The gains and weights of fairscale's optimizer, under DDP if there are ranks."""
    fairscale = pytest.importorskip("fairscale.optim")
    world_size = dist.get_world_size()
    net = make_net()
    ddp = DistributedDataParallel(net) if world_size > 1 else net
    optimizer = fairscale.AdaScale(
        make_optimizer(net), num_gradients_to_accumulate=accumulate, scale=scale, smoothing=smoothing
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer._optimizer, 0.9)
    gains = []
    for index, batch in enumerate(batches(accumulate, dist.get_rank(), world_size)):
        is_last = (index + 1) % accumulate == 0
        with contextlib.nullcontext() if is_last or world_size == 1 else ddp.no_sync():
            (loss_of(ddp, batch) / accumulate).backward()
        if is_last:
            gains.append(optimizer.gain())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return gains, [p.detach() for p in net.parameters()]


class Module(LightningModule):
    """Averages its gradients over the ranks itself if it has a reducer."""

    def __init__(self, loader):
        super().__init__()
        self.net = make_net()
        self.loader, self.gains, self.rates = loader, [], []
        self.reducer = None
        self.overflow_at = None

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch) * (float("inf") if batch_idx == self.overflow_at else 1.0)

    def on_after_backward(self):
        if self.reducer is not None and not self.trainer.fit_loop._should_accumulate():
            self.reducer.reduce()

    def on_train_batch_end(self, *_):
        if not self.trainer.fit_loop._should_accumulate():
            self.gains.append(self.trainer.callback_metrics["adascale_gain"].item())
            self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

    def configure_optimizers(self):
        optimizer = make_optimizer(self.net)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self):
        return DataLoader(self.loader, batch_size=None)


def trainer_of(callback, accumulate, **kwargs):
    return Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=1,
        callbacks=[callback],
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"max_epochs": 1, **kwargs},
    )


def assert_same(model, gains, weights):
    torch.testing.assert_close(torch.tensor(model.gains), torch.tensor(gains), rtol=1e-5, atol=0)
    for p, q in zip(model.net.parameters(), weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)  # fairscale keeps its squares in float32


@pytest.mark.world(1)
@pytest.mark.parametrize(("accumulate", "scale", "smoothing"), [(2, None, None), (4, 8.0, None), (3, None, 0.5)])
def test_accumulation_in_one_process(accumulate, scale, smoothing):
    gains, weights = fairscale_run(accumulate, scale, smoothing)
    model = Module(batches(accumulate))
    trainer_of(AdaScale(scale=scale, smoothing=smoothing), accumulate).fit(model)
    assert_same(model, gains, weights)
    assert min(gains) > 1 and max(gains) - min(gains) > 0.01
    for step, rates in enumerate(model.rates, start=1):  # schedulers never saw a gain
        assert rates == pytest.approx([0.05 * 0.9**step, 0.02 * 0.9**step], rel=1e-12)


@pytest.mark.world(2)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_data_parallel_ranks(accumulate, monkeypatch):
    gains, weights = fairscale_run(accumulate)
    model = Module(batches(accumulate, dist.get_rank(), 2))
    mesh = Mesh.build(ParallelLayout(data_shard_size=2), "cpu")
    callback = AdaScale()
    callback.connect_mesh(mesh, ({id(p) for p in model.parameters()},) * 2)
    model.reducer = GradientReducer(list(model.named_parameters()), mesh.group("data"))
    model.reducer.observe(callback)
    trainer_of(callback, accumulate).fit(model)
    assert_same(model, gains, weights)


@pytest.mark.world(2)
def test_stages_sum_their_squared_norms():
    """Each rank has both layers but counts one; the gains are those of the full model."""
    gains, weights = fairscale_run_on_one_rank(2)
    model = Module(batches(2))
    mesh = Mesh.build(ParallelLayout(pipeline_parallel_size=2), "cpu")
    callback = AdaScale()
    callback.connect_mesh(mesh, ({id(p) for p in model.net[2 * dist.get_rank()].parameters()},) * 2)
    trainer_of(callback, 2).fit(model)
    assert_same(model, gains, weights)


def fairscale_run_on_one_rank(accumulate):
    """`fairscale_run` as if there were one rank."""
    size, rank = dist.get_world_size, dist.get_rank
    dist.get_world_size, dist.get_rank = lambda: 1, lambda: 0
    try:
        return fairscale_run(accumulate)
    finally:
        dist.get_world_size, dist.get_rank = size, rank


def test_resume_keeps_moving_averages(tmp_path):
    uninterrupted, first, second = (Module(batches(2)) for _ in range(3))
    trainer_of(AdaScale(smoothing=0.9), 2, max_epochs=2).fit(uninterrupted)
    trainer = trainer_of(AdaScale(smoothing=0.9), 2)
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer_of(AdaScale(smoothing=0.9), 2, max_epochs=2).fit(second, ckpt_path=tmp_path / "a.ckpt")
    assert first.gains + second.gains == uninterrupted.gains
    assert all(torch.equal(p, q) for p, q in zip(second.parameters(), uninterrupted.parameters(), strict=True))


def test_gains_under_loss_scaling_skip_overflows():
    from lightning_hybrid.precision import HybridPrecision

    plain, scaled = Module(batches(2)), Module(batches(2))
    trainer_of(AdaScale(), 2).fit(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    precision = HybridPrecision("16-mixed", scaler=scaler)
    precision.forward_context = contextlib.nullcontext  # only the scale, with float64 arithmetic
    trainer_of(AdaScale(), 2, plugins=[precision]).fit(scaled)
    assert precision.loss_scale > 2.0**8
    assert scaled.gains == pytest.approx(plain.gains, rel=1e-9)

    overflowing = Module(batches(2))
    overflowing.overflow_at = 4
    trainer_of(AdaScale(), 2, plugins=[HybridPrecision("16-mixed", scaler=scaler)]).fit(overflowing)
    assert overflowing.rates == plain.rates
    assert overflowing.gains[2] == overflowing.gains[1] != overflowing.gains[3]


def test_invalid_uses_are_refused():
    with pytest.raises(ValueError, match=r"scale=0.5 is below 1"):
        AdaScale(scale=0.5)
    with pytest.raises(ValueError, match=r"smoothing=1 must be"):
        AdaScale(smoothing=1)
    with pytest.raises(ValueError, match=r"more than one batch per step.*accumulate_grad_batches=2"):
        trainer_of(AdaScale(), 1).fit(Module(batches(1)))
    model = Module(batches(1))
    model.automatic_optimization = False
    with pytest.raises(ValueError, match="needs automatic optimization of one optimizer"):
        trainer_of(AdaScale(), 1).fit(model)
