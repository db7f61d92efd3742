"""Modules that write their parameters: momentum encoders and normalised weights."""

import copy

import torch
from torch.nn import functional as F

from models.regression import Regression


class Momentum(Regression):
    """A momentum encoder in the manner of MoCo and BYOL; `update` moves it."""

    def __init__(self):
        super().__init__()
        self.encoder_k = copy.deepcopy(self.layers)
        for p in self.encoder_k.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def update(self, m=0.9):
        for p_q, p_k in zip(self.layers.parameters(), self.encoder_k.parameters(), strict=True):
            p_k.data = p_k.data * m + p_q.data * (1.0 - m)

    def training_step(self, batch, batch_idx):
        x, y = batch
        q = x
        for layer in self.layers:
            q = layer(q)
        with torch.no_grad():
            k = x + 0.1
            for layer in self.encoder_k:
                k = layer(k)
        loss = F.mse_loss(self.head(q), y) + 0.5 * F.mse_loss(q, k)
        self.log("loss", loss)
        return loss


class MomentumAfterBatch(Momentum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.update()


class MomentumBeforeBatch(Momentum):
    def on_train_batch_start(self, batch, batch_idx):
        self.update()


class MomentumInPlace(Momentum):
    @torch.no_grad()
    def update(self, m=0.9):
        for p_q, p_k in zip(self.layers.parameters(), self.encoder_k.parameters(), strict=True):
            p_k.mul_(m).add_(p_q, alpha=1.0 - m)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.update()


class MomentumInStep(Momentum):
    """Once per microbatch, as in gradient accumulation."""

    def training_step(self, batch, batch_idx):
        self.update()
        return super().training_step(batch, batch_idx)


class MomentumInPlaceInStep(MomentumInPlace):
    on_train_batch_end = Regression.on_train_batch_end

    def training_step(self, batch, batch_idx):
        self.update()
        return super().training_step(batch, batch_idx)


class NormalisesWeights(Regression):
    """Weights are made unit before they are used, as prototypes are."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            w = self.head.weight.data.clone()
            self.head.weight.copy_(F.normalize(w, dim=1, p=2))
            self.layers[0][0].weight.data = F.normalize(self.layers[0][0].weight.data, dim=1)
            self.layers[2][0].bias[:2].clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)
