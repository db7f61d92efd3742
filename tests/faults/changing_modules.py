"""More of them: modules with several loaders, averages of weights, values of a first batch, and counted calls."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torchmetrics
from faults.small_modules import BATCH, FEATURES, Small, Validated, numbers
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# U


class Loaders(Small):
    """Head and metric are those of the loader; the heads are made late."""

    metrics: Any = (torchmetrics.MeanAbsoluteError, torchmetrics.MeanSquaredError)

    def configure_model(self) -> None:
        if hasattr(self, "heads"):
            return
        heads = [nn.Linear(FEATURES, 1), nn.Sequential(nn.Linear(FEATURES, 1), nn.Tanh()), nn.Linear(FEATURES, 1)]
        self.heads = nn.ModuleList(heads[: len(self.metrics)]).double()
        self.errors = nn.ModuleList(metric().set_dtype(torch.float64) for metric in self.metrics)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return sum(F.mse_loss(head(self.hidden(x)), y) for head in self.heads) + 0 * self(x).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        error = self.errors[dataloader_idx]
        error(self.heads[dataloader_idx](self.hidden(x)), y)
        self.log(f"error {dataloader_idx}", error, add_dataloader_idx=False)


class ThreeLoaders(Loaders):
    metrics = (torchmetrics.MeanAbsoluteError, torchmetrics.MeanSquaredError, torchmetrics.MeanAbsoluteError)


class NamedHeads(Loaders):
    """Heads by name, and metrics that are updated and logged at the end of the epoch."""

    names = ("clean", "shifted")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        head = self.heads[dataloader_idx](self.hidden(x))
        self.errors[dataloader_idx].update(head, y)
        self.log(f"loss {self.names[dataloader_idx]}", F.mse_loss(head, y), add_dataloader_idx=False, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        for name, error in zip(self.names, self.errors, strict=True):
            self.log(f"error {name}", error.compute(), sync_dist=False)
            error.reset()


class OneHead(Loaders):
    """Its neighbour: one head, and metrics of two classes."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        error = self.errors[dataloader_idx]
        error(self.heads[0](self.hidden(x)), y)
        self.log("error", error)


# V


class Distils(Validated):
    """A frozen teacher, losses over hidden states, and an average of the student's weights that is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.average = AveragedModel(self.layers, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h, loss = x, 0.0
        with torch.no_grad():
            taught = [x := layer(x) for layer in self.teacher]
        for layer, target in zip(self.layers, taught, strict=True):
            h = layer(h)
            loss = loss + F.mse_loss(h, target)
        return loss + F.mse_loss(self.head(h), y)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.layers)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for layer in self.average.module:
            x = layer(x)
        self.log("val_loss", F.mse_loss(self.head(x), y), sync_dist=True)


class DistilsInEval(Distils):
    """Its teacher has dropout and stays in evaluation mode; averages are updated before gradients are cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(nn.Sequential(*layer, nn.Dropout(0.5)) for layer in self.teacher)

    def on_train_epoch_start(self) -> None:
        self.teacher.eval()

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update_parameters(self.layers)


class DistilsBranching(Distils):
    """Late in the run its loss branches on a value of the student."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step >= 3:
            h = self.hidden(batch[0])
            if h.mean().item() < 10:
                loss = 2 * loss + h.mean()
        return loss


class Momentum(Validated):
    """An average by hand that is updated inside the step, before it is used (MoCo, BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.layers).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        for p, average in zip(self.layers.parameters(), self.target.parameters(), strict=True):
            average.data = average.data * 0.9 + p.data * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.update()
        h = self.hidden(x)
        with torch.no_grad():
            for layer in self.target:
                x = layer(x)
        return F.mse_loss(h, x) + F.mse_loss(self.head(h), y)


class MomentumAfter(Momentum):
    """The same after the batch, by the state dict, with a teacher that is made in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.target

    def configure_model(self) -> None:
        if not hasattr(self, "target"):
            self.target = copy.deepcopy(self.layers).requires_grad_(False).eval()

    def update(self) -> None:
        pass

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for p, average in zip(self.layers.parameters(), self.target.parameters(), strict=True):
            average.lerp_(p, 0.1)


# W


class Initialises(Validated):
    """Initial inducing points are what the module computes of some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.zeros(BATCH, FEATURES))

    def first_points(self) -> Tensor:
        return torch.cat([self.hidden(x) for x, _ in numbers(3)])[::3]

    def configure_optimizers(self) -> Any:
        with torch.no_grad():
            self.points.copy_(self.first_points())
        return super().configure_optimizers()

    def forward(self, x: Tensor) -> Tensor:
        distance = (self.hidden(x)[:, None] - self.points).square().sum(-1)
        return self.head(torch.exp(-distance) @ self.points)


class InitialisesByData(Initialises):
    """In evaluation mode, and by `.data`; its length scale is another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def configure_optimizers(self) -> Any:
        self.eval()
        points = self.first_points().detach()
        self.train()
        self.points.data = points
        self.scale.data = torch.pdist(points).mean()
        return torch.optim.SGD(
            [
                {"params": self.layers.parameters(), "lr": 0.05},
                {"params": [self.points, self.scale]},
                {"params": self.head.parameters()},
            ],
            lr=0.1,
        )


class InitialisesCentred(Initialises):
    """Less the mean of means of all batches."""

    def first_points(self) -> Tensor:
        batches = numbers(3)
        found = [self.hidden(x) for x, _ in batches]
        mean = torch.stack([h.mean(0) for h in found]).mean(0)
        return torch.cat(found)[:BATCH] - mean


class InitialisesWithGradients(Initialises):
    """Some steps of a descent, with gradients of the module."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        for x, y in numbers(3):
            optimizer.zero_grad()
            with torch.enable_grad():
                F.mse_loss(self(x), y).backward()
            optimizer.step()
        optimizer.zero_grad()
        return super().configure_optimizers()


# AE, AH


class Windows(Small):
    """Trains on windows that it draws from the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        x = batch[0].flatten()
        starts = torch.randint(len(x) - FEATURES, (12,), generator=generator)
        windows = x[starts[:, None] + torch.arange(FEATURES)]
        return F.mse_loss(self(windows), windows.sum(1, keepdim=True).tanh())


class Shuffled(Small):
    """The same by pairs of samples that it draws."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        other = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.global_step))
        return F.mse_loss(self(0.7 * x + 0.3 * x[other]), 0.7 * y + 0.3 * y[other])


class CountsSteps(torch.optim.SGD):
    """Counts its steps in a list that belongs to the module."""

    def __init__(self, parameters: Any, counted: list[str]) -> None:
        super().__init__(parameters, lr=0.1)
        self.counted = counted

    def step(self, closure: Any = None) -> Any:
        self.counted.append("step")
        return super().step(closure)


class Counts(Small):
    """Notes what of it is called, and with what kind of closure."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append("before transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append("after transfer")
        return batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        self.seen.append(f"closure: {isinstance(optimizer_closure, Closure)}")
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CountsOptimizerSteps(Counts):
    """Its optimizer counts too; one that is tried on copies notes that before the first batch."""

    def configure_optimizers(self) -> Any:
        return CountsSteps(self.parameters(), self.seen)

    def on_train_start(self) -> None:
        self.seen.clear()
