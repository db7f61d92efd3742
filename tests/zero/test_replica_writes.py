"""Values that user code writes to parameters: replicas that hold shards write the same, or it is an error on each.

Each replica would keep its own under DDP; a shard of one beside a shard of another is a value of none.
"""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy

BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
BY_STEP = {"zero_stage": 3, "reshard_after_forward": False}
SIZE = 4


class Writes(LightningModule):
    """Each replica has other rows; subclasses write to the weight."""

    automatic = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = self.automatic
        self.net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)).double()

    @property
    def weight(self):
        return self.net[0].weight  # which no backward needs

    def write(self, batch):
        """Called in the step, without a graph."""

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if not self.automatic:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        with torch.no_grad():
            self.write(batch)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adds(Writes):
    def write(self, batch):
        self.weight.add_(batch.mean())


class AddsByHand(Adds):
    automatic = False


class BetweenSteps(AddsByHand):
    """The optimizer's step comes after what is written, and gathers it."""

    def write(self, batch):
        super().write(batch)
        self.optimizers().step()


class WritesRowOfOther(Writes):
    """Each replica writes a row of which the other one has the shard, through ``.data``."""

    automatic = False

    def write(self, batch):
        self.weight.data[0 if self.global_rank else SIZE - 1] = 1.0


class Rebinds(Writes):
    def write(self, batch):
        self.weight.data = self.weight.data * batch.mean()


class OnOneRank(Writes):
    automatic = False

    def write(self, batch):
        if self.global_rank == 1:
            self.weight.zero_()


class Codebook(nn.Linear):
    def forward(self, x):
        self.weight.data[0].lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class InLayer(Writes):
    def __init__(self):
        super().__init__()
        self.net[0] = Codebook(SIZE, SIZE).double()


class InHook(Writes):
    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.weight.add_(batch.mean())


class ScalesInHook(Writes):
    """What each rank does to its shard is not seen by the others."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.weight.mul_(float(batch.mean()))


class ChangesGradients(Writes):
    def on_train_batch_start(self, batch, batch_idx):
        self.seen = batch.mean()

    def on_before_optimizer_step(self, optimizer):
        self.weight.grad.add_(self.seen)


class StepsOwnGradients(Writes):
    """Gradients are never averaged."""

    automatic = False

    def manual_backward(self, loss):
        with self.optimizers().toggle_model(sync_grad=False):
            super().manual_backward(loss)


class ScalesGradients(Writes):
    """What is written between the backward and the optimizer's step."""

    automatic = False

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.weight.grad.mul_(self.factor(batch))
        self.optimizers().step()

    def factor(self, batch):
        return float(batch.mean())


class AssignsGradients(ScalesGradients):
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.weight.grad = self.weight.grad * self.factor(batch)
        self.optimizers().step()


class ScalesByHalf(ScalesGradients):
    def factor(self, batch):
        return 0.5


class Same(Writes):
    """Clamps, of which only some ranks' shards are changed, and means over all replicas."""

    def write(self, batch):
        self.weight.data.clamp_(-0.2, 0.2)
        self.weight.data[1].copy_(self.weight.data[0] * 0.5)
        self.net[0].weight.add_(self.mean_of(batch))

    def mean_of(self, batch):
        mean = batch.mean()
        if self.trainer.world_size > 1:
            dist.all_reduce(mean)
        return mean / self.trainer.world_size

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.weight.mul_(0.9)
        self.net[0].bias.add_(self.weight.mean())


class SameByHand(Same):
    automatic = False


def rows(rank, size):
    data = torch.arange(8.0 * SIZE, dtype=torch.float64).view(8, SIZE) / 10
    return DataLoader(data[rank::size].contiguous(), 4 // size)


def trained(case, size, strategy):
    module = case()
    if isinstance(strategy, dict):
        strategy = Hybrid3DStrategy(**strategy)
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rank = trainer.strategy.cluster_environment.global_rank() if size > 1 else 0
    trainer.fit(module, rows(rank, size))
    return {name: value.clone() for name, value in module.state_dict().items()}


def error_of(case, strategy):
    try:
        trained(case, 2, strategy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


REFUSED = [
    *((case, BY_STEP) for case in (AddsByHand, BetweenSteps, WritesRowOfOther, OnOneRank, Adds, Rebinds, InHook)),
    *((case, BY_LAYER) for case in (InLayer, Adds)),
    (ScalesInHook, {"zero_stage": 1}),
    (ChangesGradients, {"zero_stage": 2}),
    *((case, how) for case in (ScalesGradients, AssignsGradients) for how in (BY_STEP, BY_LAYER, {"zero_stage": 1})),
    (AddsByHand, {"zero_stage": 1}),
]


@pytest.mark.parametrize(("case", "strategy"), REFUSED, ids=str)
def test_values_of_one_replica_are_refused(worlds, case, strategy):
    messages = worlds.run(2, error_of, case, strategy, timeout=60)
    for message in messages[1:] if case is OnOneRank else messages:  # the other rank has gone on
        assert message.startswith("RanksDisagree"), message
        assert "zero_stage=0" in message


def test_gradients_of_one_replica_are_refused(worlds):
    for message in worlds.run(2, error_of, StepsOwnGradients, BY_STEP, timeout=60):
        assert message.startswith("StepError") and "averaged" in message, message


@pytest.mark.parametrize("case", [Same, SameByHand, ScalesByHalf])
@pytest.mark.parametrize("strategy", [BY_STEP, BY_LAYER, {"zero_stage": 1}], ids=str)
def test_equal_values_are_written(worlds, case, strategy):
    [expected] = worlds.run(1, trained, case, 1, "auto")
    for state in worlds.run(2, trained, case, 2, strategy):
        torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("case", [Adds, AddsByHand, InHook, ChangesGradients, ScalesGradients, StepsOwnGradients])
def test_full_copies_are_as_under_ddp(worlds, case):
    expected = worlds.run(2, trained, case, 2, "ddp")
    assert not torch.equal(*(state["net.0.weight"] for state in expected))
    torch.testing.assert_close(worlds.run(2, trained, case, 2, {}), expected)
