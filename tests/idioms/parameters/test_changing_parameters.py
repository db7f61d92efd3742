"""Parameters that change under the strategy: made late, rebound, swapped, copied, frozen, unfrozen, adapted, tied."""

import copy

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn
from torch.nn import functional as F

from harness.layouts import each_under
from harness.verification import BOTH, COMBINED, LAYOUTS, STAGES, TENSOR
from harness.verification import check_there_and_back as check
from models.regression import FEATURES, Regression


class MadeInSetup(Regression):
    def __init__(self):
        super().__init__()
        self.layers = None
        self.head = None

    def setup(self, stage):
        if self.layers is None:
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
            self.head = nn.Linear(FEATURES, 1)


class MadeInConfigureModel(Regression):
    def __init__(self):
        super().__init__()
        self.head = None

    def configure_model(self):
        if self.head is None:
            self.head = nn.Linear(FEATURES, 1)


class Frozen(Regression):
    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2][0].bias.requires_grad = False

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


class Adapted(nn.Module):
    """A frozen linear layer and its trained low-rank correction."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_a.T) @ self.lora_b.T * 2


class WithAdapters(Regression):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for name, module in list(self.named_modules()):
            if isinstance(module, nn.Linear) and name != "head":
                parent = self.get_submodule(name.rsplit(".", 1)[0])
                setattr(parent, name.rsplit(".", 1)[1], Adapted(module))
        self.head.requires_grad_(True)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class TwoNames(Regression):
    """The same block under two names, and a weight tied by assignment."""

    def __init__(self):
        super().__init__()
        self.stem = self.layers[0]
        self.layers[3][0].weight = self.layers[1][0].weight

    def forward(self, x):
        return super().forward(self.stem(x))


class NeverUsed(Regression):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(FEATURES, FEATURES)
        self.unused_too = nn.Parameter(torch.ones(3))


class Distils(Regression):
    """The teacher is a deep copy from the constructor, frozen."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False).eval()
        for layer in self.layers:
            nn.init.normal_(layer[0].weight, std=0.3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            t = x
            for layer in self.teacher:
                t = layer(t)
        h = x
        for layer in self.layers:
            h = layer(h)
        loss = F.mse_loss(self.head(h), y) + F.mse_loss(h, t)
        self.log("loss", loss)
        return loss


class TeacherOfNoParameters(Distils):
    """Hidden in a list, so that its weights are not the module's."""

    def __init__(self):
        super().__init__()
        self.hidden = [self.teacher.double()]
        del self.teacher
        self.shift = nn.Parameter(torch.zeros(FEATURES))

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            t = x
            for layer in self.hidden[0]:
                t = layer(t)
        loss = F.mse_loss(self(x + self.shift), y) + F.mse_loss(self.layers[0](x), t)
        self.log("loss", loss)
        return loss


ANY = [
    MadeInSetup,
    MadeInConfigureModel,
    Frozen,
    WithAdapters,
    TwoNames,
    NeverUsed,
    Distils,
    TeacherOfNoParameters,
]


@each_under("module", ANY, [STAGES, BOTH])
def test_changing_parameter_sets(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


# --- unfrozen in the middle of a run ---------------------------------------------------------------------------------


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.layers)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[2:], optimizer, lr=0.01)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.layers[:2], optimizer, lr=0.005)


class Finetuned(Regression):
    def configure_callbacks(self):
        return [Unfreezes()]

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)


class FreezesFirstEpoch(Regression):
    """Every parameter is in the optimizer from the start; the body rests in the first epoch."""

    def on_train_epoch_start(self):
        for p in self.layers.parameters():
            p.requires_grad = self.current_epoch > 0


class FreezesByCallback(Regression):
    def configure_callbacks(self):
        return [FreezesHead()]


class FreezesHead(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.head.requires_grad_(batch_idx % 2 == 0)


@each_under("module", [Finetuned, FreezesFirstEpoch, FreezesByCallback], [*LAYOUTS, COMBINED], slow=[TENSOR])
def test_freezing_and_unfreezing(worlds, module, layout):
    report = check(worlds, module, layout, epochs=3, steps=2)
    assert report.outcome == "same", str(report)
