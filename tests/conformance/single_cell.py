"""Single cells: counts with their own likelihoods, latent variables, weights that follow the epoch or the data."""

import itertools

import torch
from conformance.case import Case, Rows, loaders, waves
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributions import NegativeBinomial, Normal, kl_divergence
from torch.nn import functional as F

GENES, LATENT, BATCHES, LABELS = 12, 4, 2, 3


def fc_layers(n_in, n_out, layers=2, dropout=0.0):
    sizes = [n_in] + [n_out] * layers
    parts = [
        nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b, momentum=0.01, eps=1e-3), nn.ReLU(), nn.Dropout(dropout))
        for a, b in itertools.pairwise(sizes)
    ]
    return nn.Sequential(*parts)


class CountVAE(nn.Module):
    """An encoder, a decoder of proportions, and a dispersion for each gene."""

    def __init__(self, hidden=8, dropout=0.1):
        super().__init__()
        self.encoder = fc_layers(GENES, hidden, dropout=dropout)
        self.mean, self.var = nn.Linear(hidden, LATENT), nn.Linear(hidden, LATENT)
        self.decoder = fc_layers(LATENT + BATCHES, hidden)
        self.px_scale, self.px_dropout = nn.Linear(hidden, GENES), nn.Linear(hidden, GENES)
        self.px_r = nn.Parameter(torch.randn(GENES))

    def inference(self, counts):
        hidden = self.encoder(torch.log1p(counts))
        qz = Normal(self.mean(hidden), torch.exp(self.var(hidden)).sqrt() + 1e-4)
        return qz, qz.rsample()

    def generative(self, z, batch_index, library):
        hidden = self.decoder(torch.cat([z, F.one_hot(batch_index, BATCHES).to(z)], -1))
        rate = library * self.px_scale(hidden).softmax(-1)
        return rate, self.px_dropout(hidden)

    def forward(self, tensors):
        qz, z = self.inference(tensors["X"])
        rate, dropout = self.generative(z, tensors["batch"], tensors["X"].sum(1, keepdim=True))
        return {"qz": qz, "z": z, "rate": rate, "dropout": dropout}

    def likelihood(self, rate):
        dispersion = self.px_r.exp()
        return NegativeBinomial(dispersion, logits=(rate + 1e-8).log() - dispersion.log(), validate_args=False)


class TrainingPlan(LightningModule):
    """The weight of the KL term grows by the epoch, and is set as one starts."""

    def __init__(self, lr=1e-2, n_epochs_kl_warmup=4, weight_decay=1e-6, eps=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.module = CountVAE()
        self.kl_weight = 0.0
        self.n_obs_training = None

    def on_train_epoch_start(self):
        self.kl_weight = min(1.0, (self.current_epoch + 1) / self.hparams.n_epochs_kl_warmup)

    def losses(self, tensors, kl_weight):
        out = self.module(tensors)
        kl = kl_divergence(out["qz"], Normal(0.0, 1.0)).sum(-1)
        reconstruction = -self.module.likelihood(out["rate"]).log_prob(tensors["X"]).sum(-1)
        return {"loss": (reconstruction + kl_weight * kl).mean(), "recon": reconstruction.sum(), "kl": kl.sum()}

    def record(self, losses, mode, tensors):
        n_obs = len(tensors["X"])
        self.log(f"{mode}_loss", losses["loss"], on_step=mode == "train", on_epoch=True, batch_size=n_obs)
        self.log(f"reconstruction_{mode}", losses["recon"] / n_obs, on_epoch=True, on_step=False, batch_size=n_obs)
        self.log(f"kl_{mode}", losses["kl"] / n_obs, on_epoch=True, on_step=False, batch_size=n_obs)

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch, self.kl_weight)
        self.log("kl_weight", self.kl_weight, on_step=True, on_epoch=False)
        self.record(losses, "train", batch)
        return losses["loss"]

    def validation_step(self, batch, batch_idx):
        self.record(self.losses(batch, self.kl_weight), "validation", batch)

    def configure_optimizers(self):
        trained = filter(lambda p: p.requires_grad, self.module.parameters())
        options = {"lr": self.hparams.lr, "eps": self.hparams.eps, "weight_decay": self.hparams.weight_decay}
        optimizer = torch.optim.Adam(trained, **options)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.6)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss_epoch", "interval": "epoch"},
        }


