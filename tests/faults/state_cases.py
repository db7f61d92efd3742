"""Buffers: running statistics of wrapped layers, and those that hooks register; messages of slow links."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from faults.batch_cases import REPLICATED, twins
from faults.layouts import FEATURES, Case, Regression
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.callbacks import GradientCompression, LocalSGD

# ---- R: running statistics of layers that a wrapper calls


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Wrapped(Regression):
    """Adam divides gradients that are zero but for rounding, as those of a bias before a BatchNorm, by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.net = nn.ModuleList(), self.make()
        del self.head

    def make(self) -> nn.Module:
        return Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OneByOne(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.net(x)
        for layer in self.net.model:
            x = layer(x)
        return x


class Twice(Wrapped):
    """A wrapper in a wrapper, which hooks read the statistics of."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.Tanh(), Net())

    def on_train_batch_end(self, *args: Any) -> None:
        inner = self.net[3].model[1]
        self.seen += [float(inner.running_mean.norm()), float(inner.running_var.sum()), int(inner.num_batches_tracked)]


class Images(Wrapped):
    """A convolution, its statistics, and a head that validation calls by themselves."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return self.net(x) if self.training else self.net[-1](self.net[:-1](x))


# ---- S: buffers that hooks register


class Queue(Regression):
    """A queue of means of features, to which each batch is compared."""

    hook = "on_train_start"

    def fill(self) -> None:
        if not hasattr(self, "queue"):
            start = torch.linspace(-1, 1, 4 * FEATURES, dtype=torch.float64).view(4, FEATURES)
            self.register_buffer("queue", start)
            self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        for layer in self.layers:
            x = layer(x)
        if self.training:
            self.hidden = x.detach().mean(0)
        return F.mse_loss(self.head(x), y) + (x @ self.queue.T).softmax(-1)[:, 0].mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.queue[int(self.pointer) % 4] = self.hidden
        self.pointer += 1
        self.seen.append(self.queue.clone())


class OnFitStart(Queue):
    def on_fit_start(self) -> None:
        self.fill()


class OnTrainStart(Queue):
    def on_train_start(self) -> None:
        self.fill()


class OnEpochStart(Queue):
    def on_train_epoch_start(self) -> None:
        self.fill()


class OnBatchStart(Queue):
    def on_train_batch_start(self, *args: Any) -> None:
        self.fill()


class InTheStep(OnTrainStart):
    """Advances the queue in the step itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        index = int(self.pointer) % 4
        self.queue = torch.cat([self.queue[:index], self.hidden[None], self.queue[index + 1 :]])
        self.pointer = self.pointer + 1
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.queue.clone())


class RegistersOne(Callback):
    """Registers a buffer of a layer, which a hook of its forward adds."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layer = pl_module.layers[2]
        layer.register_buffer("shift", torch.full((FEATURES,), 0.1 * (1 + trainer.global_rank), dtype=torch.float64))
        layer.register_forward_hook(shifted)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.layers[2].shift.mul_(0.9)


def shifted(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + module.shift


# ---- AJ, AK: slow links


class Head(Regression):
    """A head that is larger than its factors of rank 2 by four numbers, whose rows do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()])
        self.head = nn.Linear(16, 5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Odd(Head):
    """Matrices of few rows, of which some are fewer than ranks divide, at the threshold for rank 1 and for rank 2."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (FEATURES, 9, 4, 7, 3)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(3, 1)


class Plain(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


POWERSGD = partial(GradientCompression, "powersgd", rank=2)
ZERO = "set shard_size=1, or zero_stage=0"
NOT_LOCAL = dict.fromkeys((name for name in REPLICATED if "zero" in name), ZERO)
SPLIT = {"num_microbatches": 1}  # statistics are those of a microbatch
NORMED = {"strategy": SPLIT, "validates": True, "trainer": {"sync_batchnorm": True}}
# The number of bytes that the first rank sends is that of its layout.
BY_REPLICAS = {"layouts": REPLICATED, "reference": "dp2", "compared": ("module",)}
CASES = {
    "R wrapped": Case(Wrapped, **NORMED, saves=True),
    "R one by one": Case(OneByOne, **NORMED),
    "R twice": Case(Twice, **NORMED, epochs=2),
    "R images": Case(Images, **NORMED),
    "S fit": Case(OnFitStart, data=twins, validates=True),
    "S train": Case(OnTrainStart, data=twins),
    "S epoch": Case(OnEpochStart, data=twins, epochs=2),
    "S batch": Case(OnBatchStart, data=twins),
    "S in the step": Case(InTheStep, data=twins),
    "S callback": Case(Plain, callbacks=(RegistersOne,), data=twins),
    "AJ head": Case(Head, callbacks=(POWERSGD,), **BY_REPLICAS),
    "AJ odd": Case(Odd, callbacks=(partial(GradientCompression, "powersgd", rank=1),), **BY_REPLICAS),
    "AJ accumulated": Case(Odd, callbacks=(POWERSGD,), trainer={"accumulate_grad_batches": 2}, epochs=2, **BY_REPLICAS),
    "AK": Case(Plain, callbacks=(partial(LocalSGD, 3, warmup_steps=2),), epochs=2, refused=NOT_LOCAL, **BY_REPLICAS),
    "AK DiLoCo": Case(
        Plain,
        callbacks=(partial(LocalSGD, 3, outer_optimizer="nesterov", warmup_steps=2),),
        epochs=2,
        refused=NOT_LOCAL,
        **BY_REPLICAS,
    ),
}
