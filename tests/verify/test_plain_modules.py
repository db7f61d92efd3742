"""Plain modules match single-process training under every layout, and a wrong one is detected."""

import os
import re

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.verification import LAYOUTS, check
from lightning_hybrid.verify import Layout, table
from models.regression import FEATURES, Dropping, Logging, Normalised, Plain


class DroppingNormalised(Normalised):
    def forward(self, x):
        return self.head(F.dropout(self.net(x), 0.1, self.training))


MODULES = [Plain, Normalised, Logging, Dropping, DroppingNormalised]


def each_case():
    """Each over replicas of stages; without stages, and with several per rank, the last one covers the others."""
    for module in MODULES:
        for layout in LAYOUTS:
            default = layout is LAYOUTS[2] or (layout in (LAYOUTS[1], LAYOUTS[3]) and module is DroppingNormalised)
            default |= layout is LAYOUTS[1] and module is Plain
            marks = [] if default else [pytest.mark.slow]
            yield pytest.param(module, layout, id=f"{module.__name__}-{layout.name}", marks=marks)


@pytest.mark.parametrize(("module", "layout"), list(each_case()))
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, resume=True)
    assert report.outcome == "same", str(report)
    assert report.steps > 0
    assert ("the module draws random numbers" in str(report)) == (module in (Dropping, DroppingNormalised))
    assert ("mixes samples" in str(report)) == (module in (Normalised, DroppingNormalised)), str(report)


def test_one_microbatch(worlds):
    assert check(worlds, Plain, LAYOUTS[0], num_microbatches=1).outcome == "same"
    assert check(worlds, Logging, LAYOUTS[1], num_microbatches=1).outcome == "same"


def test_accumulation_and_epochs(worlds):
    report = check(worlds, Plain, LAYOUTS[2], epochs=2, trainer={"accumulate_grad_batches": 2})
    assert report.outcome == "same", str(report)


class Perplexity(Plain):
    """Logs a number that no mean over microbatches gives, beside a loss that has as many terms as a mask selects."""

    def training_step(self, batch, batch_idx):
        x, y, mask = batch
        loss = ((self(x) - y) ** 2 * mask).sum() / mask.sum()
        self.log("loss", loss)
        self.log("ppl", loss.exp())
        return loss


def masked_data():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, FEATURES, generator=generator), torch.randn(32, 1, generator=generator)
    return DataLoader(TensorDataset(x, y, torch.rand(32, 6, generator=generator) > 0.5), 8)


def test_logged_numbers_that_the_run_warns_of_are_no_difference(worlds):
    report = check(worlds, Perplexity, LAYOUTS[1], make_data=masked_data)
    assert (report.outcome, report.declared) == ("same", ("ppl",)), str(report)
    [note] = [note for note in report.notes if "ppl" in note]
    assert note.startswith("metric ppl is not the batch's, and the run says so: training_step logs 'ppl'")
    assert "same but ppl" in table([report])


# --- what is wrong is found out --------------------------------------------------------------------------------------


