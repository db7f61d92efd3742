"""Small regressions that tests vary, and their data."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    """A plain module; each test changes one thing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class StepsManually:
    """Makes of a module with a ``training_step`` of a batch one that calls its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


class Manual(Regression):
    """Manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class ManualStep(Manual):
    """Clears the gradients, runs the backward, and steps the optimizer."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


def closure_of(module, batch, then=lambda: None):
    """The closure of a manual step: a loss, its backward, and what a test does ``then`` to gradients or states."""

    def closure():
        module.optimizers().zero_grad()
        loss = module.loss(batch)
        module.manual_backward(loss)
        then()
        return loss

    return closure


class ManualClosure(Manual):
    """Steps an optimizer that calls the closure itself."""

    def training_step(self, batch, batch_idx):
        self.log("loss", self.optimizers().step(closure_of(self, batch)))


FEATURES = 6


def regression_data(num_train=32, num_val=16, batch_size=8):
    """Loaders of pairs that are a function of the sample's index."""
    index = torch.arange(num_train + num_val, dtype=torch.float64).unsqueeze(1)
    x = torch.cos(index * torch.arange(1, FEATURES + 1) + index)
    y = (x.sum(1, keepdim=True) / 2).tanh()
    train = DataLoader(TensorDataset(x[:num_train], y[:num_train]), batch_size, shuffle=True)
    val = DataLoader(TensorDataset(x[num_train:], y[num_train:]), batch_size)
    return {"train_dataloaders": train, "val_dataloaders": val}


def mlp(layers=4, width=FEATURES):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


class Regressor(LightningModule):
    """Base of the modules below; each defines `forward`."""

    def shared_step(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.shared_step(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Plain(LightningModule):
    """Four layers in one `nn.Sequential` and a head, trained by Adam."""

    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class EncoderDecoder(LightningModule):
    """Two halves of two layers each; logs nothing."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Sequential(LightningModule):
    """One `nn.Sequential`, trained by plain SGD; logs nothing."""

    def __init__(self, features=4, lr=0.1):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        return F.mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Normalised(Plain):
    def __init__(self):
        super().__init__()
        for layer in self.net:
            layer.append(nn.BatchNorm1d(FEATURES))


class Logging(Plain):
    """Returns a dict; logs per step, per epoch, both, with every reduction; a scheduler changes the learning rate."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", out.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("total", out.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log_dict({"mean": out.mean(), "batch": batch_idx}, on_step=True)
        return {"loss": loss, "out": out.detach()}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Dropping(Plain):
    def __init__(self):
        super().__init__()
        for layer in self.net:
            layer.append(nn.Dropout(0.2))

    def forward(self, x):
        return self.head(F.dropout(self.net(x), 0.1, self.training))
