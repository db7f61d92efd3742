"""What is likely to break a layout: layers left out, experts behind masks, carried states, closures, branches."""

import random

import numpy as np
import torch
from conformance.case import Case, Rows, loaders, tensor_loaders, waves
from conformance.few_parameters import ITEMS, LABELS, WIDTH, EncoderBlock, sentences
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

FEATURES, LENGTH, CHUNK = 6, 8, 4


class LayerDrop(LightningModule):
    """Whole blocks are left out in training, by Python's random numbers."""

    def __init__(self, blocks=5, layerdrop=0.3):
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.positions = nn.Embedding(ITEMS, WIDTH), nn.Parameter(torch.zeros(1, 6, WIDTH))
        self.layers = nn.ModuleList(EncoderBlock() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, ITEMS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, tokens):
        h = self.embed(tokens) + self.positions
        for layer in self.layers:
            if self.training and random.uniform(0, 1) < self.hparams.layerdrop:
                continue
            h = layer(h)
        return self.head(h)

    def masked_loss(self, tokens):
        hidden = (tokens + torch.arange(tokens.shape[1], device=tokens.device)) % 3 == 0
        logits = self(tokens.masked_fill(hidden, 0))
        return F.cross_entropy(logits.flatten(0, 1), tokens.masked_fill(~hidden, -100).flatten(), ignore_index=-100)

    def training_step(self, batch, batch_idx):
        loss = self.masked_loss(batch[0])
        self.log("perplexity", loss.detach().exp(), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.masked_loss(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=False)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MaskedExperts(nn.Module):
    """The best expert of each token, called where any token wants it, and a loss that balances them."""

    def __init__(self, width=WIDTH, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        gate, chosen = probabilities.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                out[mask] = expert(x[mask]) * gate[mask].unsqueeze(-1)
        share = F.one_hot(chosen, len(self.experts)).to(x).flatten(0, -2).mean(0)
        return x + out, len(self.experts) * (share * probabilities.flatten(0, -2).mean(0)).sum()


class SwitchClassifier(LightningModule):
    def __init__(self, layers=3, aux_weight=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(ITEMS, WIDTH)
        self.layers = nn.ModuleList(MaskedExperts() for _ in range(layers))
        self.head = nn.Linear(WIDTH, LABELS)

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        h, auxiliary = self.embed(tokens), 0.0
        for layer in self.layers:
            h, balance = layer(h)
            auxiliary = auxiliary + balance
        loss = F.cross_entropy(self.head(h.mean(1)), label)
        self.log_dict({"loss": loss, "balance": auxiliary})
        return loss + self.hparams.aux_weight * auxiliary

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Truncated(LightningModule):
    """Backpropagation through time in chunks, by hand; the state is carried to the next batch."""

    def __init__(self, hidden=8):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.lstm, self.head = nn.LSTM(FEATURES, hidden, num_layers=2, batch_first=True), nn.Linear(hidden, 1)
        self.hiddens = None

    def on_train_epoch_start(self):
        self.hiddens = None

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        losses = []
        for x, y in zip(batch[0].split(CHUNK, 1), batch[1].split(CHUNK, 1), strict=True):
            if self.hiddens is not None:
                self.hiddens = tuple(state.detach() for state in self.hiddens)
            out, self.hiddens = self.lstm(x, self.hiddens)
            loss = F.mse_loss(self.head(out), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            losses.append(loss.detach())
        self.log("loss", torch.stack(losses).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def long_series():
    x = waves(LENGTH, FEATURES)
    return tensor_loaders(x, x.sum(-1, keepdim=True).tanh())


class Mlp(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.layers(x))


class Closures(Mlp):
    """L-BFGS evaluates the step several times for each update."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe")


class LossBranches(Mlp):
    """What the loss is decides how the step goes on, and what is remembered of it for the next."""

    def __init__(self, threshold=0.4):
        super().__init__()
        self.save_hyperparameters()
        self.best, self.recent = float("inf"), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = F.mse_loss(self(x), y, reduction="none").squeeze(1)
        loss = losses.mean()
        if loss > self.hparams.threshold:
            loss = loss + losses.topk(max(1, len(losses) // 2)).values.mean()
        else:
            loss = loss + 0.01 * self.head.weight.abs().sum()
        self.recent.append(loss.item())
        if loss.item() < self.best:
            self.best = loss.item()
        self.log("loss", loss)
        self.log("improved", float(loss.item() <= self.best))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def branching_data():
    x = waves(FEATURES)
    return tensor_loaders(x, x.sum(1, keepdim=True).tanh())


class NumpyLists(Mlp):
    """Outputs are appended to lists as arrays; the area under the curve is computed by hand as the epoch ends."""

    def __init__(self):
        super().__init__()
        self.training_step_outputs, self.validation_step_outputs = [], []

    def step(self, batch, outputs):
        logits = self(batch["x"]).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, batch["y"])
        scores = logits.detach().sigmoid().cpu().numpy()
        outputs.append({"scores": scores, "labels": batch["y"].cpu().numpy(), "loss": loss.item()})
        return loss

    @staticmethod
    def area(outputs):
        scores = np.concatenate([output["scores"] for output in outputs])
        labels = np.concatenate([output["labels"] for output in outputs])
        positive, negative = scores[labels > 0.5], scores[labels <= 0.5]
        return float((positive[:, None] > negative[None]).mean())

    def training_step(self, batch, batch_idx):
        loss = self.step(batch, self.training_step_outputs)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.step(batch, self.validation_step_outputs)

    def on_train_epoch_end(self):
        self.log("train_auc", self.area(self.training_step_outputs))
        self.training_step_outputs.clear()

    def on_validation_epoch_end(self):
        self.log("val_auc", self.area(self.validation_step_outputs))
        self.log("val_loss", np.mean([output["loss"] for output in self.validation_step_outputs]))
        self.validation_step_outputs.clear()

    def configure_optimizers(self):
        return torch.optim.RAdam(self.parameters(), lr=1e-2)


def labelled(index):
    x = waves(FEATURES, count=index + 1)[index]
    return {"x": x, "y": (x.sum() > 0).float()}


def binary_data():
    return loaders(Rows(labelled), Rows(labelled, 16))


CASES = [
    Case(LayerDrop, sentences, draws=True, layouts=("cp2",)),
    Case(SwitchClassifier, sentences, layouts=("ep2",)),
    Case(Truncated, long_series),
    Case(Closures, branching_data),
    Case(LossBranches, branching_data),
    Case(NumpyLists, binary_data, of_each_replica=("train_auc", "val_auc", "val_loss")),
]
