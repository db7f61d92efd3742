"""`microbatch="auto"` in one process: what a step that runs again must restore, and when it cannot run again."""

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from harness.trainer_runs import assert_same, trainer_of, weights_of
from lightning_hybrid.errors import RankOutOfMemory, StepError
from models.planted_out_of_memory import PLANT, Planted
from models.tiny import loader

pytestmark = pytest.mark.filterwarnings("ignore:microbatch=:UserWarning", "ignore:the objective mixes:UserWarning")


@pytest.fixture(autouse=True)
def unplanted():
    yield
    PLANT.__init__()


def fit(module, rows=None, *, num_microbatches="auto", where="forward", kind=torch.OutOfMemoryError, **options):
    """Fit in one process where memory suffices for so many rows; by Lightning's own strategy if it is not limited."""
    PLANT.__init__(rows, where, 1, kind)
    strategy = {"microbatch": "auto", "num_microbatches": num_microbatches} if rows else {}
    trainer = trainer_of(strategy_options=strategy, log_every_n_steps=1, num_sanity_val_steps=0, **options)
    trainer.fit(module, loader(8, 32))
    return trainer


def values_of(module, trainer):
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    return {**weights_of(module), **buffers, **trainer.callback_metrics}


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError, MemoryError])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_numbers_are_those_of_full_batches(where, kind):
    module, expected = Planted(), Planted()
    trainer = fit(module, 3, where=where, kind=kind)
    assert PLANT.num_failures == 2  # of 8 rows, and of 4
    assert_same(values_of(module, trainer), values_of(expected, fit(expected)))


class KeepsValues(Planted):
    """Counts its steps, appends to a list, and updates a metric and a buffer."""

    def __init__(self):
        super().__init__()
        self.seen, self.num_steps, self.metric = [], 0, MeanMetric()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        self.rows += len(batch["x"])
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach())
        self.seen.append(loss.detach())
        return loss


def test_what_a_failed_step_has_left_on_its_module_is_undone():
    module, expected = KeepsValues(), KeepsValues()
    fit(module, 3, where="backward")
    fit(expected, 99, num_microbatches=4)
    assert PLANT.num_failures == 0
    assert (module.rows, module.num_steps) == (expected.rows, expected.num_steps)
    assert len(module.seen) == len(expected.seen)
    assert torch.equal(module.metric.compute(), expected.metric.compute())


class Dropped(Planted):
    def training_step(self, batch, batch_idx):
        return super().training_step({**batch, "x": F.dropout(batch["x"], 0.3)}, batch_idx)


def test_random_numbers_are_those_of_a_run_with_the_final_number():
    module, expected = Dropped(), Dropped()
    fit(module, 2)
    fit(expected, 99, num_microbatches=4)
    assert_same(weights_of(module), weights_of(expected))
    before = Dropped()
    fit(before, 99, num_microbatches=1)
    assert not torch.equal(before.head.weight, module.head.weight)


def test_accumulated_gradients_of_earlier_batches_stay():
    module, expected = Planted(), Planted()
    trainer = fit(module, 3, accumulate_grad_batches=2)
    assert PLANT.num_failures
    assert_same(values_of(module, trainer), values_of(expected, fit(expected, accumulate_grad_batches=2)))


class LaterTooLarge(Planted):
    """Memory suffices for the first two batches only, as where another has longer sequences."""

    def training_step(self, batch, batch_idx):
        PLANT.limit = 4 if batch_idx >= 2 else 8
        return super().training_step({**batch, "y": batch["y"]}, batch_idx)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        more = 1 + 9 * (self.trainer.fit_loop.epoch_loop.total_batch_idx >= 1)
        return {**batch, "padding": torch.zeros(len(batch["x"]), more)}


def test_a_later_batch_that_is_larger():
    module, expected = LaterTooLarge(), Planted()
    fit(module, 8)
    assert PLANT.num_failures == 1
    fit(expected)
    assert_same(weights_of(module), weights_of(expected))


class MaskedMean(Planted):
    """A mean over the samples with an even index of some batches: microbatches have different numbers of these."""

    def training_step(self, batch, batch_idx):
        mask = batch["mask"]
        error = F.mse_loss(self.head(self.blocks(batch["x"])), batch["y"], reduction="none")[:, 0]
        return (error * mask).sum() / mask.sum()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "mask": torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.float64)}


@pytest.mark.parametrize("where", ["forward", "evaluation"])
def test_microbatches_weigh_by_counts_of_a_mask(where):
    module, expected = MaskedMean(), MaskedMean()
    fit(module, 4, num_microbatches=1 if where == "forward" else 2, where=where)  # two microbatches are compared
    assert PLANT.num_failures == 1
    fit(expected)
    assert_same(weights_of(module), weights_of(expected))


class Contrastive(Planted):
    def training_step(self, batch, batch_idx):
        out = self.blocks(batch["x"])
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))


class WritesParameters(Planted):
    """Moves a copy of its head, as a momentum encoder."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(4, 1).double().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.target.weight.lerp_(self.head.weight, 0.1)
        return super().training_step(batch, batch_idx)


def test_an_objective_that_mixes_samples_is_refused():
    with pytest.raises(StepError, match="not the mean"):
        fit(Contrastive(), 4)


def test_a_step_that_writes_parameters_cannot_run_again():
    with pytest.raises(RankOutOfMemory, match="writes parameters"):
        fit(WritesParameters(), 4)


def test_a_microbatch_of_one_sample_that_does_not_fit_ends_the_run():
    PLANT.limit = 0

    class Never(Planted):
        def training_step(self, batch, batch_idx):
            PLANT.limit = 0
            return super().training_step(batch, batch_idx)

    with pytest.raises(RankOutOfMemory, match="one sample, with 8 microbatches"):
        fit(Never(), 1)


class Manual(Planted):
    automatic_optimization = False


@pytest.mark.parametrize(
    "module, options, callbacks, reason",
    [
        (lambda: Planted(norm=True), {}, [], "BatchNorm"),
        (Planted, {"batch_splitter": lambda batch, count: [batch] * count}, [], "batch_splitter"),
        (Planted, {"optimizer_in_backward": True}, [], "optimizer_in_backward"),
        (Planted, {"verify_first_step": True}, [], "verify_first_step"),
        (Planted, {}, [BatchSizeFinder()], "BatchSizeFinder"),
        (Manual, {}, [], "manual optimization"),
    ],
)
def test_refusals(module, options, callbacks, reason):
    trainer = trainer_of(strategy_options={"microbatch": "auto", **options}, callbacks=callbacks)
    with pytest.raises(ValueError, match=f'microbatch="auto".*{reason}'):
        trainer.fit(module())


def test_no_other_value():
    with pytest.raises(ValueError, match="use 'auto'"):
        trainer_of(strategy_options={"microbatch": 4})
