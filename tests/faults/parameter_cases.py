"""Frozen and freed parameters, manual optimization, groups, averages, and overridden state dicts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from faults.layouts import FEATURES, Case, Regression
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from models.regression import closure_of

# ---- A: something still holds a frozen parameter of a layer that is freed


class Adapter(nn.Module):
    """A frozen norm, a frozen matrix and a frozen scale beside trained matrices."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.frozen = norm(FEATURES), nn.Linear(FEATURES, FEATURES)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, FEATURES, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES))
        for frozen in (*self.norm.parameters(), *self.frozen.parameters(), self.scale):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + torch.tanh(self.frozen(h) + self.up(self.down(h))) * self.scale


class Adapted(Regression):
    kind = Adapter

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(4))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class AdaptedByRMSNorm(Adapted):
    kind = partial(Adapter, nn.RMSNorm)


class FrozenScale(nn.Module):
    """A trained matrix whose result a frozen parameter multiplies, which a norm by hand follows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES) / 3)
        self.scale = nn.Parameter(torch.rand(FEATURES) + 0.5, requires_grad=False)
        self.gain = nn.Parameter(torch.rand(FEATURES) + 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh((x @ self.weight) * self.scale)
        return x + h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3) * self.gain


class Scaled(Adapted):
    kind = FrozenScale


class Unfreezes(Adapted):
    """Freezes the norms for the first epoch alone, as by a finetuning schedule."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        for layer in self.layers:
            layer.norm.requires_grad_(self.current_epoch > 0)


# ---- B, C, K: manual optimization


class Manual(Regression):
    """One optimizer."""

    every, clips = 1, False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            last = (batch_idx + 1) % self.every == 0
            with optimizer.toggle_model(sync_grad=last):
                loss = self.loss(batch)
                self.manual_backward(loss / self.every)
                if not last:
                    continue
                if self.clips:
                    self.clip_gradients(optimizer, 0.05, "norm")
                optimizer.step()
                optimizer.zero_grad()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append(float(torch.stack([grad.norm() for grad in grads]).norm()))


class ManualAdam(Manual):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, amsgrad=True)


class ManualMomentum(Manual):
    clips = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        first = [*self.layers[:2].parameters()]
        second = [*self.layers[2:].parameters(), *self.head.parameters()]
        return [torch.optim.Adam(first, lr=0.01), torch.optim.SGD(second, lr=0.1, momentum=0.9)]


class Alternates(TwoOptimizers):
    """Steps one optimizer in each batch, and a scheduler by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        index = batch_idx % 2
        optimizer = self.optimizers()[index]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.lr_schedulers()[index].step()

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


class ByClosure(ManualAdam):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.optimizers().step(closure_of(self, batch, self.change_gradients))
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def change_gradients(self) -> None:
        pass


class EverySecond(ManualAdam):
    every = 2


class EveryThird(TwoOptimizers):
    every, clips = 3, True


class AccumulatesByHand(ManualAdam):
    """Without a word to the strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


# ---- D: groups by what shapes say


class Groups(Regression):
    """Records what it decides by."""

    def rate(self, p: Tensor) -> float:
        return 0.01

    def is_large(self, p: Tensor) -> bool:
        return p.ndim >= 2

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p], "lr": self.rate(p), "weight_decay": 0.3 * self.is_large(p)} for p in self.parameters()
        ]
        self.seen += [(group["lr"], group["weight_decay"], tuple(group["params"][0].shape)) for group in groups]
        return torch.optim.AdamW(groups)


class ByShape(Groups):
    def rate(self, p: Tensor) -> float:
        return 0.1 / p.shape[0]


class ByNumel(Groups):
    def is_large(self, p: Tensor) -> bool:
        return p.numel() > 6


class ByFanIn(Groups):
    def rate(self, p: Tensor) -> float:
        return 0.1 / nn.init._calculate_fan_in_and_fan_out(p)[0] if p.dim() > 1 else 0.02


class ByNorm(Groups):
    """By values, as for layers whose rates follow their size."""

    def rate(self, p: Tensor) -> float:
        return 0.01 * math.sqrt(p.size(-1)) / float(1 + p.detach().norm())


class ByShapeManually(ManualAdam, ByShape):
    def configure_optimizers(self) -> Any:
        return ByShape.configure_optimizers(self)


# ---- L: callbacks that keep tensors computed from parameters


class Shadow(Callback):
    """An average of the weights, and norms; all of it in files."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"average": {}, "norms": [], "largest": torch.zeros((), dtype=torch.float64)}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in pl_module.parameters() if p.grad is not None]).norm()
        self.state["largest"] = torch.maximum(self.state["largest"], norm)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        average = self.state["average"]
        for name, value in pl_module.named_parameters():
            average[name] = value.detach().clone() if name not in average else average[name].lerp(value.detach(), 0.1)
        self.state["norms"].append(pl_module.head.weight.norm().detach())

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Averaged(Callback):
    """The same by torch's class, begun when training starts."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.model = AveragedModel(pl_module.layers, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if self.loaded is not None:
            self.model.load_state_dict(self.loaded)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.model.update_parameters(pl_module.layers)

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.model.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["average"]


