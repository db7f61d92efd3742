"""Modules whose layers pass containers and other objects than tensors."""

import collections
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.hand_written import WIDTH, Lit, mlp


class Passes(nn.Module):
    """Returns its input, the same tensor, beside its result."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, mask):
        return x + self.net(x) * mask, mask


class Identity(nn.Module):
    """Has parameters and returns its input."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x


class ReturnsInputs(Lit):
    """Units that return one of their inputs."""

    def __init__(self):
        super().__init__()
        self.first = mlp()
        self.layers = nn.ModuleList(Passes() for _ in range(4))
        self.identity = Identity()
        self.last = mlp()

    def loss(self, batch):
        mask = torch.sigmoid(self.first(batch["y"]))
        x = batch["x"]
        for layer in self.layers:
            x, mask = layer(x, mask)
            x = self.identity(x)
        return ((self.last(x) - mask) ** 2).mean()


@dataclasses.dataclass
class Hidden:
    x: Tensor
    name: str
    extra: Tensor | None = None


class Pair(NamedTuple):
    x: Tensor
    norm: Tensor


class ToDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        h = self.net(x)
        return {"x": x + h, "inner": [h, None], "step": 3}


class ToDataclass(ToDict):
    def forward(self, x):
        return Hidden(x + self.net(x), "hidden", extra=x.mean())


class ToNamedTuple(ToDict):
    def forward(self, hidden):
        h = hidden.x + self.net(hidden.x)
        return Pair(h, h.norm(dim=-1, keepdim=True))


class ToOrderedDict(ToDict):
    def forward(self, pair):
        return collections.OrderedDict(a=self.net(pair.x / pair.norm), b=pair.norm)


class Containers(Lit):
    """Units that pass dicts, dataclasses and named tuples."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = ToDict(), ToDataclass(), ToNamedTuple(), ToOrderedDict()

    def loss(self, batch):
        first = self.a(batch["x"])
        second = self.b(first["x"] + first["inner"][0])
        assert second.name == "hidden" and first["step"] == 3
        last = self.d(self.c(second))
        return F.mse_loss(last["a"], batch["y"]) + last["b"].mean() * 0.1 + second.extra * 0.1
