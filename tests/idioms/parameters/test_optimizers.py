"""Optimizers and schedulers as modules configure them: every return type, and statistics over all parameters."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from harness.layouts import each_under, under
from harness.verification import BOTH, COMBINED, LAYOUTS, REPLICAS, STAGES, TENSOR, check
from models.optimizers import Lamb, Lookahead, ScaledByNorm, ScaledByRows, SharpnessAware
from models.regression import FEATURES, Manual, Regression

# --- the forms of configure_optimizers -------------------------------------------------------------------------------


class ReturnsList(Regression):
    def configure_optimizers(self):
        return [torch.optim.AdamW(self.parameters(), lr=1e-2)]


class ReturnsTwoLists(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]


class ReturnsDict(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
                "monitor": "val_loss",
                "interval": "epoch",
                "frequency": 1,
                "name": "plateau",
            },
        }


class ReturnsDictOfScheduler(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


class ReturnsNone(Regression):
    def configure_optimizers(self):
        return None


@each_under("module", [ReturnsList, ReturnsTwoLists, ReturnsDict, ReturnsDictOfScheduler], [STAGES, BOTH])
def test_configure_optimizers_return_types(worlds, module, layout):
    report = check(worlds, module, layout, epochs=2, steps=2)
    assert report.outcome == "same", str(report)


def test_no_optimizer_trains_nothing(worlds):
    report = check(worlds, ReturnsNone, STAGES)
    assert report.outcome == "same", str(report)
    assert any("did not change" in note for note in report.notes)


class ReadsRates(ReturnsTwoLists):
    """Logs the learning rate and scales the loss by it; `configure_optimizers` counts once."""

    calls = 0

    def training_step(self, batch, batch_idx):
        rate = self.optimizers().param_groups[0]["lr"]
        self.log("lr", rate)
        self.log("same", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("next", self.lr_schedulers().get_last_lr()[0])
        self.log("calls", float(self.calls))
        return super().training_step(batch, batch_idx) * (1 + 10 * rate)

    def configure_optimizers(self):
        self.calls += 1
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(False)
        return super().configure_optimizers()


@under([STAGES, BOTH])
def test_steps_that_read_their_optimizers(worlds, layout):
    report = check(worlds, ReadsRates, layout, epochs=2, steps=2)
    assert report.outcome == "same", str(report)


class TwoDicts(Manual):
    """A tuple of dicts, one per optimizer; both are stepped manually."""

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        for optimizer in (body, head):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        body = torch.optim.Adam(self.layers.parameters(), lr=1e-2)
        head = torch.optim.SGD(self.head.parameters(), lr=0.1)
        return (
            {"optimizer": body, "lr_scheduler": {"scheduler": StepLR(body, 1), "interval": "step"}},
            {"optimizer": head, "lr_scheduler": ExponentialLR(head, 0.5)},
        )


def test_two_manual_optimizers(worlds):
    for layout in (REPLICAS, STAGES, BOTH):
        report = check(worlds, TwoDicts, layout, num_microbatches=1)
        assert report.outcome == "same", str(report)


# --- which parameters an optimizer has -------------------------------------------------------------------------------


class BuiltInInit(Regression):
    """The optimizer is older than the strategy."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)

    def configure_optimizers(self):
        return [self.optimizer], [{"scheduler": self.scheduler, "interval": "step"}]


class GroupsByName(Regression):
    def configure_optimizers(self):
        decayed = [p for name, p in self.named_parameters() if not name.endswith("bias")]
        plain = [p for name, p in self.named_parameters() if name.endswith("bias")]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 0.02}], lr=1e-2)


class GroupsById(Regression):
    def configure_optimizers(self):
        head = {id(p) for p in self.head.parameters()}
        rest = [p for p in self.parameters() if id(p) not in head]
        return torch.optim.SGD([{"params": rest, "lr": 0.01}, {"params": self.head.parameters()}], lr=0.1)


class RatePerLayer(Regression):
    def configure_optimizers(self):
        groups = [
            {"params": layer.parameters(), "lr": 0.1 * 0.65 ** (len(self.layers) - depth), "name": f"layer {depth}"}
            for depth, layer in enumerate(self.layers)
        ]
        groups.append({"params": self.head.parameters(), "lr": 0.1})
        return torch.optim.SGD(groups, momentum=0.9, nesterov=True)


