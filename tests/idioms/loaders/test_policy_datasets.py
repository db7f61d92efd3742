"""Datasets that run the model while a batch is fetched, as in reinforcement learning."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.expert_modules import BestOfFour

STATE, STEPS = 4, 12


def mlp(out):
    return nn.Sequential(nn.Linear(STATE, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, out)).double()


class Played(IterableDataset):
    """States of a continuing environment, actions of the current policy, and values of the critic."""

    def __init__(self, module):
        self.module = module

    def __iter__(self):
        return self.module.play()


class Policy(LightningModule):
    workers = 0

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.actor, self.critic = mlp(2), mlp(1)
        self.state, self.turns = torch.ones(STATE, dtype=torch.float64), 0

    def play(self):
        for _ in range(STEPS):
            assert self.actor[0].weight.shape == (8, STATE) and self.actor[0].weight.size(0) == 8
            with torch.no_grad():
                logits, value = self.actor(self.state), self.critic(self.state)
            action = int(logits.argmax())
            before, self.turns = self.state, self.turns + 1
            self.state = torch.tanh(before.roll(1) * 1.5 + 0.1 * action + 0.01 * self.turns)
            yield before, action, torch.log_softmax(logits, -1)[action], before.sum() - value[0]

    def training_step(self, batch, batch_idx):
        states, actions, old, advantage = batch
        log = torch.log_softmax(self.actor(states), -1).gather(1, actions[:, None]).squeeze(1)
        loss = -((log - old).exp() * advantage).mean() + F.mse_loss(self.critic(states).squeeze(1), advantage)
        self.log("loss", loss)
        return loss

    def train_dataloader(self):
        return DataLoader(Played(self), batch_size=4, num_workers=self.workers)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PlainLoader(Policy):
    """No DataLoader at all."""

    def train_dataloader(self):
        return Batches(self)


class Batches:
    def __init__(self, module):
        self.module = module

    def __iter__(self):
        return iter(DataLoader(Played(self.module), batch_size=4))


class Explores(Policy):
    """Runs its policy for some actions only, others on each replica, and none in some batches."""

    def play(self):
        rank = self.trainer.global_rank
        for turn in range(STEPS):
            action, log_prob = turn % 2, torch.zeros((), dtype=torch.float64)
            if (turn // 4 + rank) % 3 == 0 and turn % (rank + 2) == 0:
                logits = self.actor(self.state).detach()
                action, log_prob = int(logits.argmax()), torch.log_softmax(logits, -1).max()
            before, self.turns = self.state, self.turns + 1
            self.state = torch.tanh(before.roll(1) * 1.5 + 0.1 * action + 0.01 * (self.turns + rank))
            yield before, action, log_prob, before.sum()


class InWorkers(Policy):
    workers = 1


class BatchOfStored(Policy):
    """A value that a step stored of the model returns in a batch."""

    out = None

    def play(self):
        for _ in range(STEPS):
            yield torch.ones(STATE, dtype=torch.float64), 0, torch.zeros(()), self.stored()

    def stored(self):
        return torch.zeros(8, dtype=torch.float64) if self.out is None else self.out

    def training_step(self, batch, batch_idx):
        hidden = self.actor[0](batch[0])
        self.out = hidden.detach()[0]
        loss = (1 + batch[3].mean()) * self.actor[1:](hidden).mean() + self.critic(batch[0]).mean()
        self.log("loss", loss)
        return loss


class BatchOfWeights(BatchOfStored):
    """A value that a hook stored of the model returns in a batch, and scales the loss."""

    def training_step(self, batch, batch_idx):
        loss = (1 + batch[3].mean()) * self.actor(batch[0]).mean() + self.critic(batch[0]).mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.out = self.actor[0].weight.detach().sum(1)


class BatchOfBuffers(BatchOfWeights):
    """Statistics that only one rank has return in a batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.BatchNorm1d(8).double() for _ in range(2))

    def stored(self):
        return self.first.running_mean + self.last.running_mean

    def training_step(self, batch, batch_idx):
        hidden = self.first(self.actor[0](batch[0]))
        hidden = self.last(self.actor[1:-1](hidden))
        return (1 + batch[3].mean()) * self.actor[-1](hidden).mean() + self.critic(batch[0]).mean()


def trained(size, pp, make_module, options):
    ignore_warnings()
    torch.manual_seed(0)
    module = make_module()
    trainer = trainer_of(size, pp, max_epochs=2, use_distributed_sampler=False, strategy_options=options)
    trainer.fit(module)
    return {**weights_of(module), "loss": trainer.callback_metrics["loss"], "state": module.state, "t": module.turns}