class AddsToFile(Regression):
    """Tensors computed from parameters in the module's own hook; reads them back."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.norm = self.layers[3][0].weight.norm().detach()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"] = {"norm": self.norm, "sums": [p.detach().sum() for p in self.parameters()]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen += [
            float(checkpoint["hyper_parameters"]["norm"]),
            *map(float, checkpoint["hyper_parameters"]["sums"]),
        ]


# ---- M: the module decides what its files hold


class LeavesOut(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.strict_loading = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.encoder(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class OverridesStateDict(LeavesOut):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("encoder.")}


class DeletesInPlace(LeavesOut):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        for name in [name for name in state if "encoder" in name]:
            del state[name]
        return state


class KeepsTrained(LeavesOut):
    """Of the parameters only those that are trained, as adapters are saved."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in trained}


class DeletesWhenSaved(LeavesOut):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.startswith("encoder.")]:
            del state[name]


class Renames(Regression):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name[4:]: value for name, value in state_dict.items()}, strict)


class RenamesByHooks(Regression):
    """As torch's hooks on state dicts do it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(to_old_names)
        self.register_load_state_dict_pre_hook(to_new_names)


def to_old_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith("head.")]:
        state["old_" + name] = state.pop(name)


def to_new_names(module: nn.Module, state: dict[str, Any], *args: Any) -> None:
    for name in [name for name in state if name.startswith("old_")]:
        state[name[4:]] = state.pop(name)


class Merging(nn.Linear):
    """Saves the sum of its weight and a product, which is zero when it is loaded."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        self.down, self.up = (nn.Parameter(torch.full(shape, 0.1)) for shape in ((2, FEATURES), (FEATURES, 2)))

    def merged(self) -> Tensor:
        return self.weight + self.up @ self.down

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.merged(), self.bias))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"], destination[prefix + "bias"] = self.merged().detach(), self.bias.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "weight"])
            self.bias.copy_(state_dict[prefix + "bias"])
            self.up.zero_()


class Merges(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Merging() for _ in range(4))


class ChildLeavesOut(LeavesOut):
    """The encoder itself leaves out what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Nothing(FEATURES, FEATURES).requires_grad_(False)


class Nothing(nn.Linear):
    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        return {} if destination is None else destination


FULL = {"recompute": "full"}
CASES = {
    "A norms": Case(Adapted, saves=True),
    "A norms, recomputed": Case(Adapted, strategy=FULL),
    "A RMS norms, interval": Case(AdaptedByRMSNorm, strategy={"recompute": 2}),
    "A scales, recomputed": Case(Scaled, strategy=FULL),
    "A scales, compiled": Case(Scaled, strategy={"compile": {"backend": "eager"}, **FULL}),
    "A unfrozen later": Case(Unfreezes, strategy=FULL, epochs=2),
    "B Adam": Case(ManualAdam, saves=True, epochs=2),
    "B momentum": Case(ManualMomentum, saves=True, validates=True),
    "B two optimizers": Case(TwoOptimizers, saves=True),
    "B alternating": Case(Alternates, saves=True, epochs=2),
    "C every second": Case(EverySecond, epochs=2, saves=True),
    "C every third": Case(EveryThird, epochs=2),
    "C by hand": Case(AccumulatesByHand, epochs=2),
    "D shape": Case(ByShape, saves=True),
    "D numel": Case(ByNumel),
    "D fan-in": Case(ByFanIn),
    "D norm": Case(ByNorm),
    "D manual": Case(ByShapeManually),
    "K closure": Case(ByClosure, saves=True),
    "K recomputed": Case(TwoOptimizers, strategy=FULL),
    "L shadow": Case(Regression, callbacks=(Shadow,), saves=True),
    "L averaged copy": Case(Regression, callbacks=(Averaged,), saves=True),
    "L adds to file": Case(AddsToFile, saves=True),
    "L manual": Case(ManualAdam, callbacks=(Shadow,), saves=True),
    "M overridden": Case(OverridesStateDict, saves=True),
    "M in place": Case(DeletesInPlace, saves=True),
    "M trained": Case(KeepsTrained, saves=True),
    "M when saved": Case(DeletesWhenSaved, saves=True),
    "M renamed": Case(Renames, saves=True),
    "M renamed by hooks": Case(RenamesByHooks, saves=True),
    "M renamed by hooks, folder": Case(RenamesByHooks, saves=True, strategy={"save_distributed_checkpoint": True}),
    "M merged by a child": Case(Merges, saves=True),
    "M left out by a child": Case(ChildLeavesOut, saves=True),
    "M left out by a child, folder": Case(ChildLeavesOut, saves=True, strategy={"save_distributed_checkpoint": True}),
}
