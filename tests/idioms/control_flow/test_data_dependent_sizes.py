"""Sizes that depend on values of the model: a step that branches on one is refused with a reason."""

import pytest
import torch
from torch.nn import functional as F

from harness.layouts import each_under
from harness.verification import COMBINED, check
from lightning_hybrid.verify import Layout
from models.regression import Regression

PP2 = Layout("pp2, one microbatch", 2, {"pipeline_parallel_size": 2, "num_microbatches": 1})
TWO_MICROBATCHES = Layout("m2", 1, {"pipeline_parallel_size": 1, "num_microbatches": 2})
ONE_STAGE = [
    TWO_MICROBATCHES,
    Layout("tp2", 2, {"tensor_parallel_size": 2, "num_microbatches": 1}),
    Layout("zero3", 2, {"zero_stage": 3, "num_microbatches": 1}),
]


STRICT = Layout("strict", devices=2, strategy={**PP2.strategy, "strict_layout": True})


class LoopsOverClasses(Regression):
    """The number of classes depends on the model's output."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.layers[1](self.layers[0](x))
        likeliest = h.argmax(1)
        loss = F.mse_loss(self.head(self.layers[2](h)), y)
        for one in torch.unique(likeliest):
            loss = loss + h[likeliest == one].mean(0).square().sum()
        return loss


class DecidesByRows(Regression):
    """A branch that no batch takes, on how many rows a mask of the model picks."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        rows = out[out.detach()[:, 0] > 100.0]
        if len(rows) >= 1:
            return rows.square().mean()
        return F.mse_loss(out, y)


class ReturnsByRows(Regression):
    """Results of both branches exist in both cases."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        large, error = out.square().mean(), F.mse_loss(out, y)
        return error if out[out.detach()[:, 0] > 100.0].shape[0] == 0 else large


class LogsRows(Regression):
    """Numbers of rows that the model selects, on the first and last stage, and Python arithmetic on them."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.layers[0](x)
        self.log("first", float(len(h[h.detach()[:, 0] > 0])))
        out = self.head(self.layers[2](self.layers[1](h)))
        rows = out[out.detach()[:, 0] > out.detach().mean()]
        self.log("share", rows.shape[0] / len(x))
        self.log("rows", rows.shape[0], reduce_fx="sum")
        return F.mse_loss(out, y)


class DecidesByMaskOfBatch(Regression):
    """A size that depends on the batch: the recording has that of another batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        rows = self.head(x)[(y > 0)[:, 0]]
        return loss + rows.mean() if rows.shape[0] > 4 else loss


class DividesByRows(Regression):
    """A size that an early layer decides is a number at the end."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.layers[0](x)
        count = h[h.detach()[:, 0] > 0.0].shape[0]
        return (self(x) - y).square().sum() / (1 + count)


class MasksByRows(DividesByRows):
    """Compares the size with a tensor of batch size."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.layers[0](x)
        count = len(h[h.detach()[:, 0] > 0.0])
        return ((self(x) - y).square() * (torch.arange(len(x)) <= count)[:, None]).mean()


@each_under("module", [DividesByRows, MasksByRows], [PP2, TWO_MICROBATCHES, COMBINED])
def test_size_is_a_number_on_every_stage(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


DECIDING = [(LoopsOverClasses, "unique"), (DecidesByRows, "__getitem__"), (ReturnsByRows, "__getitem__")]


@each_under("module", [LogsRows], [PP2, COMBINED])
def test_size_is_logged(worlds, module, layout):
    report = check(worlds, module, layout, steps=4)
    assert report.outcome == "same", str(report)
    assert not any("sharded instead of" in note for note in report.notes), report.notes


@pytest.mark.parametrize("layout", ONE_STAGE, ids=lambda layout: layout.name)
@pytest.mark.parametrize("module", [module for module, _ in DECIDING])
def test_branch_on_a_size(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("module", [*(module for module, _ in DECIDING), DecidesByMaskOfBatch])
def test_branch_on_another_size_continues_sharded(worlds, module):
    report = check(worlds, module, PP2, steps=4, num_microbatches=1)
    assert report.outcome == "same" and "sharded instead of pipelined" in str(report), str(report)


@pytest.mark.parametrize(("module", "maker"), DECIDING)
def test_branch_on_a_size_is_refused_if_strict(worlds, module, maker):
    report = check(worlds, module, STRICT)
    assert report.outcome == "refused", str(report)
    message = report.message
    assert "StepChanged" in message and "depends on values of the model" in message, message
    assert f"{maker} at {__file__}:" in message and "computes it" in message, message
    assert "Decide from the batch alone" in message and "pipeline_parallel_size=1" not in message, message
    assert "; set strict_layout=False to have these 2 ranks hold shards of every parameter" in message, message
    assert "global variable" not in message


def test_branch_on_a_batch_mask_gets_a_hint(worlds):
    report = check(worlds, DecidesByMaskOfBatch, STRICT, steps=4)
    assert report.outcome != "same" and "depends on the content of the batch" in report.message, str(report)
    assert "int(mask.sum())" in report.message, report.message
