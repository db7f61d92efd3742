"""Forecasting: blocks of residuals, quantiles, teacher forcing, masked horizons, scales that are kept in buffers."""

import random

import torch
import torchmetrics
from conformance.case import Case, Rows, loaders, tensor_loaders, waves
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributions import StudentT
from torch.nn import functional as F

HISTORY, HORIZON, FEATURES = 8, 4, 3


class SymmetricError(torchmetrics.Metric):
    """The symmetric mean absolute percentage error, as a metric that is also the loss."""

    full_state_update, is_differentiable = False, True

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predicted, target):
        losses = 2 * (predicted - target).abs() / (predicted.abs() + target.abs() + 1e-2)
        self.total = self.total + losses.sum()
        self.count += losses.numel()

    def compute(self):
        return self.total / self.count


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(HISTORY, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.backcast, self.forecast = nn.Linear(width, HISTORY), nn.Linear(width, HORIZON)

    def forward(self, x):
        hidden = self.body(x)
        return self.backcast(hidden), self.forecast(hidden)


class NBeats(LightningModule):
    """Its hyperparameters hold the loss and metrics, as those of pytorch-forecasting do."""

    def __init__(self, width=8, blocks=4, backcast_ratio=0.3, learning_rate=1e-2, loss=None, logging_metrics=None):
        super().__init__()
        loss = SymmetricError() if loss is None else loss
        if logging_metrics is None:
            # In the module's dtype: sums in float32 differ by the grouping of updates.
            metrics = torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()
            logging_metrics = nn.ModuleList([metric.set_dtype(torch.float64) for metric in metrics])
        self.save_hyperparameters()
        self.loss = loss
        self.logging_metrics = logging_metrics
        self.net_blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.training_step_outputs = []

    def forward(self, x):
        target = x["encoder_target"]
        location, scale = x["target_scale"][:, :1], x["target_scale"][:, 1:]
        backcast, forecast = (target - location) / scale, 0.0
        for block in self.net_blocks:
            removed, added = block(backcast)
            backcast, forecast = backcast - removed, forecast + added
        return {"prediction": forecast * scale + location, "backcast": backcast * scale + location}

    def step(self, batch, stage):
        x, (y, _) = batch
        out = self(x)
        loss = self.loss(out["prediction"], y)
        ratio = self.hparams.backcast_ratio
        if stage == "train" and ratio > 0:
            backcast_loss = self.loss(out["backcast"], x["encoder_target"])
            loss = loss * (1 - ratio) + backcast_loss * ratio
        self.log(f"{stage}_loss", loss, on_step=stage == "train", on_epoch=True, prog_bar=True, batch_size=len(y))
        for metric in self.logging_metrics:
            value = metric(out["prediction"].detach(), y)
            self.log(f"{stage}_{type(metric).__name__}", value, on_step=False, on_epoch=True, batch_size=len(y))
        return {"loss": loss, "n_samples": len(y)}

    def training_step(self, batch, batch_idx):
        log = self.step(batch, "train")
        self.training_step_outputs.append(log["loss"].detach())
        return log

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "val")

    def on_train_epoch_end(self):
        self.log("epoch_loss", torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def series(index):
    values = waves(HISTORY + HORIZON, count=index + 1)[index] + 0.1 * index
    past = values[:HISTORY]
    x = {"encoder_target": past, "target_scale": torch.stack([past.mean(), past.std() + 0.1])}
    return x, (values[HISTORY:], torch.ones(HORIZON))


def series_data():
    return loaders(Rows(series), Rows(series, 16))


class Gated(nn.Module):
    """A gated residual network."""

    def __init__(self, width, context=False):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.context = nn.Linear(width, width, bias=False) if context else None
        self.gate, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(width)

    def forward(self, x, context=None):
        hidden = self.one(x)
        if context is not None:
            hidden = hidden + self.context(context)
        return self.norm(x + F.glu(self.gate(self.two(F.elu(hidden)))))


class TemporalFusion(LightningModule):
    """Variables are selected by weights, the future attends to the past, and each quantile has its output."""

    def __init__(self, width=8, quantiles=(0.1, 0.5, 0.9), lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.ModuleList(nn.Linear(1, width) for _ in range(FEATURES))
        self.category = nn.Embedding(4, width)
        self.selection = nn.Linear(FEATURES * width, FEATURES)
        self.variables = nn.ModuleList(Gated(width) for _ in range(FEATURES))
        self.encoder, self.decoder = nn.LSTM(width, width, batch_first=True), nn.LSTM(width, width, batch_first=True)
        self.static = Gated(width, context=True)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.positionwise = Gated(width)
        self.out = nn.Linear(width, len(quantiles))
        self.register_buffer("quantiles", torch.tensor(quantiles))

    def forward(self, x, category):
        embedded = [layer(x[..., [index]]) for index, layer in enumerate(self.embed)]
        weights = self.selection(torch.cat(embedded, -1)).softmax(-1)
        selected = torch.stack([grn(e) for grn, e in zip(self.variables, embedded, strict=True)], -1)
        inputs = (selected * weights.unsqueeze(-2)).sum(-1)
        past, state = self.encoder(inputs[:, :HISTORY])
        future, _ = self.decoder(inputs[:, HISTORY:], state)
        sequence = self.static(torch.cat([past, future], 1), self.category(category)[:, None])
        length = sequence.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)[HISTORY:]
        attended, attention = self.attention(sequence[:, HISTORY:], sequence, sequence, attn_mask=mask)
        return self.out(self.positionwise(attended + sequence[:, HISTORY:])), attention

    def quantile_loss(self, predicted, target):
        error = target.unsqueeze(-1) - predicted
        return torch.maximum((self.quantiles - 1) * error, self.quantiles * error).sum(-1).mean()

    def training_step(self, batch, batch_idx):
        x, category, y = batch
        predicted, _ = self(x, category)
        loss = self.quantile_loss(predicted, y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, category, y = batch
        predicted, attention = self(x, category)
        covered = (y >= predicted[..., 0]) & (y <= predicted[..., -1])
        self.log_dict({"val_loss": self.quantile_loss(predicted, y), "coverage": covered.float().mean()})
        self.log("attention_to_last", attention[..., HISTORY - 1].mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def panel_data():
    x = waves(HISTORY + HORIZON, FEATURES)
    return tensor_loaders(x, torch.arange(len(x)) % 4, x[:, HISTORY:].sum(-1).tanh())


class Seq2Seq(LightningModule):
    """Decodes step by step; whether a step is fed the truth is drawn, less often in later epochs."""

    def __init__(self, hidden=8, teacher_forcing=0.8):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.LSTM(1, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.cells = nn.ModuleList([nn.LSTMCell(1, hidden), nn.LSTMCell(hidden, hidden)])
        self.fc = nn.Linear(hidden, 1)
        self.teacher_forcing = teacher_forcing

    def on_train_epoch_start(self):
        self.teacher_forcing = self.hparams.teacher_forcing * 0.5**self.current_epoch

    def forward(self, source, target=None, teacher_forcing=0.0):
        _, (hidden, cell) = self.encoder(source)
        states = [(hidden[layer], cell[layer]) for layer in range(len(self.cells))]
        step, outputs = source[:, -1], []
        for time in range(HORIZON):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(step if layer == 0 else states[layer - 1][0], states[layer])
            output = self.fc(states[-1][0])
            outputs.append(output)
            use_truth = target is not None and random.random() < teacher_forcing
            step = target[:, time] if use_truth else output
        return torch.stack(outputs, 1)

    def training_step(self, batch, batch_idx):
        source, target = batch
        loss = F.smooth_l1_loss(self(source, target, self.teacher_forcing), target)
        self.log("train_loss", loss, prog_bar=True)
        self.log("teacher_forcing", self.teacher_forcing)
        return loss

    def validation_step(self, batch, batch_idx):
        source, target = batch
        self.log("val_loss", F.mse_loss(self(source), target))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def sequence_data():
    values = waves(HISTORY + HORIZON, 1)
    return tensor_loaders(values[:, :HISTORY], values[:, HISTORY:])


class MultiHorizon(LightningModule):
    """Dilated convolutions; each series has its own length and its own part of the horizon that counts."""

    def __init__(self, channels=8, levels=3, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.inputs = nn.Conv1d(2, channels, 1)
        self.levels = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=2**k) for k in range(levels))
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for _ in range(levels))
        self.heads = nn.ModuleDict({f"step_{k}": nn.Linear(channels, 1) for k in range(HORIZON)})
        self.mae = nn.ModuleList(torchmetrics.MeanAbsoluteError() for _ in range(HORIZON))

    def forward(self, past, observed):
        h = self.inputs(torch.stack([past.masked_fill(~observed, 0.0), observed.to(past)], 1))
        for level, (conv, norm) in enumerate(zip(self.levels, self.norms, strict=True)):
            filtered, gate = conv(F.pad(h, (2**level, 0))).chunk(2, 1)
            h = norm(h + filtered.tanh() * gate.sigmoid())
        weights = observed.to(h).unsqueeze(1)
        pooled = (h * weights).sum(-1) / weights.sum(-1).clamp(min=1)
        return torch.cat([self.heads[f"step_{k}"](pooled) for k in range(HORIZON)], 1)

    def masked_loss(self, batch):
        past, observed, future, counts = batch["past"], batch["observed"], batch["future"], batch["counts"]
        predicted = self(past, observed)
        return ((predicted - future) ** 2 * counts).sum() / counts.sum(), predicted

    def training_step(self, batch, batch_idx):
        loss, _ = self.masked_loss(batch)
        self.log("loss", loss, batch_size=len(batch["past"]))
        return loss

    def validation_step(self, batch, batch_idx):
        loss, predicted = self.masked_loss(batch)
        self.log("val_loss", loss, batch_size=len(batch["past"]))
        for step, metric in enumerate(self.mae):
            keep = batch["counts"][:, step].bool()
            if keep.any():
                metric.update(predicted[keep, step], batch["future"][keep, step])
            self.log(f"val_mae/{step}", metric, batch_size=len(batch["past"]))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches) + 1
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def masked_row(index):
    values = waves(HISTORY + HORIZON, count=index + 1)[index]
    observed = torch.arange(HISTORY) >= index % 5
    counts = (torch.arange(HORIZON) <= index % HORIZON).float()
    return {"past": values[:HISTORY], "observed": observed, "future": values[HISTORY:], "counts": counts}


def masked_data():
    return loaders(Rows(masked_row), Rows(masked_row, 16))


class RunningScale(nn.Module):
    """Welford's mean and variance of all that has been seen in training, in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("square", torch.ones(1))
        self.register_buffer("count", torch.ones((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.count += x.numel()
                delta = x.mean() - self.mean
                self.mean += delta * x.numel() / self.count
                self.square = self.square + (x - self.mean).square().sum()
        return (x - self.mean) / (self.square / self.count).sqrt()


class DeepAR(LightningModule):
    """Likelihoods of Student's t; a forecast is the mean of drawn paths."""

    def __init__(self, hidden=8, num_samples=4):
        super().__init__()
        self.save_hyperparameters()
        self.scale = RunningScale()
        self.rnn = nn.GRU(1, hidden, num_layers=2, batch_first=True)
        self.projections = nn.ModuleList(nn.Linear(hidden, 1) for _ in range(3))

    def distribution(self, hidden):
        df, loc, scale = (projection(hidden).squeeze(-1) for projection in self.projections)
        return StudentT(2.0 + F.softplus(df), loc, F.softplus(scale) + 1e-3)

    def training_step(self, batch, batch_idx):
        values = self.scale(torch.cat(batch, 1))
        hidden, _ = self.rnn(values[:, :-1])
        loss = -self.distribution(hidden).log_prob(values[:, 1:].squeeze(-1)).mean()
        self.log("nll", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        past, future = (self.scale(part) for part in batch)
        paths = []
        for _ in range(self.hparams.num_samples):
            hidden, state = self.rnn(past)
            path = []
            for _ in range(HORIZON):
                drawn = self.distribution(hidden[:, -1]).sample()
                path.append(drawn)
                hidden, state = self.rnn(drawn[:, None, None], state)
            paths.append(torch.stack(path, 1))
        self.log("val_error", F.l1_loss(torch.stack(paths).mean(0), future.squeeze(-1)))

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-2)


CASES = [
    Case(NBeats, series_data, epochs=2, trainer={"gradient_clip_val": 0.1}, of_each_replica=("epoch_loss",)),
    Case(TemporalFusion, panel_data, trainer={"gradient_clip_val": 1.0}, layouts=("cp2",)),
    Case(Seq2Seq, sequence_data, draws=True, epochs=2),
    Case(MultiHorizon, masked_data),
    Case(DeepAR, sequence_data, draws=True),
]
