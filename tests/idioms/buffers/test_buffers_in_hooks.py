"""Buffers in hooks, buffers that a step rebinds, and statistics of norms without weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.tiny import FEATURES, Tiny, loader


class Losses(Tiny):
    """Remembers the loss of each sample in a buffer; hooks decide by it and clear it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("losses", torch.zeros(32, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        each = (self(batch["x"]) - batch["y"]).square()[:, 0]
        self.losses[batch["index"]] = each.detach()
        return each.mean()

    def on_train_batch_end(self, *_):
        self.log("hardest", self.losses.max())

    def on_train_epoch_end(self):
        self.log("hard", self.losses.mean())
        for group in self.optimizers().param_groups:
            group["lr"] = 0.05 + 0.1 * float(self.losses.mean())
        self.losses.zero_()


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


class MeanTeacher(Tiny):
    """The teacher's weights and statistics follow the student's; its output is a target."""

    def __init__(self):
        super().__init__(layers=0)
        torch.manual_seed(5)
        self.student = nn.Sequential(*(Norm() for _ in range(4)), nn.Linear(FEATURES, 1)).double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        self.teacher.eval()
        with torch.no_grad():
            target = self.teacher(batch["x"])
        out = self.student(batch["x"])
        return F.mse_loss(out, batch["y"]) + F.mse_loss(out, target)

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
            for p, q in zip(self.student.buffers(), self.teacher.buffers(), strict=True):
                q.copy_(p)


class Statistics(MeanTeacher):
    """Logs statistics of the norms of all stages."""

    def on_train_batch_end(self, *_):
        for place in range(4):
            norm = self.student[place].norm
            self.log(f"mean{place}", norm.running_mean.sum())
            self.log(f"count{place}", norm.num_batches_tracked.double())


class Centre(Tiny):
    """A centre that each step rebinds, as DINO's loss does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        out = self(batch["x"])
        loss = F.mse_loss(out - self.centre, batch["y"])
        self.centre = self.centre * 0.9 + out.detach().mean(0) * 0.1
        return loss

    def on_train_batch_end(self, *_):
        self.log("centre", self.centre.sum())


class PlainNorm(Tiny):
    """A norm without weights after the model."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1, affine=False).double()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.norm(self(batch["x"])), batch["y"])


class PlainNormOfInputs(Tiny):
    """A norm without weights on the batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False).double()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(self.norm(batch["x"])), batch["y"])

    def on_fit_start(self):
        self.log_of_start = self.norm.running_var.clone()


class CountsOfValidation(Tiny):
    """A buffer that the training step does not use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("errors", torch.zeros(2, dtype=torch.float64))

    def validation_step(self, batch, batch_idx):
        out = self(batch["x"])
        self.errors += torch.stack([(out - batch["y"]).abs().sum(), (out > 0.3).double().sum()])

    def on_validation_epoch_end(self):
        self.log("error", self.errors[0])
        self.log("large", self.errors[1])
        self.errors.zero_()


def state_after(size, pp, case, folder, options):
    ignore_warnings()
    torch.manual_seed(3)
    model = case()
    trainer = trainer_of(size, pp, strategy_options=options, max_epochs=2)
    trainer.fit(model, loader(4, 16), loader(4, 16) if case is CountsOfValidation else None)
    trainer.save_checkpoint(f"{folder}/{size}.ckpt")
    saved = torch.load(f"{folder}/{size}.ckpt", weights_only=False)["state_dict"]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same(saved, kept)
    if hasattr(model, "log_of_start"):
        assert torch.equal(model.log_of_start, torch.ones_like(model.log_of_start))
    return kept | {f"logged {name}": value.double() for name, value in trainer.callback_metrics.items()}


CASES = [Losses, MeanTeacher, Statistics, Centre, PlainNorm, PlainNormOfInputs, CountsOfValidation]


@pytest.mark.parametrize("case", CASES)
def test_buffers_match_one_process(worlds, case, tmp_path):
    [expected] = worlds.run(1, state_after, 1, 1, case, tmp_path, {})
    for state in worlds.run(2, state_after, 2, 2, case, tmp_path, {"num_microbatches": 1}):
        assert_same(state, expected)


@pytest.mark.parametrize("case", CASES)
def test_buffers_do_not_depend_on_the_number_of_stages(worlds, case, tmp_path):
    [expected] = worlds.run(1, state_after, 1, 1, case, tmp_path, {"num_microbatches": 2})
    for state in worlds.run(2, state_after, 2, 2, case, tmp_path, {"num_microbatches": 2}):
        assert_same(state, expected)


class Dropped(Tiny):
    """Stores its losses, and drops features outside of layers."""

    def __init__(self):
        super().__init__()
        self.dropout, self.kept = nn.Dropout(0.3), []

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for layer in self.layers:
            x = self.dropout(layer(x)) if x.shape[1] == FEATURES else layer(x)
        loss = F.mse_loss(x, batch["y"])
        self.kept.append(loss.detach())
        return loss


def weights_and_stored(size, pp, options):
    ignore_warnings()
    torch.manual_seed(3)
    model = Dropped()
    trainer_of(size, pp, strategy_options=options).fit(model, loader(4, 16))
    return weights_of(model) | {"kept": torch.stack([value.detach() for value in model.kept])}


@pytest.mark.parametrize("count", [2, 4])
def test_step_with_feature_dropout_may_store_values(worlds, count):
    [expected] = worlds.run(1, weights_and_stored, 1, 1, {"num_microbatches": count})
    for state in worlds.run(2, weights_and_stored, 2, 2, {"num_microbatches": count}):
        assert_same(state, expected)
