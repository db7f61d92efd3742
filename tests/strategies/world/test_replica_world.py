"""Modules that query the world: it is the ranks that see other data, as under Lightning's own DDP."""

import copy
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from harness.layouts import each
from harness.verification import all_layouts, check
from lightning_hybrid import Hybrid3DStrategy
from models.autograd_functions import Reverse
from models.regression import FEATURES, Regressor, mlp, regression_data


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def fit(make, pp, num_microbatches=1, loaders=None):
    """Fit on this world, with Lightning's DDP if pp is None; weights, losses and the module's records."""
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    module, losses = make(), Losses()
    if pp is None:
        strategy = DDPStrategy(process_group_backend="gloo")
    else:
        strategy = Hybrid3DStrategy(pipeline_parallel_size=pp, num_microbatches=num_microbatches)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 2}
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    trainer = Trainer(devices=size, strategy=strategy, callbacks=[losses], precision="64-true", **options, **quiet)
    trainer.fit(module, **(regression_data() if loaders is None else loaders()))
    return (
        {name: p.detach().clone() for name, p in module.named_parameters()},
        losses.values,
        getattr(module, "seen", []),
    )


def assert_matches_ddp(worlds, make, loaders=None):
    expected = worlds.run(2, fit, make, None, 1, loaders)
    for size, pp in ((2, 1), (4, 2)):
        results = worlds.run(size, fit, make, pp, 1, loaders)
        for rank, (weights, losses, seen) in enumerate(results):
            replica = rank % 2 if pp > 1 else rank
            reference, reference_losses, reference_seen = expected[replica]
            assert losses == pytest.approx(reference_losses, rel=1e-10)
            for name, weight in weights.items():
                assert torch.allclose(weight, reference[name], rtol=1e-9, atol=1e-11), name
            assert seen == reference_seen


# --- contrastive learning --------------------------------------------------------------------------------------------


class GatherLayer(torch.autograd.Function):
    """Gathers from all processes, with gradients, as published contrastive learners do."""

    @staticmethod
    def forward(ctx, tensor):
        gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *gradients):
        stacked = torch.stack(gradients)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


class Contrastive(LightningModule):
    """Two views of a sample attract; all other samples, those of other processes too, repel."""

    def __init__(self):
        super().__init__()
        self.encoder, self.projector = mlp(4), nn.Linear(FEATURES, 3)

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=1)

    def gather(self, z):
        return torch.cat(GatherLayer.apply(z))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        left, right = self(x), self(x + 0.1)
        labels = torch.arange(len(x), device=x.device) + len(x) * dist.get_rank()
        loss = F.cross_entropy(left @ self.gather(right).T / 0.5, labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ContrastiveDetached(Contrastive):
    """Gradients only through local samples."""

    def gather(self, z):
        gathered = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, z.detach())
        gathered[dist.get_rank()] = z
        return torch.cat(gathered)


class ContrastiveOfLightning(Contrastive):
    def gather(self, z):
        return self.all_gather(z, sync_grads=True).flatten(0, 1)


class ContrastiveQueue(Contrastive):
    """Statistics over all processes, in place and asynchronous."""

    def gather(self, z):
        center = z.detach().mean(0)
        work = dist.all_reduce(center, async_op=True)
        work.wait()
        center = center / self.trainer.world_size
        return torch.cat([z - center for _ in range(self.trainer.world_size)])


@each(
    "make",
    [Contrastive, ContrastiveDetached, ContrastiveOfLightning, ContrastiveQueue],
    covered_by={ContrastiveDetached: ContrastiveQueue},
)
def test_losses_over_the_world_are_over_the_replicas(worlds, make):
    assert_matches_ddp(worlds, make)


# --- who am I --------------------------------------------------------------------------------------------------------


