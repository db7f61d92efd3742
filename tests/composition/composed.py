"""A module that has what a combination names, and its fits."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composition.combinations import LAYOUTS, Combination
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import GradientCompression, LocalSGD
from models.expert_modules import StackedWeights

VOCABULARY, WIDTH, LENGTH, BATCH, BATCHES = 11, 12, 6, 8, 4
LOGGED = {"loss", "loss_step", "loss_epoch", "val_loss", "accuracy", "mean", "norm"}


class Tokens(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Stacked(nn.Module):
    """A router, and experts of which a token takes the best."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4, bias=False), StackedWeights(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        gate, chosen = self.router(rows).softmax(-1).topk(1)
        return self.experts(rows, chosen, gate).view_as(x)


class Listed(nn.Module):
    """The same with a list of modules, called on their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        gate, chosen = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (taken,) = torch.where(chosen == number)
            out = out.index_add(0, taken, expert(rows[taken]) * gate[taken].unsqueeze(-1))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, inner: nn.Module, *, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.norm(x))
        if self.statistics is not None:
            h = self.statistics(h.transpose(1, 2)).transpose(1, 2)
        return x + self.inner(h)


INNER = {None: mlp, "stacked": Stacked, "listed": Listed}


class Composed(LightningModule):
    def __init__(self, combination: Combination) -> None:
        super().__init__()
        self.combination = c = combination
        self.automatic_optimization = c.optimization == "automatic"
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        inner = [INNER[c.experts if index % 2 else None]() for index in range(4)]
        self.blocks = nn.ModuleList(
            Block(each, batch_norm=c.batch_norm and not index) for index, each in enumerate(inner)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if c.tied:
            self.head.weight = self.embedding.weight
        self.accuracy, self.mean = MulticlassAccuracy(VOCABULARY), MeanMetric()
        self._freeze(c.frozen)

    def _freeze(self, what: str | None) -> None:
        frozen = {
            None: [],
            "norms": [block.norm for block in self.blocks],
            "embedding": [self.embedding],
            "block": [self.blocks[0]],
        }
        for module in frozen[what]:
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), logits

    def configure_optimizers(self) -> Any:
        # Adam divides gradients that are zero but for rounding (a bias before a BatchNorm) by themselves.
        adam = partial(torch.optim.Adam, lr=1e-2, eps=1e-4)
        kind = adam if self.combination.optimizer == "Adam" else partial(torch.optim.SGD, lr=0.1)
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.combination.optimization != "two manual":
            return kind(trained)
        first = {id(p) for module in (self.embedding, self.blocks[0], self.blocks[1]) for p in module.parameters()}
        return [
            kind([p for p in trained if id(p) in first] or trained[:1]),
            kind([p for p in trained if id(p) not in first]),
        ]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            loss, _ = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        every = self.combination.accumulation
        last = (batch_idx + 1) % every == 0
        for optimizer in optimizers:
            with optimizer.toggle_model(sync_grad=last):
                loss, _ = self.loss(batch)
                self.manual_backward(loss / every)
                if not last:
                    continue
                if self.combination.clipping is not None:
                    self.clip_gradients(optimizer, 0.05, self.combination.clipping)
                optimizer.step()
                optimizer.zero_grad()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss, logits = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        if self.combination.validation == "metrics":
            self.accuracy(logits.flatten(0, 1), batch[:, 1:].flatten())
            self.mean(loss)
            self.log("accuracy", self.accuracy)
            self.log("mean", self.mean)

    def on_fit_start(self) -> None:
        if self.combination.hook == "masks gradient":
            weight = self.blocks[2].mix.weight
            mask = (torch.arange(weight.numel()).view_as(weight) % 3 > 0).to(weight.dtype)
            weight.register_hook(lambda grad: grad * mask)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if self.combination.hook == "reads norm":
            self.log("norm", torch.stack([grad.norm() for grad in grads]).norm())
        if self.combination.hook == "writes gradient" and self.head.weight.grad is not None:
            self.head.weight.grad.mul_(0.5)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.combination.hook == "writes parameter":
            with torch.no_grad():
                self.blocks[3].mix.weight.clamp_(-0.2, 0.2)


class Shadow(Callback):
    """An exponential average of all parameters, by hand."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, value in pl_module.named_parameters():
            old = self.average.get(name, value.detach())
            self.average[name] = 0.9 * old + 0.1 * value.detach()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = dict(state_dict)