class AdversarialTrainingPlan(TrainingPlan):
    """A classifier of batches is fooled by the encoder: two optimizers, by hand."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.adversarial_classifier = nn.Sequential(nn.Linear(LATENT, 8), nn.LeakyReLU(), nn.Linear(8, BATCHES))

    def loss_adversarial_classifier(self, z, batch_index, predict_true_class):
        log_probabilities = self.adversarial_classifier(z).log_softmax(-1)
        one_hot = F.one_hot(batch_index, BATCHES).to(z)
        target = one_hot if predict_true_class else (1 - one_hot) / (BATCHES - 1)
        return -(log_probabilities * target).sum(1).mean()

    def training_step(self, batch, batch_idx):
        main, adversary = self.optimizers()
        losses = self.losses(batch, self.kl_weight)
        z = self.module.inference(batch["X"])[1]
        kappa = 1 - self.kl_weight
        fooling = self.loss_adversarial_classifier(z, batch["batch"], False)
        self.record(losses, "train", batch)
        main.zero_grad()
        self.manual_backward(losses["loss"] + kappa * fooling)
        main.step()
        loss = self.loss_adversarial_classifier(z.detach(), batch["batch"], True) * kappa
        adversary.zero_grad()
        self.manual_backward(loss)
        adversary.step()
        self.log("adversarial", loss)

    def on_train_epoch_end(self):
        for scheduler in [self.lr_schedulers()]:
            scheduler.step(self.trainer.callback_metrics["train_loss_epoch"])

    def configure_optimizers(self):
        main = super().configure_optimizers()
        adversary = torch.optim.Adam(self.adversarial_classifier.parameters(), lr=1e-2, eps=0.01)
        return [main["optimizer"], adversary], [main["lr_scheduler"]]


class SemiSupervised(TrainingPlan):
    """Zero-inflated counts and labels; the prior over all cells is shared out by the number of training cells."""

    def __init__(self, classification_ratio=5.0, **options):
        super().__init__(**options)
        self.module.classifier = nn.Sequential(nn.Linear(LATENT, 8), nn.ReLU(), nn.Linear(8, LABELS))
        self.module.topic_prior = nn.Parameter(torch.zeros(LATENT))
        self.classification_ratio = classification_ratio

    def on_train_start(self):
        self.n_obs_training = len(self.trainer.train_dataloader.dataset)

    def zero_inflated(self, rate, dropout, counts):
        negative_binomial = self.module.likelihood(rate)
        softplus = F.softplus(-dropout)
        at_zero = F.softplus(-dropout + negative_binomial.log_prob(torch.zeros_like(counts))) - softplus
        elsewhere = -dropout - softplus + negative_binomial.log_prob(counts)
        return torch.where(counts < 1e-8, at_zero, elsewhere)

    def losses(self, tensors, kl_weight):
        out = self.module(tensors)
        prior = Normal(self.module.topic_prior, 1.0)
        kl = kl_divergence(out["qz"], prior).sum(-1)
        reconstruction = -self.zero_inflated(out["rate"], out["dropout"], tensors["X"]).sum(-1)
        kl_global = kl_divergence(prior, Normal(0.0, 1.0)).sum() / (self.n_obs_training or 1)
        labelled = tensors["label"] < LABELS
        logits = self.module.classifier(out["z"])
        cross_entropy = F.cross_entropy(logits, tensors["label"].clamp(max=LABELS - 1), reduction="none")
        classification = (cross_entropy * labelled).mean()
        loss = (reconstruction + kl_weight * kl).mean() + kl_global + self.classification_ratio * classification
        return {"loss": loss, "recon": reconstruction.sum(), "kl": kl.sum()}


def cell(index):
    rate = 4 * (1 + waves(GENES, count=index + 1)[index])
    return {"X": rate.round(), "batch": index % BATCHES, "label": index % (LABELS + 1)}


def cells():
    return loaders(Rows(cell), Rows(cell, 16))


CASES = [
    Case(TrainingPlan, cells, draws=True, epochs=2),
    Case(AdversarialTrainingPlan, cells, draws=True),
    Case(SemiSupervised, cells, draws=True),
]
