"""Self-supervised learning: queues, teachers that follow, centres, negatives from all replicas."""

import copy
import math

import torch
import torch.distributed as dist
from conformance.case import Case, Rows, loaders, tensor_loaders, waves
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

FEATURES, WIDTH, DIM = 10, 8, 6


def encoder(norm=False):
    layers = [nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, DIM)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(WIDTH))
    return nn.Sequential(*layers)


class MoCo(LightningModule):
    """A momentum encoder, and a queue of keys as a buffer with a pointer."""

    def __init__(self, dim=DIM, num_negatives=32, momentum=0.9, temperature=0.2, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.encoder_q, self.encoder_k = encoder(), encoder()
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, num_negatives), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        m = self.hparams.momentum
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * m + q.data * (1.0 - m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        if self.trainer.world_size > 1:
            keys = self.all_gather(keys).flatten(0, 1)
        ptr = int(self.queue_ptr)
        assert self.hparams.num_negatives % len(keys) == 0
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.hparams.num_negatives

    def training_step(self, batch, batch_idx):
        img_q, img_k = batch
        q = F.normalize(self.encoder_q(img_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(img_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], 1) / self.hparams.temperature
        labels = torch.zeros(len(logits), dtype=torch.long, device=self.device)
        self._dequeue_and_enqueue(k)
        loss = F.cross_entropy(logits, labels)
        self.log_dict({"train_loss": loss, "train_acc1": (logits.argmax(1) == labels).float().mean()})
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9, weight_decay=1e-4)


def two_views():
    x = waves(FEATURES)
    return tensor_loaders(x + 0.1 * waves(FEATURES, phase=1.0), x + 0.1 * waves(FEATURES, phase=2.0))


class DINO(LightningModule):
    """Crops of two sizes in a list, a teacher that follows after the batch, a centre that follows in the step."""

    def __init__(self, out_dim=8, teacher_temp=0.07, center_momentum=0.9, base_momentum=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.student = nn.Sequential(encoder(), nn.utils.parametrizations.weight_norm(nn.Linear(DIM, out_dim)))
        self.teacher = nn.Sequential(encoder(), nn.Linear(DIM, out_dim)).requires_grad_(False)
        self.teacher[0].load_state_dict(self.student[0].state_dict())
        self.register_buffer("center", torch.zeros(1, out_dim))

    def on_train_epoch_start(self):
        self.temperature = self.hparams.teacher_temp * (0.5 + 0.5 / (1 + self.current_epoch))

    @torch.no_grad()
    def update_center(self, output):
        batch_center = output.sum(0, keepdim=True)
        count = len(output)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(batch_center)
            count = count * dist.get_world_size()
        m = self.hparams.center_momentum
        self.center.copy_(self.center * m + batch_center / count * (1 - m))

    def training_step(self, batch, batch_idx):
        global_views, local_views = batch[:2], batch[2:]
        teacher = [self.teacher(view).detach() for view in global_views]
        student = [self.student(view) for view in (*global_views, *local_views)]
        targets = [((t - self.center) / self.temperature).softmax(-1) for t in teacher]
        total, terms = 0.0, 0
        for first, target in enumerate(targets):
            for second, output in enumerate(student):
                if first == second:
                    continue
                total = total + (-target * (output / 0.1).log_softmax(-1)).sum(-1).mean()
                terms += 1
        self.update_center(torch.cat(teacher))
        loss = total / terms
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        steps = max(1, self.trainer.estimated_stepping_batches)
        m = 1 - (1 - self.hparams.base_momentum) * (math.cos(math.pi * self.global_step / steps) + 1) / 2
        with torch.no_grad():
            for s, t in zip(self.student[0].parameters(), self.teacher[0].parameters(), strict=True):
                t.mul_(m).add_(s.detach(), alpha=1 - m)

    def on_after_backward(self):
        if self.current_epoch == 0:
            for parameter in self.student[1].parameters():
                parameter.grad = None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=1e-2, weight_decay=0.04)


class BYOL(LightningModule):
    """A predictor on the online network; the target follows before gradients are cleared."""

    def __init__(self, tau=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.online_network, self.predictor = encoder(norm=True), nn.Linear(DIM, DIM)
        self.target_network = copy.deepcopy(self.online_network)
        for parameter in self.target_network.parameters():
            parameter.requires_grad_(False)

    def cosine_loss(self, a, b):
        online = self.predictor(self.online_network(a))
        with torch.no_grad():
            target = self.target_network(b)
        return 2 - 2 * F.cosine_similarity(online, target, dim=-1).mean()

    def training_step(self, batch, batch_idx):
        loss = self.cosine_loss(*batch) + self.cosine_loss(*batch[::-1])
        self.log("train_loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for online, target in zip(self.online_network.parameters(), self.target_network.parameters(), strict=True):
                target.data.lerp_(online.data, 1 - self.hparams.tau)

    def configure_optimizers(self):
        trained = [*self.online_network.parameters(), *self.predictor.parameters()]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def multi_crop(index):
    x = waves(FEATURES, count=index + 1)[index]
    small = torch.arange(FEATURES) < 6
    return [x, x.roll(1), (x * small).roll(2), (x * small).roll(3)]


def crops():
    return loaders(Rows(multi_crop))


class SimCLR(LightningModule):
    """The other views of all replicas are negatives; gradients go back through the gathering."""

    def __init__(self, temperature=0.5, warmup_steps=2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = encoder()
        self.projection = nn.Sequential(
            nn.Linear(DIM, DIM, bias=False), nn.LayerNorm(DIM), nn.ReLU(), nn.Linear(DIM, DIM)
        )

    def nt_xent_loss(self, one, two):
        one_all, two_all = one, two
        if self.trainer.world_size > 1:
            one_all, two_all = (self.all_gather(view, sync_grads=True).flatten(0, 1) for view in (one, two))
        out, everything = torch.cat([one, two]), torch.cat([one_all, two_all])
        similarity = torch.exp(out @ everything.t() / self.hparams.temperature)
        negatives = similarity.sum(-1) - math.e ** (1 / self.hparams.temperature)
        positives = torch.exp((one * two).sum(-1) / self.hparams.temperature)
        return -(torch.cat([positives, positives]) / negatives).log().mean()

    def training_step(self, batch, batch_idx):
        one, two = (F.normalize(self.projection(self.encoder(view)), dim=-1) for view in batch)
        loss = self.nt_xent_loss(one, two)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        norms = [p for p in self.parameters() if p.ndim == 1]
        rest = [p for p in self.parameters() if p.ndim > 1]
        optimizer = torch.optim.Adam([{"params": rest, "weight_decay": 1e-4}, {"params": norms}], lr=1e-2)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=self.hparams.warmup_steps)
        return [optimizer], [{"scheduler": warmup, "interval": "step", "name": "warmup"}]


CASES = [
    Case(MoCo, two_views),
    Case(DINO, crops, epochs=2),
    Case(BYOL, two_views),
    Case(SimCLR, two_views),
]
