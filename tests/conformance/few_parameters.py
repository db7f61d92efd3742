"""Recommenders with sparse gradients and negatives of the batch; uncertainty by dropout and ensembles; adapters."""

import math

import torch
import torchmetrics
from conformance.case import Case, tensor_loaders, waves
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

USERS, ITEMS, FEATURES, WIDTH, LABELS = 12, 16, 6, 8, 3


class SparseFactors(LightningModule):
    """Embeddings with sparse gradients have their own optimizer, so steps are taken by hand."""

    def __init__(self, dim=4, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.user, self.item = nn.Embedding(USERS, dim, sparse=True), nn.Embedding(ITEMS, dim, sparse=True)
        self.bag = nn.EmbeddingBag(ITEMS, dim, mode="mean", sparse=True)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, user, item, history):
        factors = torch.cat([self.user(user), self.item(item), self.bag(history)], 1)
        return self.mlp(factors).squeeze(1)

    def training_step(self, batch, batch_idx):
        user, item, history, rating = batch
        loss = F.mse_loss(self(user, item, history), rating)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        user, item, history, rating = batch
        self.log("val_rmse", F.mse_loss(self(user, item, history), rating).sqrt())

    def configure_optimizers(self):
        tables = [self.user.weight, self.item.weight, self.bag.weight]
        return [
            torch.optim.SparseAdam(tables, lr=self.hparams.lr),
            torch.optim.Adam(self.mlp.parameters(), lr=self.hparams.lr),
        ]


def ratings():
    index = torch.arange(48)
    history = (index[:, None] + torch.arange(3) * 5) % ITEMS
    return tensor_loaders(index * 5 % USERS, index * 7 % ITEMS, history, waves(1).squeeze(1))


