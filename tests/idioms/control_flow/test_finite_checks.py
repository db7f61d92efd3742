"""Steps that check values of the model for finiteness, and raise, warn or skip the batch if one is not."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from harness.layouts import each_under
from harness.trainer_runs import ignore_warnings, trainer_of
from harness.verification import COMBINED, LAYOUTS, TENSOR, check
from lightning_hybrid.errors import LayoutError
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regressor, mlp
from models.tiny import Tiny, loader

TP2 = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
M2 = Layout("m2", devices=1, strategy={"num_microbatches": 2})


class Guarded(Regressor):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))

    def shared_step(self, batch):
        loss = super().shared_step(batch)
        self.guard(loss)
        return loss


class AsTensors(Guarded):
    """Finiteness checks of tensors, in many spellings."""

    def forward(self, x):
        hidden = self.body(x)
        assert not torch.isnan(hidden).any() and torch.isfinite(hidden).all(dim=-1).all()
        if (torch.isnan(hidden) | torch.isinf(hidden)).any() or (hidden != hidden)[0].any():
            print("not a number")
        if not torch.logical_and(~hidden.isnan(), hidden.isfinite()).all().item():
            raise ValueError("not finite")
        if hidden.isnan().sum() > 0 or torch.isnan(hidden).sum().item() > 0 or int(hidden.isinf().sum()):
            raise ValueError("not finite")
        return self.head(hidden)

    def guard(self, loss):
        if torch.isnan(loss):
            raise Exception("Loss is NaN, training stopped.")
        if loss != loss or torch.stack([loss.isneginf(), loss.isposinf()]).any():
            raise ValueError("not finite")
        assert torch.isfinite(loss), "loss"
        if bool(~torch.isfinite(loss.detach().cpu())):
            raise ValueError("not finite")


class AsNumbers(Guarded):
    """Checks by Python and NumPy; the numbers are stored too, and each batch has a dry run."""

    def __init__(self):
        super().__init__()
        self.kept, self.flag = [], None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1.5 if batch_idx % 2 else loss

    def guard(self, loss):
        if math.isnan(loss.item()) or not math.isfinite(float(loss)) or math.isinf(loss.item() / 2):
            raise ValueError("not finite")
        if np.isnan(loss.detach().cpu()) or np.isnan(loss.detach().cpu().numpy()).any() or np.isinf(loss.item()):
            raise ValueError("not finite")
        if math.isnan(loss):
            raise ValueError("not a number")
        number = loss.item()
        if number != number:
            raise ValueError("not a number")
        self.flag = torch.isnan(loss).item()
        if self.flag:
            raise ValueError("not a number")
        self.kept.append(number)

    def on_train_batch_end(self, *_):
        assert self.flag is False and len(self.kept) and all(math.isfinite(number) for number in self.kept)


class Skips(Guarded):
    """Skips a batch, and a term."""

    def training_step(self, batch, batch_idx):
        loss = super().shared_step(batch)
        penalty = self.head.weight.square().sum()
        if not torch.isnan(penalty):
            loss = loss + 0.1 * penalty
        if not torch.isfinite(loss):
            return None
        self.log("train_loss", loss)
        return loss

    def guard(self, loss):
        pass


class InsideLayers(Guarded):
    """A layer checks."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

        def forward(self, x):
            y = self.down(torch.tanh(self.up(x)))
            if torch.isnan(y).any():
                raise ValueError("not a number")
            return y

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(self.Layer() for _ in range(3)))

    def guard(self, loss):
        pass


# Layouts without stages run each module, with values present and possibly sharded.
@each_under(
    "module", [AsTensors, AsNumbers, Skips, InsideLayers], [LAYOUTS[0], *LAYOUTS[3:], TP2, M2], slow=[TENSOR, COMBINED]
)
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, steps=3)
    assert report.outcome == "same", str(report)


# --- a value that is not finite ---------------------------------------------------------------------------------------


def state_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if not is_absent(p)}


class Breaks(Tiny):
    """The model makes a NaN in the third batch of training or validation; the checks differ."""

    def __init__(self, check_finite, when, place):
        super().__init__()
        self.check_finite, self.when, self.place = check_finite, when, place

    def forward(self, x):
        hidden = self.layers[:2](x)
        if self.place == "early":
            self.check_finite(hidden.mean())
        return self.layers[2:](hidden)

    def loss(self, batch):
        loss = super().loss(batch)
        if self.place == "late":
            self.check_finite(loss)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.spoil(batch, batch_idx, "training")
        self.trainer.before = state_of(self)

    def on_validation_batch_start(self, batch, batch_idx):
        self.spoil(batch, batch_idx, "validation")

    def spoil(self, batch, batch_idx, when):
        if self.when == when and batch_idx == 2:
            batch["x"].fill_(math.nan)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))