class Averaged(Callback):
    """The same by torch's own class, over a copy of the module's blocks."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.model = AveragedModel(pl_module.blocks)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.model.update_parameters(pl_module.blocks)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = {name: value.detach().clone() for name, value in self.model.state_dict().items()}


class SavesInside(Callback):
    """Saves in the middle of the fit."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def trainer_of(c: Combination, layout: str | None, epochs: int, callbacks: list[Callback]) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options: dict[str, Any] = {"devices": 1}
    if layout is not None:
        (pp, dp, tp, ep), extra = LAYOUTS[layout]
        sizes = {"pipeline_parallel_size": pp, "tensor_parallel_size": tp, "expert_parallel_size": ep}
        further = {"recompute": c.recompute, "offload": c.offload, "num_microbatches": c.microbatches}
        options = {"devices": pp * dp * tp, "strategy": Hybrid3DStrategy(**sizes, **extra, **further)}
        options["sync_batchnorm"] = c.batch_norm and dp > 1
        if c.replicas == "compressed":  # by factors of full rank, which lose nothing
            callbacks = [*callbacks, GradientCompression("powersgd", rank=2 * WIDTH, min_compression_rate=0.01)]
        if c.replicas == "local rounds":  # of one step, after two that average gradients: the same for SGD
            callbacks = [*callbacks, LocalSGD(1, warmup_steps=2)]
    if c.optimization == "automatic":
        options["accumulate_grad_batches"] = c.accumulation
        if c.clipping is not None:
            options |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": c.clipping}
    limits = {"max_epochs": epochs, "num_sanity_val_steps": 0, "accelerator": "cpu", "num_nodes": 1}
    return Trainer(callbacks=callbacks, **quiet, **limits, **options)


def loader_of(trainer: Trainer, layout: str | None, seed: int) -> DataLoader:
    """Each replica gets every n-th sample, so that all of them see the batch that one process sees."""
    data = Tokens(BATCH * BATCHES, seed)
    if layout is None:
        return DataLoader(data, batch_size=BATCH)
    (_, replicas, tensor, _), _ = LAYOUTS[layout]
    replica = int(trainer.strategy.cluster_environment.global_rank()) // tensor % replicas
    sampler = DistributedSampler(data, replicas, replica, shuffle=False)
    return DataLoader(data, batch_size=BATCH // replicas, sampler=sampler)


def fit(c: Combination, layout: str | None, epochs: int, resumed: str | None, saved: str) -> dict[str, Any]:
    """On a rank: one run; what it logs, and the module, callbacks and optimizers that its checkpoint has."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = Composed(c).double()
    average = {None: None, "shadow": Shadow(), "averaged copy": Averaged()}[c.averaging]
    callbacks: list[Callback] = [] if average is None else [average]
    inside = c.save == "inside" and resumed is None
    trainer = trainer_of(c, layout, epochs, [*callbacks, *([SavesInside(saved)] if inside else [])])
    validation = loader_of(trainer, layout, 2) if c.validation is not None else None
    trainer.fit(module, loader_of(trainer, layout, 1), validation, ckpt_path=resumed)
    if not inside:
        trainer.save_checkpoint(saved)
    logged = {name: float(trainer.callback_metrics[name]) for name in LOGGED & trainer.callback_metrics.keys()}
    full = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {"logged": logged, "module": full, "average": getattr(average, "average", {})}


def both_runs(c: Combination, run: Any, first: str | None, then: str | None, folder: Path) -> dict[str, Any]:
    """A run and one that resumes it; `run(layout, *arguments)` returns the results of all ranks."""
    name = str(folder / ("reference" if first is None else "layouts"))
    begun = run(first, c, first, 1, None, f"{name}1.ckpt")
    ended = run(then, c, then, 2, f"{name}1.ckpt", f"{name}2.ckpt")
    result = {"begun": begun, "ended": ended}
    for number in (1, 2):
        file = torch.load(f"{name}{number}.ckpt", weights_only=False)
        result[f"file {number}"] = {key: file[key] for key in ("state_dict", "optimizer_states")}
        result[f"file {number}"]["average"] = file["callbacks"].get("Shadow", {})
    return result
