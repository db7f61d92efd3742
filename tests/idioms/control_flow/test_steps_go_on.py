"""Steps that leave their trace in the middle of a run go on, by another trace, on shards, or unpartitioned.

Each run has 20 steps, saves in between, and resumes from that file; its weights and logs are those of Lightning's own
Trainer in one process.
"""

import copy
import warnings

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset, TensorDataset

from harness.fits import Run, joined_batches, trainer_of
from harness.trainer_runs import assert_same
from lightning_hybrid import Hybrid3DStrategy
from models.regression import FEATURES, Regression

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}
INTERLEAVED = {**PP2, "stages_per_rank": 2}
BY_LAYER = {**PP2, "zero_stage": 3, "reshard_after_forward": True}
TENSOR = {**PP2, "tensor_parallel_size": 2}
NOW = {}  # which no guard sees


class Heads(Regression):
    """The head of a batch is chosen by what no guard sees."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(FEATURES, 1) for _ in range(2))

    def on_train_batch_start(self, batch, batch_idx):
        NOW["is_late"] = self.trainer.global_step >= 5

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        NOW["is_second"] = batch_idx % 2

    def hidden(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.heads[NOW["is_late"]](self.hidden(x))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.heads[NOW["is_second"]](self.hidden(x)), y))


class ByNumberOfBatch(Heads):
    """A list is indexed by the number of the batch, which C code reads unseen."""

    order = [0, 0, 1, 0, 1, 1, 0, 0, 1, 1] * 2

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.heads[self.order[batch_idx]](self.hidden(x)), y)


class Branches(Heads):
    """Late in the run it branches on a value of the model; before that it writes buffers, lists and its batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(float(x.mean()))
        if NOW["is_late"]:
            x.mul_(1.1)
        h = self.hidden(x)
        if NOW["is_late"] and h.mean().item() < 10:
            h = 0.9 * h
        return F.mse_loss(self.heads[0](h), y)

    def on_train_batch_end(self, *_):
        self.mean += sum(self.seen)
        self.seen.clear()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        h = self.hidden(x)
        if NOW["is_second"] and h.mean().item() < 10:
            h = 2 * h
        self.log("val_loss", F.mse_loss(self.heads[0](h), y))


class BranchesOnOneReplica(Branches):
    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.hidden(x)
        if NOW["is_late"] and self.trainer.global_rank % 2 == 0 and h.mean().item() < 10:
            h = 1.0 * h
        return F.mse_loss(self.heads[0](h), y)


class TwoLoaders(Heads):
    """Head and metric are those of the loader; the heads are made late."""

    metrics = torchmetrics.MeanAbsoluteError, torchmetrics.MeanSquaredError

    def configure_model(self):
        if not hasattr(self, "errors"):
            self.heads = nn.ModuleList([nn.Linear(FEATURES, 1), nn.Sequential(nn.Linear(FEATURES, 1), nn.Tanh())])
            self.heads.double()
            self.errors = nn.ModuleList(metric().set_dtype(torch.float64) for metric in self.metrics)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return sum(F.mse_loss(head(self.hidden(x)), y) for head in self.heads)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        error = self.errors[dataloader_idx]
        error(self.heads[dataloader_idx](self.hidden(x)), y)
        self.log(f"error {dataloader_idx}", error, add_dataloader_idx=False)


class TwoLoadersOneClass(TwoLoaders):
    metrics = torchmetrics.MeanAbsoluteError, torchmetrics.MeanAbsoluteError


