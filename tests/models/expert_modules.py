"""Modules of experts in other conventions than transformers'."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SwappedNames(nn.Module):
    """Stacked weights, another argument order, and a width equal to its number of experts."""

    def __init__(self):
        super().__init__()
        self.count = self.width = 4
        self.a = nn.Parameter(torch.randn(4, 4, 8))
        self.b = nn.Parameter(torch.randn(4, 8, 4))

    def forward(self, gate, tokens, *, choice):
        out = tokens.new_zeros(tokens.shape[0], self.width)
        for number in range(self.count):
            row, place = (choice == number).nonzero(as_tuple=True)
            out = out.index_add(
                0, row, (F.gelu(tokens[row] @ self.a[number]) @ self.b[number]) * gate[row, place, None]
            )
        return out


class BestOfFour(nn.Module):
    """The best of four experts for each sample."""

    def __init__(self, features):
        super().__init__()
        self.router = nn.Linear(features, 4, bias=False)
        experts = (nn.Sequential(nn.Linear(features, 12), nn.Tanh(), nn.Linear(12, features)) for _ in range(4))
        self.experts = nn.ModuleList(experts)

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            out[mask] = expert(x[mask]) * gate[mask].unsqueeze(-1)
        return x + out


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def rows_of(*sizes):
    return torch.randn(*sizes, dtype=torch.float32)


class StackedWeights(nn.Module):
    """Four experts in one parameter each, in the convention of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.count = 4
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) * 0.2)

    def forward(self, rows: Tensor, chosen: Tensor, gate: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number in range(self.count):
            taken, place = torch.where(chosen == number)
            hidden = torch.tanh(rows[taken] @ self.up[number]) @ self.down[number]
            out = out.index_add(0, taken, hidden * gate[taken, place, None])
        return out