class Unseeded(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = int.from_bytes(os.urandom(4), "little") / 2**32
        return F.mse_loss(self(x + noise), y)


class CountsRanks(Plain):
    """Its objective depends on how many replicas there are."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.trainer.world_size


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Contrasts(Plain):
    """The spread within a batch is no mean over samples."""

    def training_step(self, batch, batch_idx):
        return self(batch[0]).std()


def test_unseeded_module_differs(worlds):
    report = check(worlds, Unseeded, LAYOUTS[0])
    assert report.outcome == "different" and "source without a seed" in report.message
    assert report.first is not None and report.first.key.step == 1


def test_objective_of_the_layout_differs(worlds):
    report = check(worlds, CountsRanks, LAYOUTS[1])
    assert report.outcome == "different"
    assert str(report.first.key) == "loss" and report.first.key.step == 1
    assert report.first.value == pytest.approx(2 * report.first.reference)
    title, head, first, *_ = report.worst_lines()
    assert re.match(rf"{LAYOUTS[1].name}: \d+ values differ, most of all step 1:", title)
    assert head.split()[:3] == ["value", "rank", LAYOUTS[1].name] and len(report.worst) == 5
    assert re.search(r"(loss|(gradient norm|update) of \S+).* 1$", first), first


def test_wrong_scale_differs(worlds):
    # Counts of 0 and 1 weigh microbatches differently in the two runs: the reference does not know this one.
    layout = Layout("weighted", 2, {"pipeline_parallel_size": 2, "microbatch_weight": first_counts_double})
    report = check(worlds, Plain, layout)
    assert report.outcome == "different" and report.first.key.step == 1


def first_counts_double(microbatch):
    first_counts_double.calls += 1
    has_mesh = len(torch.distributed.distributed_c10d._world.pg_map) > 1  # the user's world is one replica in both
    return 1.0 + first_counts_double.calls % 2 * has_mesh


first_counts_double.calls = 0


class Noisy(Dropping):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class ManualNoise(Noisy):
    """Draws in a step that calls its backward itself: what one process draws, since its batches are not split."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.log("loss", loss)


def test_manual_steps_draw_as_one_process_does(worlds):
    report = check(worlds, ManualNoise, LAYOUTS[0])
    assert report.outcome == "same", str(report)


def test_refusal_is_its_own_outcome(worlds):
    strict = Layout("strict", devices=2, strategy={**LAYOUTS[0].strategy, "strict_layout": True})
    report = check(worlds, Manual, strict)
    assert report.outcome == "refused" and "manual optimization" in report.message
    assert report.passes() and not report.passes(strict=True)


def test_batches_of_an_objective_that_mixes_samples_are_not_split(worlds):
    report = check(worlds, Contrasts, LAYOUTS[0])
    assert report.outcome == "same", str(report)
    assert not any("mixes samples" in note for note in report.notes)


@pytest.mark.parametrize("module", [Dropping, Noisy, DroppingNormalised])
def test_rows_of_the_full_batch_draw_the_numbers_of_their_microbatches(worlds, module):
    report = check(worlds, module, LAYOUTS[0])
    assert report.outcome == "same", str(report)
    assert any("mixes samples" in note for note in report.notes) == (module is DroppingNormalised)


class Encodes(LightningModule):
    """Its layers drop, which ranks that share them draw each for itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        [x] = batch
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sequences():
    return DataLoader(TensorDataset(torch.randn(16, 5, 8, generator=torch.Generator().manual_seed(1))), 8)


def test_ranks_that_share_layers_are_compared_without_dropout(worlds):
    report = check(worlds, Encodes, Layout("tp2", 2, {"tensor_parallel_size": 2}), make_data=sequences)
    assert report.outcome == "same" and report.notes[-1].endswith("both sides ran without dropout"), str(report)


class Masks(LightningModule):
    """Reconstructs rows that its loaders have masked at random."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def masked(rows):
    x = torch.stack(rows)
    torch.rand(int(10 * x[:, 0].abs().sum()))  # as much as the batch is long: replicas draw differently often
    return x * (torch.rand(x.shape) > 0.3), x


def masked_rows():
    rows = list(torch.randn(48, 6, generator=torch.Generator().manual_seed(1)))
    loaders = [DataLoader(of, 8, collate_fn=masked) for of in (rows[:32], rows[32:])]
    return {"train_dataloaders": loaders[0], "val_dataloaders": loaders[1]}


@pytest.mark.parametrize("layout", [Layout("dp2", 2), Layout("dp2 x pp2", 4, {"pipeline_parallel_size": 2})])
def test_replicas_whose_loaders_draw_differently_often(worlds, layout):
    report = check(worlds, Masks, layout, make_data=masked_rows)
    assert report.outcome == "same", str(report)


class DropsWeights(LightningModule):
    """Dropout of a weight, which each microbatch draws in full, and a loss that weighs microbatches by labels."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6) * 0.3) for _ in range(3))
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 5)

    def training_step(self, batch, batch_idx):
        x, labels = batch
        for weight in self.weights:
            x = (x @ self.drop(weight)).tanh()
        return nn.functional.cross_entropy(self.head(x), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def labelled():
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (16,), generator=draw)
    labels[::3] = -100
    return DataLoader(TensorDataset(torch.randn(16, 6, generator=draw), labels), 8)


def test_dropout_of_weights_is_left_out(worlds):
    layout = Layout("m2", 1, {"pipeline_parallel_size": 1, "num_microbatches": 2})
    report = check(worlds, DropsWeights, layout, make_data=labelled)
    assert report.outcome == "same" and report.notes[-1].endswith("both sides ran without dropout"), str(report)
