"""Inputs that ended in an error or a refusal, and variants of them, as small modules with their batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

FEATURES, BATCH = 6, 8


def loader(batches: Sequence[Any], replica: int, replicas: int) -> DataLoader:
    """Of the rows of batches that a replica takes."""
    own = [tree_map(lambda rows: None if rows is None else rows[replica::replicas], batch) for batch in batches]
    return DataLoader(own, batch_size=None)


def of_numbers(*sizes: tuple[int, int]) -> Any:
    """Makes a loader for each number of batches and size of a batch."""
    return partial(_of_numbers, sizes)


def _of_numbers(sizes: Sequence[tuple[int, int]], replica: int, replicas: int) -> list[DataLoader]:
    return [loader(numbers(*size, seed), replica, replicas) for seed, size in enumerate(sizes)]


def numbers(count: int, samples: int = BATCH, seed: int = 0) -> list[Any]:
    """Batches of inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(each, each.sum(1, keepdim=True).tanh()) for each in x]


class Small(LightningModule):
    """Four layers and a head; each case changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-4)


class Validated(Small):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)


# N


class CompiledInPlace(Validated):
    """Its forward is compiled by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


class CompiledLayers(Validated):
    def configure_model(self) -> None:
        if not hasattr(self, "compiled"):
            self.compiled = True
            for index, layer in enumerate(self.layers):
                self.layers[index] = torch.compile(layer, backend="eager")


class CompiledInner(Validated):
    """A compiled submodule holds all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(nn.Sequential(*self.layers, self.head), backend="eager")
        del self.layers, self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class CompiledStep(Validated):
    """A function of the step is compiled by a decorator."""

    @torch.compile(backend="eager")
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x)


def compiled_module() -> Any:
    return torch.compile(Validated(), backend="eager")


def compiled_fullgraph() -> Any:
    return torch.compile(Small(), backend="aot_eager", fullgraph=True, dynamic=False)


# O


def sequences(replica: int, replicas: int) -> list[Any]:
    """A loader of batches of sequences with their lengths, from the longest to the shortest."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(5, 5, 5, 5, 5, 5, 5, 5), (5, 4, 4, 3, 3, 2, 1, 1), (6, 6, 5, 5, 4, 4, 1, 1), (3, 3, 2, 2, 2, 2, 1, 1)]
    x = [torch.randn(BATCH, max(each), FEATURES, generator=generator, dtype=torch.float64) for each in lengths]
    return [loader([*zip(x, map(torch.tensor, lengths), strict=True)], replica, replicas)]


class Packed(Small):
    """Packed sequences between layers, of lengths from the batch."""

    kind: Any = nn.GRU
    enforce_sorted, as_list = False, False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (self.kind(size, FEATURES, batch_first=True) for size in (FEATURES, FEATURES))

    def recur(self, layer: nn.Module, h: Tensor, lengths: Any) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=self.enforce_sorted)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths = batch
        if self.as_list:
            lengths = lengths.tolist()
        h = self.layers[1](self.layers[0](x))
        h = self.layers[2](self.recur(self.inner, h, lengths))
        h = self.layers[3](self.recur(self.outer, h, lengths))
        valid = torch.arange(h.shape[1]) < torch.as_tensor(lengths)[:, None]
        return (self.head(h).squeeze(-1) * valid).sum(1).square().mean()


class PackedSorted(Packed):
    enforce_sorted = True


class PackedByList(Packed):
    as_list = True


class PackedState(Packed):
    """Of an LSTM in both directions; its last states go on."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(FEATURES, FEATURES // 2, 2, batch_first=True, bidirectional=True)
        del self.inner, self.outer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths = batch
        h = self.layers[1](self.layers[0](x))
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (h, _) = self.recurrent(packed)
        h = self.layers[3](self.layers[2](torch.cat([h[-2], h[-1]], 1)))
        return self.head(h).square().mean()


# P


class Masks(Small):
    """Gradients of layers are masked, from the hook that a subclass names."""

    def mask(self) -> None:
        for number, layer in enumerate([*(each[0] for each in self.layers[:3]), self.head]):
            mask = (
                torch.arange(layer.weight.numel(), dtype=layer.weight.dtype).view(layer.weight.shape).add(number).cos()
            )
            layer.weight.register_hook(lambda gradient, mask=mask: gradient * mask)


class MasksInInit(Masks):
    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.mask()


class MasksInSetup(Masks):
    def setup(self, stage: str) -> None:
        self.mask()


class MasksAtFitStart(Masks):
    def on_fit_start(self) -> None:
        self.mask()


class MasksAtTrainStart(Masks):
    def on_train_start(self) -> None:
        self.mask()


class MasksAtEpochStart(Masks):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.mask()


class MasksInOptimizers(Masks):
    def configure_optimizers(self) -> Any:
        self.mask()
        return super().configure_optimizers()


class MasksAccumulated(Masks):
    """In hooks that run once the gradient has accumulated."""

    def on_fit_start(self) -> None:
        for layer in self.layers:
            mask = torch.arange(layer[0].weight.numel(), dtype=torch.float64).view_as(layer[0].weight).cos()
            layer[0].weight.register_post_accumulate_grad_hook(partial(self.masked, mask))

    @staticmethod
    def masked(mask: Tensor, parameter: Tensor) -> None:
        parameter.grad.mul_(mask)


class MasksByName(Masks):
    """A mask of each parameter, kept in buffers; lottery tickets do so."""

    def __init__(self) -> None:
        super().__init__()
        for name, p in list(self.named_parameters()):
            self.register_buffer("mask_" + name.replace(".", "_"), torch.arange(p.numel()).view(p.shape) % 3 > 0)

    def on_train_start(self) -> None:
        for name, p in self.named_parameters():
            mask = getattr(self, "mask_" + name.replace(".", "_"))
            p.register_hook(lambda gradient, mask=mask: gradient * mask)


# T


class Odd(Validated):
    """Each layer scales its input by a parameter that is no floating-point number."""

    def make(self, number: int) -> Tensor:
        return torch.arange(FEATURES) + number

    def use(self, odd: Tensor) -> Tensor:
        return odd / 5

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ParameterList(nn.Parameter(self.make(n), requires_grad=False) for n in range(4))

    def hidden(self, x: Tensor) -> Tensor:
        for layer, odd in zip(self.layers, self.odd, strict=True):
            x = layer(x) * self.use(odd)
        return x


class OddInOptimizer(Odd):
    """All parameters are given to the optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-4)


class OddBytes(Odd):
    def make(self, number: int) -> Tensor:
        return torch.arange(2 * FEATURES, dtype=torch.uint8).view(2, -1)

    def use(self, odd: Tensor) -> Tensor:
        return odd.sum(0) / 9


class OddNumber(Odd):
    def make(self, number: int) -> Tensor:
        return torch.tensor(number + 1)

    def use(self, odd: Tensor) -> Tensor:
        return odd


class BoolBuffer(Validated):
    """Masks in buffers, one of them that the step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(FEATURES) % 3 > 0)
        self.register_buffer("seen", torch.zeros(FEATURES, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen |= self.mask
        self.count += 1
        return F.mse_loss(self(x * self.mask), y)


class Quantized(nn.Module):
    """A frozen matrix of bytes with its scale, and an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(FEATURES * FEATURES).view(FEATURES, FEATURES) * 7 % 31 - 15
        self.weight = nn.Parameter(values.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((FEATURES, 1), 0.03), requires_grad=False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight.to(x.dtype) * self.scale) + self.up(self.down(x)))


class Adapters(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Quantized() for _ in range(4))