def raise_on_nan(value):
    if torch.isnan(value):
        raise Exception("Loss is NaN, training stopped.")


def raise_on_infinite_number(value):
    if not math.isfinite(value.item()):
        raise ValueError("not finite")


def warn_on_nan(value):
    if torch.isnan(value).any().item():
        print("NaN")


def run_breaking(size, options, check_finite, place):
    """Messages of each rank, and whether its parameters are unchanged by the batch."""
    ignore_warnings()
    model = Breaks(check_finite, "training", place)
    pp = options.pop("pipeline_parallel_size", 1)
    trainer = trainer_of(size, pp, strategy_options=options, num_sanity_val_steps=0)
    try:
        trainer.fit(model, loader(4, 32))
    except Exception as error:
        texts = [str(error), *getattr(error, "__notes__", [])]
        pairs = [(trainer.before[name], p) for name, p in state_of(model).items() if name in trainer.before]
        # ranks end with full parameters
        same = all(torch.equal(before, p) for before, p in pairs if before.shape == p.shape)
        return type(error).__name__, texts, same and trainer.global_step == 2
    return None


BROKEN = {
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "m2": (1, {"num_microbatches": 2}),
    "dp2 x pp2": (4, {"pipeline_parallel_size": 2}),
}
CHECKED = [(name, raise_on_nan, "late") for name in ("pp2", "dp2 x pp2")]
CHECKED += [("pp2", raise_on_infinite_number, "late"), ("pp2", warn_on_nan, "early")]


@pytest.mark.parametrize(("name", "check_finite", "place"), CHECKED)
def test_nan_batch_reaches_the_check(worlds, name, check_finite, place):
    size, options = BROKEN[name]
    for result in worlds.run(size, run_breaking, size, dict(options), check_finite, place, timeout=30):
        if check_finite is warn_on_nan:
            assert result is None
        else:
            error, texts, unchanged = result
            assert unchanged, (error, texts)


class SkipsInValidation(Breaks):
    """Logs finite values, and the number of others."""

    def validation_step(self, batch, batch_idx):
        loss = super(Breaks, self).loss(batch)
        if torch.isnan(loss):
            self.log("skipped", 1.0, reduce_fx="sum")
            return
        if not math.isnan(loss.item()):
            self.log("val", loss)


def run_validating(size, options):
    ignore_warnings()
    pp = options.pop("pipeline_parallel_size", 1)
    trainer = trainer_of(size, pp, strategy_options=options, num_sanity_val_steps=0)
    trainer.fit(SkipsInValidation(raise_on_nan, "validation", "late"), loader(4, 32), loader(4, 32))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("name", ["pp2", "tp2", "m2"])
def test_evaluation_branches_on_finiteness(worlds, name):
    size, options = BROKEN[name]
    [expected] = worlds.run(1, run_validating, 1, {})
    assert expected.keys() == {"val", "skipped"}
    for metrics in worlds.run(size, run_validating, size, dict(options)):
        assert metrics == pytest.approx(expected, rel=1e-10)


# --- what no recording decides ---------------------------------------------------------------------------------------


class Decides(Tiny):
    def __init__(self, on_number):
        super().__init__()
        self.on_number = on_number

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        loss = loss * 2 if (float(loss) if self.on_number else loss) > 1e-9 else loss
        self.log("loss", loss)
        return loss


def run_deciding(size, options, on_number):
    ignore_warnings()
    options = dict(options)
    trainer = trainer_of(size, options.pop("pipeline_parallel_size", 1), strategy_options=options)
    trainer.fit(Decides(on_number), loader(4))
    return float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize(
    ("name", "on_number"), [("pp2", False), ("pp2", True), ("tp2", False), ("zero3", True), ("m2", False)]
)
def test_branch_on_model_values(worlds, name, on_number):
    size, options = BROKEN[name]
    [expected] = worlds.run(1, run_deciding, 1, {}, on_number)
    found = worlds.run(size, run_deciding, size, options, on_number)
    if "zero_stage" in options:  # whose replicas see other batches
        assert len(set(found)) == 1
    else:
        assert found == pytest.approx([expected] * size, rel=1e-10)


def refuse_deciding(size, options):
    ignore_warnings()
    trainer = trainer_of(size, size, strategy_options=options)
    with pytest.raises(LayoutError, match=r"strict_layout=True.*the step branches on a value"):
        trainer.fit(Decides(True), loader(4))
    return True


def test_strict_layout_refuses_branches(worlds):
    assert all(worlds.run(2, refuse_deciding, 2, {"strict_layout": True}))