@pytest.mark.parametrize(
    ("make_module", "size", "pp", "options"),
    [
        (Policy, 2, 2, {}),
        (PlainLoader, 2, 2, {}),
        (BatchOfWeights, 2, 2, {}),
        (BatchOfStored, 2, 2, {}),
        (Policy, 2, 1, {"tensor_parallel_size": 2}),
        (Policy, 1, 1, {"num_microbatches": 2}),
        (Policy, 2, 1, {}),
        (Policy, 2, 1, {"zero_stage": 3}),
        (PlainLoader, 2, 1, {"zero_stage": 3, "reshard_after_forward": True}),
        (Policy, 4, 2, {"zero_stage": 3}),
        (Policy, 4, 2, {"zero_stage": 3, "reshard_after_forward": True}),
    ],
    ids=[
        "pp2",
        "pp2, no DataLoader",
        "pp2, read by a hook",
        "pp2, stored",
        "tp2",
        "m2",
        "dp2",
        "zero3",
        "zero3 by layer",
        "pp2 x zero3",
        "pp2, by layer",
    ],
)
def test_policy_runs_while_a_batch_is_fetched(worlds, make_module, size, pp, options):
    [expected] = worlds.run(1, trained, 1, 1, make_module, {})
    for found in worlds.run(size, trained, size, pp, make_module, options):
        assert_same(found, expected)


ZERO = {"zero_stage": 3}


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("options", [ZERO, {**ZERO, "reshard_after_forward": True}], ids=["by step", "by layer"])
def test_policy_runs_on_one_replica_only(worlds, options, accumulated):
    expected = worlds.run(2, explored, {}, accumulated)
    for found, wanted in zip(worlds.run(2, explored, options, accumulated), expected, strict=True):
        assert_same(found, wanted)


def explored(options, accumulated):
    ignore_warnings()
    torch.manual_seed(0)
    module = Explores()
    given = {"max_epochs": 2, "use_distributed_sampler": False, "accumulate_grad_batches": accumulated}
    trainer = trainer_of(2, 1, strategy_options=options, **given)
    trainer.fit(module)
    return {**weights_of(module), "loss": trainer.callback_metrics["loss"], "state": module.state}


class Hidden(Policy):
    """No object of its loader references the module."""

    def train_dataloader(self):
        POLICIES[:] = [self]
        return DataLoader(OutOfSight(), batch_size=4)


class OutOfSight(IterableDataset):
    def __iter__(self):
        return POLICIES[0].play()


POLICIES = []


def refused(size, pp, make_module, options):
    ignore_warnings()
    module = make_module()
    trainer = trainer_of(size, pp, use_distributed_sampler=False, strategy_options=options)
    try:
        trainer.fit(module)
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("make_module", "pp", "options", "refusal_text"),
    [
        (Hidden, 1, {"zero_stage": 3}, "an object of the loader refers to the module"),
        (InWorkers, 1, {"zero_stage": 3}, "in a worker"),
        (InWorkers, 2, {}, "in a worker"),
        (InWorkers, 1, {"tensor_parallel_size": 2}, "in a worker"),
        (BatchOfBuffers, 2, {"num_microbatches": 1}, "the batch differs between the ranks"),
    ],
    ids=["zero3", "zero3, worker", "stages, worker", "tensor ranks, worker", "buffer"],
)
def test_ungatherable_policies_are_refused(worlds, make_module, pp, options, refusal_text):
    messages = worlds.run(2, refused, 2, pp, make_module, options)
    assert any(refusal_text in message for message in messages), messages
    if make_module is not BatchOfBuffers:
        assert all("'actor.0.weight' while a loader fetches" in message for message in messages), messages
        assert all("on_train_batch_start" in message for message in messages), messages


class Routed(Policy):
    """A layer of experts in its actor."""

    def __init__(self):
        super().__init__()
        self.actor[2] = BestOfFour(8).double()

    def play(self):
        rank = self.trainer.global_rank
        for turn in range(STEPS):
            read = self.actor[2].experts[0][0].weight if turn % (rank + 2) == 0 else None  # on some ranks only
            value = torch.zeros((), dtype=torch.float64) if read is None else read.detach().sum()
            yield torch.ones(STATE, dtype=torch.float64), 0, torch.zeros(()), value


@pytest.mark.parametrize("options", [{"zero_stage": 3}, {"zero_stage": 1}, {}], ids=["zero3", "zero1", "experts only"])
def test_reads_of_shared_experts_are_refused(worlds, options):
    messages = worlds.run(4, refused, 4, 1, Routed, {"expert_parallel_size": 2, **options})
    wanted = "'actor.2.experts.0.0.weight' while a loader fetches a batch, but it is sharded over replicas"
    assert any(wanted in message and "no ranks share experts" in message for message in messages), messages