class Packed(Regression):
    """Packed sequences between layers, of lengths from the batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = (nn.GRU(size, FEATURES, batch_first=True) for size in (1, FEATURES))

    def forward(self, x):
        lengths = (2 * x[:, 0].abs()).long().clamp(1, FEATURES)
        h = self.layers[0](x).unsqueeze(-1)
        for recurrent, layer in ((self.inner, self.layers[1]), (self.outer, self.layers[2])):
            packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(recurrent(packed)[0], batch_first=True, total_length=FEATURES)
            h = layer(h)
        return self.head(h.mean(1))


class Distils(Branches):
    """A frozen teacher, losses over hidden states, and an average of the student's weights that is validated."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.average = AveragedModel(self.layers, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def training_step(self, batch, batch_idx):
        (x, y), loss = batch, 0.0
        h = taught = x
        for layer, old in zip(self.layers, self.teacher, strict=True):
            with torch.no_grad():
                taught = old(taught)
            h = layer(h)
            loss = loss + F.mse_loss(h, taught)
        if NOW["is_late"] and h.mean().item() < 10:
            loss = 2 * loss
        return loss + F.mse_loss(self.heads[0](h), y)

    def on_train_batch_end(self, *_):
        self.average.update_parameters(self.layers)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        for layer in self.average.module:
            x = layer(x)
        self.log("val_loss", F.mse_loss(self.heads[0](x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW([*self.layers.parameters(), *self.heads.parameters()], lr=0.01)


def fit(make_module, replicas, world_size, options, folder, batches, resumed=None, **trainer):
    """On a rank: 20 steps from the start or from a file; weights and logs."""
    generator, joined = torch.Generator().manual_seed(1), Run("", dp=replicas, num_batches=batches)
    size = joined.num_samples
    data = TensorDataset(*(torch.randn(size, n, generator=generator).double() for n in (FEATURES, 1)))
    strategy = None if options is None else Hybrid3DStrategy(**options)
    how = {"batch_sampler": joined_batches(joined)} if options is None else {"batch_size": joined.batch_size}
    val = [DataLoader(Subset(data, range(n)), batch_size=4) for n in (8, 16)] if replicas == 1 else None
    torch.manual_seed(0)
    module = make_module().double()
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"val_check_interval": 4, "limit_val_batches": 3} if val else {}
    run = trainer_of(world_size, strategy, [saves], enable_checkpointing=True, **options, **trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(
            module,
            DataLoader(data, **how),
            val[: 1 + hasattr(make_module, "metrics")] if val else None,
            ckpt_path=resumed,
        )
    logged = {name: value.double() for name, value in run.callback_metrics.items()}
    return {**module.state_dict(), **logged}, [str(each.message) for each in caught]


GOES_ON = [
    (ByNumberOfBatch, PP2, {}, ""),
    (Heads, PP2, {"accumulate_grad_batches": 4}, ""),
    (Branches, PP2, {}, "sharded instead"),
    (Branches, PP2, {"accumulate_grad_batches": 4}, "sharded instead"),
    (TwoLoaders, PP2, {}, ""),
    (TwoLoadersOneClass, PP2, {}, ""),
    (Packed, PP2, {}, ""),
    (Distils, PP2, {}, "sharded instead"),
]
SLOW = [
    *((Branches, layout, {}, "sharded instead") for layout in (INTERLEAVED, TENSOR)),
    *((BranchesOnOneReplica, layout, {}, "sharded instead") for layout in (PP2, BY_LAYER)),
    *((module, layout, {}, "") for module in (ByNumberOfBatch, Heads) for layout in (INTERLEAVED, BY_LAYER, TENSOR)),
    *((Distils, layout, {}, "sharded instead") for layout in (INTERLEAVED, TENSOR, BY_LAYER)),
]


@pytest.mark.parametrize(
    ("module", "options", "trainer", "warning"),
    [*GOES_ON, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_step_goes_on(worlds, tmp_path, module, options, trainer, warning):
    replicas = 2 if "zero_stage" in options or module is BranchesOnOneReplica else 1
    size = 2 * replicas * options.get("tensor_parallel_size", 1)
    batches = 20 * trainer.get("accumulate_grad_batches", 1)
    for file in (None, "step=12.ckpt"):
        plain, hybrid = (file and tmp_path / name / file for name in ("plain", "hybrid"))
        [(expected, _)] = worlds.run(1, fit, module, replicas, 1, None, tmp_path / "plain", batches, plain, **trainer)
        results = worlds.run(
            size, fit, module, replicas, size, options, tmp_path / "hybrid", batches, hybrid, **trainer
        )
        for state, _ in results:
            assert_same(state, expected, rtol=1e-8)
        said = " ".join(results[0][1])
        assert warning in said and ("sharded" in said) == bool(warning), said