class ReadsWorld(Regressor):
    """Records world and ranks in hooks and steps, and calls the strategy's collectives."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.seen = []

    def forward(self, x):
        return self.head(self.body(x))

    def record(self, where):
        strategy = self.trainer.strategy
        self.seen.append((where, dist.get_rank(), dist.get_world_size()))
        self.seen.append((self.trainer.global_rank, self.trainer.world_size, self.global_rank))
        shared = torch.tensor([1.0 + self.trainer.global_rank])
        dist.all_reduce(shared)
        self.seen.append((float(shared), strategy.broadcast(f"from {dist.get_rank()}", src=1)))
        self.seen.append(float(strategy.reduce(torch.tensor(float(dist.get_rank())), reduce_op="sum")))
        self.seen.append(self.all_gather(torch.tensor(float(self.global_rank))).tolist())
        strategy.barrier("here")
        if isinstance(strategy, DDPStrategy):
            assert not isinstance(strategy, Hybrid3DStrategy)

    def setup(self, stage):
        self.record("setup")

    def on_train_start(self):
        self.record("train start")
        group = dist.new_group([0, 1])
        shared = torch.ones(1)
        dist.all_reduce(shared, group=group)
        self.seen.append(float(shared))

    def training_step(self, batch, batch_idx):
        self.record("step")
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.record("validated")

    def on_train_end(self):
        self.record("train end")


def test_ranks_and_sizes_are_those_of_the_replicas(worlds):
    assert_matches_ddp(worlds, ReadsWorld)


class Shards(IterableDataset):
    """Shards itself over processes and workers."""

    def __iter__(self):
        info = get_worker_info()
        each = 1 if info is None else info.num_workers
        index = dist.get_rank() * each + (0 if info is None else info.id)
        count = dist.get_world_size() * each
        assert int(os.environ.get("WORLD_SIZE", dist.get_world_size())) == dist.get_world_size()
        for sample in range(index, 64, count):
            x = torch.cos(torch.arange(FEATURES, dtype=torch.float64) * (sample + 1))
            yield x, x.sum().reshape(1).tanh()


def shards():
    return {"train_dataloaders": DataLoader(Shards(), batch_size=4)}


class Plain(Regressor):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))


def test_datasets_that_split_themselves(worlds):
    assert_matches_ddp(worlds, Plain, shards)


# --- custom autograd functions ---------------------------------------------------------------------------------------


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


reverse = Reverse.apply


class Adversarial(Regressor):
    """A reversed gradient and a straight-through estimator between layers."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.critic = mlp(), nn.Linear(FEATURES, 1), mlp(1)

    def shared_step(self, batch):
        x, y = batch
        hidden = self.body[1](self.body[0](x))
        hidden = Quantise.apply(reverse(hidden, 0.7)) + hidden
        out = self.body[3](self.body[2](hidden))
        return F.mse_loss(self.head(out), y) + 0.1 * self.critic(reverse(hidden, 0.5)).square().mean()


@all_layouts
def test_manual_gradient_sync(worlds, layout):
    report = check(worlds, Adversarial, layout, steps=2)
    assert report.outcome == "same", str(report)


# --- the mesh --------------------------------------------------------------------------------------------------------


class ReadsMesh(Regressor):
    """Reads its mesh coordinates wherever Lightning's own strategies have a mesh, and sums over its groups."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.seen = {}

    def forward(self, x):
        return self.body(x)

    def read_mesh(self, hook):
        axes = {name: self.device_mesh[name] for name in ("data_parallel", "tensor_parallel")}
        sums = [torch.ones(1), torch.ones(1)]
        for total, group in zip(sums, self.device_mesh.get_all_groups(), strict=True):
            dist.all_reduce(total, group=group)
        places = [(mesh.size(), mesh.get_local_rank(), mesh.mesh.tolist()) for mesh in axes.values()]
        local = [self.device_mesh.get_local_rank(name) for name in axes]
        self.seen[hook] = places, local, self.device_mesh.mesh.tolist(), [int(total) for total in sums]

    def configure_model(self):
        self.read_mesh("configure_model")

    def setup(self, stage):
        self.read_mesh("setup")

    def configure_optimizers(self):
        self.read_mesh("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self):
        self.read_mesh("on_train_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.read_mesh("on_train_batch_end")


def mesh_coordinates(sizes):
    warnings.simplefilter("ignore")
    module = ReadsMesh()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "devices": dist.get_world_size(), "precision": "64-true", "max_steps": 1}
    trainer = Trainer(strategy=Hybrid3DStrategy(**sizes), **options, **quiet)
    trainer.fit(module, **regression_data())
    copied = copy.deepcopy(module.device_mesh), pickle.loads(pickle.dumps(module.device_mesh))
    assert all(mesh.mesh.tolist() == module.device_mesh.mesh.tolist() for mesh in copied)
    module.read_mesh("afterwards")
    return module.seen


@pytest.mark.parametrize(
    ("sizes", "mesh_of"),
    [
        ({"pipeline_parallel_size": 2}, lambda rank: ([[rank]], (0, 0))),
        (
            {"pipeline_parallel_size": 2, "data_parallel_size": 2},
            lambda rank: ([[rank // 2 * 2], [rank // 2 * 2 + 1]], (rank % 2, 0)),
        ),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, lambda rank: ([[0, 1], [2, 3]], (rank // 2, rank % 2))),
    ],
    ids=["pp2", "pp2dp2", "dp2tp2"],
)
def test_mesh_is_the_same_in_every_hook(worlds, sizes, mesh_of):
    world_size = 4 if len(sizes) > 1 else 2
    for rank, seen in enumerate(worlds.run(world_size, mesh_coordinates, sizes)):
        mesh, (data, tensor) = mesh_of(rank)
        column, row = [line[tensor] for line in mesh], mesh[data]
        places = [(len(column), data, column), (len(row), tensor, row)]
        assert len(seen) == 6
        for hook, found in seen.items():
            assert found == (places, [data, tensor], mesh, [len(column), len(row)]), (rank, hook)


# --- callbacks that change during a run ------------------------------------------------------------------------------


class SeesWorld(Callback):
    def on_after_backward(self, trainer, pl_module):
        pl_module.seen.append((dist.get_world_size(), dist.get_rank()))


class SwapsCallback(Regressor):
    """Puts a callback in the place of another, for a hook that was empty before."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def on_fit_start(self):
        self.trainer.callbacks.append(Callback())

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.callbacks[-1] = SeesWorld()


def test_callback_that_replaces_another_sees_its_replicas(worlds):
    assert_matches_ddp(worlds, SwapsCallback)
