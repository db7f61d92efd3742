"""Parameter-free modules that no recording can trace inside, such as a loss that branches on values."""

import pytest
import torch
import torchmetrics
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

from harness.verification import COMBINED, LAYOUTS, TENSOR, check, check_there_and_back
from models.regression import FEATURES, Regressor, mlp

PP2, *_ = LAYOUTS
SHARDED = "sharded instead of"


class MinesHard(nn.Module):
    """Selects the hardest samples only while the loss is large."""

    def forward(self, predicted, wanted):
        each = (predicted - wanted).square().mean(1)
        return each.topk(max(1, len(each) // 2)).values.mean() if each.mean() > 0.1 else each.mean()


class Matches(nn.Module):
    """Assigns predictions to targets by costs, with scipy."""

    @torch.no_grad()
    def forward(self, predicted, wanted):
        rows, columns = linear_sum_assignment(torch.cdist(predicted, wanted).numpy())
        return torch.as_tensor(rows), torch.as_tensor(columns)


class SetLoss(nn.Module):
    """A loss of matched pairs, with a buffer of weights and a matcher."""

    def __init__(self):
        super().__init__()
        self.matcher = Matches()
        self.register_buffer("weight", torch.tensor(0.5))

    def forward(self, outputs, wanted):
        predicted = outputs["predicted"]
        rows, columns = self.matcher(predicted, wanted)
        return {"loss_pairs": self.weight * F.l1_loss(predicted[rows], wanted[columns])}


class Deep(Regressor):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.error = mlp(), nn.Linear(FEATURES, 1), torchmetrics.MeanAbsoluteError()
        self.criterion = self.make_criterion()

    def forward(self, x):
        return self.head(self.body(x))


class Mining(Deep):
    make_criterion = MinesHard

    def shared_step(self, batch):
        x, y = batch
        return self.criterion(self(x), y)


class Detector(Deep):
    make_criterion = SetLoss

    def shared_step(self, batch):
        x, y = batch
        losses = self.criterion({"predicted": self(x)}, y)
        self.error.update(self(x), y)
        self.log_dict({name: value.detach() for name, value in losses.items()})
        return sum(losses.values())


class Activates(Deep):
    """In the middle of the network."""

    def make_criterion(self):
        return Gate()

    def forward(self, x):
        return self.head(self.criterion(self.body(x)))


class Gate(nn.Module):
    def forward(self, x):
        return torch.tanh(x) if x.abs().max().item() > 0.5 else 2 * x


class LossReturnsNumber(Deep):
    """Its loss returns a number, on which the step branches: no unit."""

    def make_criterion(self):
        return WithNumber()

    def shared_step(self, batch):
        x, y = batch
        loss, size = self.criterion(self(x), y)
        return 2 * loss if size > 0.1 else loss


class WithNumber(nn.Module):
    def forward(self, predicted, wanted):
        loss = F.mse_loss(predicted, wanted)
        return (loss, loss.item()) if loss > 0 else (loss, 0.0)


class Counts(nn.Module):
    """Stores a number of its batch, which a hook reads."""

    hard = 0

    def forward(self, predicted, wanted):
        errors = (predicted - wanted).abs()
        self.hard = int((errors > 0.2).sum())
        return errors.square().mean() * (2 if self.hard > 3 else 1)


class Observed(Deep):
    make_criterion = Counts
    shared_step = Mining.shared_step

    def on_train_batch_end(self, *_):
        self.log("hard", float(self.criterion.hard))


CASES = [
    *((module, PP2) for module in (Mining, Detector, Activates)),
    (Detector, COMBINED),
    (Detector, TENSOR),
    (Activates, COMBINED),
]


def named(value):
    return getattr(value, "__name__", None) or value.name


@pytest.mark.parametrize(("module", "layout"), CASES, ids=named)
def test_opaque_module_is_one_unit(worlds, module, layout):
    report = check_there_and_back(worlds, module, layout)
    assert report.outcome == "same" and SHARDED not in str(report), str(report)


def test_opaque_module_with_state_is_no_unit(worlds):
    report = check(worlds, Observed, PP2, steps=2, num_microbatches=1)
    assert report.outcome == "same" and SHARDED in str(report), str(report)


def test_returned_number_is_not_hidden(worlds):
    report = check(worlds, LossReturnsNumber, PP2, steps=2)
    assert report.outcome == "same" and SHARDED in str(report), str(report)