class TwoTower(LightningModule):
    """The other items of the batch are negatives, less the logarithm of how often they are drawn."""

    def __init__(self, dim=8, temperature=0.1, k=3):
        super().__init__()
        self.save_hyperparameters()
        self.user_table, self.item_table = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.user_tower = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.item_tower = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.register_buffer("frequency", torch.full((ITEMS,), 1.0 / ITEMS))
        self.hits = torchmetrics.MeanMetric()

    def forward(self, user, item):
        users, items = self.user_tower(self.user_table(user)), self.item_tower(self.item_table(item))
        return F.normalize(users, dim=-1), F.normalize(items, dim=-1)

    def training_step(self, batch, batch_idx):
        user, item, _ = batch
        users, items = self(user, item)
        logits = users @ items.t() / self.hparams.temperature - self.frequency[item].log()
        same = (item[:, None] == item[None]) & ~torch.eye(len(item), dtype=torch.bool, device=item.device)
        logits = logits.masked_fill(same, torch.finfo(logits.dtype).min)
        loss = F.cross_entropy(logits, torch.arange(len(user), device=self.device))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        user, item, _ = batch
        users, _ = self(user, item)
        everything = F.normalize(self.item_tower(self.item_table.weight), dim=-1)
        best = (users @ everything.t()).topk(self.hparams.k).indices
        self.hits.update((best == item[:, None]).any(1).float())
        self.log(f"hit_rate@{self.hparams.k}", self.hits, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def interactions():
    index = torch.arange(48)
    return tensor_loaders(index * 5 % USERS, index * 7 % ITEMS, torch.ones(48))


# --- uncertainty ----------------------------------------------------------------------------------------------------


def gaussian_nll(mean, variance, y):
    return (0.5 * (variance.log() + (mean - y) ** 2 / variance)).mean()


class MCDropout(LightningModule):
    """Dropout stays on in validation, and predictions of several passes are averaged."""

    def __init__(self, passes=4, p=0.2):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Dropout(p)) for _ in range(3)]
        self.model = nn.Sequential(*layers, nn.Linear(FEATURES, 2))
        self.rmse = torchmetrics.MeanSquaredError(squared=False)

    def forward(self, x):
        mean, raw = self.model(x).chunk(2, -1)
        return mean, F.softplus(raw) + 1e-3

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x)[0], y) if self.current_epoch == 0 else gaussian_nll(*self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        means, variances = zip(*(self(x) for _ in range(self.hparams.passes)), strict=True)
        means = torch.stack(means)
        self.rmse(means.mean(0), y)
        self.log("val_rmse", self.rmse)
        self.log_dict({"epistemic": means.var(0).mean(), "aleatoric": torch.stack(variances).mean()})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class DeepEnsemble(LightningModule):
    """Members take turns over the batches; in evaluation all are asked."""

    def __init__(self, members=3, burn_in=1):
        super().__init__()
        self.save_hyperparameters()
        self.members = nn.ModuleList(
            nn.Sequential(
                nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
            )
            for _ in range(members)
        )

    def predicted(self, member, x):
        mean, raw = member(x).chunk(2, -1)
        return mean, F.softplus(raw) + 1e-3

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.global_step < self.hparams.burn_in:
            loss = sum(F.mse_loss(self.predicted(member, x)[0], y) for member in self.members)
        else:
            member = self.members[batch_idx % len(self.members)]
            loss = gaussian_nll(*self.predicted(member, x), y)
            self.log(f"nll_{batch_idx % len(self.members)}", loss)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        means, variances = zip(*(self.predicted(member, x) for member in self.members), strict=True)
        mean = torch.stack(means).mean(0)
        variance = (torch.stack(variances) + torch.stack(means) ** 2).mean(0) - mean**2
        self.log_dict({"val_nll": gaussian_nll(mean, variance, y), "val_spread": torch.stack(means).std(0).mean()})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def regression():
    x = waves(FEATURES)
    return tensor_loaders(x, x.sum(1, keepdim=True).tanh())


# --- adapters -------------------------------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2, alpha=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scaling


class EncoderBlock(nn.Module):
    def __init__(self, width=WIDTH, heads=2):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class LoRA(LightningModule):
    """A frozen base with low-rank updates; after the first epoch the last block is unfrozen, with its own group."""

    def __init__(self, blocks=3, unfreeze_at_epoch=1, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(ITEMS, WIDTH)
        self.blocks = nn.ModuleList(EncoderBlock() for _ in range(blocks))
        self.norm, self.classifier = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LABELS)
        for parameter in (*self.embed.parameters(), *self.blocks.parameters()):
            parameter.requires_grad = False
        for block in self.blocks:
            block.q_proj, block.v_proj = LoRALinear(block.q_proj), LoRALinear(block.v_proj)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(LABELS, average="micro")

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.classifier(self.norm(h).mean(1))

    def on_train_epoch_start(self):
        if self.current_epoch == self.hparams.unfreeze_at_epoch:
            self.blocks[-1].requires_grad_(True)

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        loss = F.cross_entropy(self(tokens), label)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, label = batch
        self.accuracy(self(tokens), label)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        later = [p for p in self.blocks[-1].parameters() if not p.requires_grad]
        return torch.optim.AdamW([{"params": trained}, {"params": later, "lr": self.hparams.lr / 10}], self.hparams.lr)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["trainable"] = [name for name, p in self.named_parameters() if p.requires_grad]


def sentences():
    tokens = (torch.arange(48)[:, None] * 7 + torch.arange(6) ** 2) % ITEMS
    return tensor_loaders(tokens, tokens.sum(1) % LABELS)


class TaskAdapters(LightningModule):
    """A batch is of one task, whose name chooses the adapter and the head."""

    def __init__(self, tasks=("nli", "qa")):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3))
        self.layers.requires_grad_(False)
        self.adapters = nn.ModuleDict(
            {
                task: nn.ModuleList(
                    nn.Sequential(nn.Linear(FEATURES, 2), nn.ReLU(), nn.Linear(2, FEATURES)) for _ in range(3)
                )
                for task in tasks
            }
        )
        self.heads = nn.ModuleDict({task: nn.Linear(FEATURES, LABELS + index) for index, task in enumerate(tasks)})

    def forward(self, x, task):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if task in self.adapters:
                x = x + self.adapters[task][index](x)
        return self.heads[task](x)

    def training_step(self, batch, batch_idx):
        task = batch["task"][0]
        loss = F.cross_entropy(self(batch["x"], task), batch["y"])
        self.log(f"{task}_loss", loss, batch_size=len(batch["x"]))
        return loss

    def validation_step(self, batch, batch_idx):
        task = batch["task"][0]
        accuracy = (self(batch["x"], task).argmax(1) == batch["y"]).float().mean()
        self.log("val_acc", accuracy, batch_size=len(batch["x"]))

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def task_row(index):
    return {"x": waves(FEATURES, count=index + 1)[index], "y": index % LABELS, "task": "nli" if index < 32 else "qa"}


def tasks():
    """Whole batches are the rows of the dataset, so that each is of one task."""
    rows = [default_collate([task_row(index + 2 * place) for place in range(8)]) for index in (0, 1, 32, 33, 16, 17)]
    return {name: DataLoader(rows, batch_size=None) for name in ("train_dataloaders", "val_dataloaders")}


CASES = [
    Case(SparseFactors, ratings),
    Case(TwoTower, interactions),
    Case(MCDropout, regression, draws=True, epochs=2),
    Case(DeepEnsemble, regression),
    Case(LoRA, sentences, epochs=2),
    Case(TaskAdapters, tasks),
]
