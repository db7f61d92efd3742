"""A stack of blocks with matrices of at least 4,096 elements, by optimizers that quantize the states of these."""

import torch
from lightning.pytorch import Callback
from torch import nn

from models.hand_written import WIDTH, Layers

HIDDEN = 256


class Blocks(Layers):
    """The first block has a matrix whose elements are no multiple of a block, and two groups are stepped."""

    def __init__(self):
        super().__init__(3)
        widths = (HIDDEN + 4, HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH)) for width in widths
        )

    def groups(self):
        first = list(self.layers[0].parameters())
        rest = [p for module in (*self.layers[1:], self.head) for p in module.parameters()]
        return [{"params": first, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


class By8bit(Blocks):
    def configure_optimizers(self):
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.groups(), lr=1e-2)


class By4bit(Blocks):
    def configure_optimizers(self):
        from torchao.optim import AdamW4bit

        return AdamW4bit(self.groups(), lr=1e-2)


class ByFp8(Blocks):
    def configure_optimizers(self):
        from torchao.optim import AdamWFp8

        return AdamWFp8(self.groups(), lr=1e-2)


class ByBitsandbytes(Blocks):
    def configure_optimizers(self):
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(self.groups(), lr=1e-2)


MODULES = {"8bit": By8bit, "4bit": By4bit, "fp8": ByFp8, "bitsandbytes": ByBitsandbytes}


class Uncompiled(Callback):
    """Steps of torchao run without its compiler, which takes minutes for all shapes."""

    recorded = None

    def setup(self, *_, **__):
        self._stance = torch.compiler.set_stance("force_eager")

    def teardown(self, *_, **__):
        torch.compiler.set_stance("default")

    def on_exception(self, *_):
        torch.compiler.set_stance("default")