class NamedParameters(Regression):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.named_parameters(), lr=1e-2)


@each_under("module", [BuiltInInit, GroupsByName, GroupsById, RatePerLayer, NamedParameters], [STAGES, BOTH])
def test_groups_contain_the_module_parameters(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)
    assert not any("did not change" in note for note in report.notes)


# --- optimizers that are not elementwise -----------------------------------------------------------------------------


class WithAdafactor(Regression):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


class WithMuon(Regression):
    """Matrices by Muon; the rest by AdamW would be a second optimizer, so biases are frozen."""

    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.endswith("bias"))

    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class WithLamb(Regression):
    def configure_optimizers(self):
        return Lamb(self.parameters())


class WithScaledByNorm(Regression):
    def configure_optimizers(self):
        optimizer = ScaledByNorm(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step"}]


class WithScaledByRows(Regression):
    def configure_optimizers(self):
        return ScaledByRows(self.parameters())


class WithSharpnessAware(Regression):
    """Runs its closure twice, both times with the same dropout."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return super().forward(self.dropout(x))

    def configure_optimizers(self):
        return SharpnessAware(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


NOT_ELEMENTWISE = [WithSharpnessAware, WithAdafactor, WithMuon, WithLamb, WithScaledByNorm, WithScaledByRows]


@each_under("module", NOT_ELEMENTWISE, [STAGES, BOTH])
def test_optimizer_statistics_are_global(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


class WithLookahead(Regression):
    """Around an optimizer with state from its constructor."""

    def configure_optimizers(self):
        return Lookahead(torch.optim.Adagrad(self.parameters(), lr=1e-2))


@under([STAGES, TENSOR, LAYOUTS[4]], slow=[REPLICAS, COMBINED])
def test_lookahead_copies_are_on_the_parameter_device(worlds, layout):
    report = check(worlds, WithLookahead, layout, steps=4)
    assert report.outcome == "same", str(report)


class WithLBFGS(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=1)


@pytest.mark.parametrize("layout", [REPLICAS, STAGES, TENSOR, LAYOUTS[4]], ids=lambda layout: layout.name)
def test_lbfgs(worlds, layout):
    report = check(worlds, WithLBFGS, layout, num_microbatches=1)
    assert report.outcome == "same", str(report)


# --- schedulers that read the Trainer --------------------------------------------------------------------------------


class OneCycle(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = OneCycleLR(optimizer, 0.2, total_steps=self.trainer.estimated_stepping_batches + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class WarmsUp(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        warmup = LambdaLR(optimizer, lambda step: min((step + 1) / (total // 2), 1.0))
        return [optimizer], [{"scheduler": warmup, "interval": "step", "frequency": 1}]


class OneCycleAndRates(OneCycle):
    """Its step calls `optimizers()`, so that it is recorded with provisional ones."""

    def training_step(self, batch, batch_idx):
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class ReadsBatchCount(Regression):
    def configure_optimizers(self):
        assert self.trainer.num_training_batches != float("inf") or self.trainer.max_steps == -1
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": ConstantLR(optimizer, 0.5, self.trainer.max_epochs), "interval": "epoch"}]

    def on_train_epoch_start(self):
        self.log("batches", float(self.trainer.num_training_batches))


@each_under("module", [OneCycle, OneCycleAndRates, WarmsUp, ReadsBatchCount], [STAGES, BOTH])
def test_schedulers_get_the_run_length(worlds, module, layout):
    report = check(worlds, module, layout, epochs=2, steps=2)
    assert report.outcome == "same", str(report)


def test_max_steps_ends_every_rank(worlds):
    report = check(worlds, OneCycle, STAGES, epochs=2, steps=2, trainer={"max_steps": 3})
    assert report.outcome == "same" and report.steps == 3, str(report)


def test_accumulation(worlds):
    report = check(worlds, WithLamb, BOTH, steps=4, trainer={"accumulate_grad_batches": 2})
    assert report.outcome == "same", str(report)


@under([*LAYOUTS, COMBINED], slow=[TENSOR])
def test_tied_weights_count_once(worlds, layout):
    report = check(worlds, TiedLamb, layout)
    assert report.outcome == "same", str(report)


class TiedLamb(WithLamb):
    def __init__(self):
        super().__init__()
        self.layers[3][0].weight = self.layers[0][0].weight
        self.out = nn.Linear(FEATURES, FEATURES)
