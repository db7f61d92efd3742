"""Experts with stacked weights, of any width, some of which no rank can compute without the others."""

import torch
from torch import nn
from torch.nn import functional as F


class Pairs(nn.Module):
    """Each token is computed by its chosen experts; hooks for faults in subclasses."""

    num_experts = 4

    def __init__(self, width, hidden):
        super().__init__()
        self.num, self.width, self.hidden = self.num_experts, width, hidden
        self.up = nn.Parameter(torch.empty(self.num, hidden, width))
        self.down = nn.Parameter(torch.empty(self.num, width, hidden))

    def forward(self, tokens, which, weights):
        tokens, out = self.prepared(tokens, which), torch.zeros_like(tokens)
        for number in range(self.num):
            row, place = (which == number).nonzero(as_tuple=True)
            results = self.expert(number, tokens[row])
            out.index_add_(0, row, results * self.factor(weights[row, place, None]))
        return out

    def prepared(self, tokens, which):
        return tokens

    def expert(self, number, rows):
        return F.gelu(rows @ self.weight("up")[number].T) @ self.down[number].T

    def factor(self, weights):
        return weights

    def weight(self, name):
        return getattr(self, name)


class SquaredWeights(Pairs):
    def factor(self, weights):
        return weights**2


class ReadsAllRows(Pairs):
    def prepared(self, tokens, which):
        return tokens - tokens.mean(0)


class ReadsRowsOfExpert(Pairs):
    """The rows that an expert gets from other ranks differ."""

    def expert(self, number, rows):
        return super().expert(number, rows - rows.mean(0) if len(rows) else rows)


class SharesState(Pairs):
    """Each expert adds what the one before has left."""

    def prepared(self, tokens, which):
        self.state = tokens.new_zeros(self.width)
        return tokens

    def expert(self, number, rows):
        results = super().expert(number, rows) + self.state
        self.state = self.state + self.down[number].sum(1)
        return results


class CountsInBuffer(Pairs):
    """The number of tokens, as other code reads it later."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def prepared(self, tokens, which):
        self.seen += len(tokens)
        return tokens


class CapacityOfAllTokens(Pairs):
    def prepared(self, tokens, which):
        self.capacity = max(1, which.numel() // self.num)
        return tokens

    def expert(self, number, rows):
        return F.pad(super().expert(number, rows[: self.capacity]), (0, 0, 0, max(0, len(rows) - self.capacity)))


class CapacityOfExpert(Pairs):
    """A fixed one, of the rows of all ranks that share the experts."""

    def expert(self, number, rows):
        return F.pad(super().expert(number, rows[:2]), (0, 0, 0, max(0, len(rows) - 2)))


class CentredOverExperts(Pairs):
    def weight(self, name):
        return self.up - self.up.mean(0)


class WritesTokens(Pairs):
    """What comes after the experts reads the written tokens."""

    def prepared(self, tokens, which):
        return tokens.mul_(0.5)


class WritesChoices(Pairs):
    def prepared(self, tokens, which):
        which.clamp_(max=2)
        return tokens


class FaultyIfWide(Pairs):
    def prepared(self, tokens, which):
        return tokens - tokens.mean(0) if self.width > 100 else tokens


class FixedFeatures(Pairs):
    def prepared(self, tokens, which):
        return torch.cat([tokens[:, :8].tanh(), tokens[:, 8:]], 1)


class ReadsResults(Pairs):
    def expert(self, number, rows):
        results = super().expert(number, rows)
        return results * 2 if results.isnan().any() else results


class OddWidth(Pairs):
    def __init__(self, width, hidden):
        super().__init__(width + 2, hidden + 2)


FAULTY = [
    *(SquaredWeights, ReadsAllRows, ReadsRowsOfExpert, SharesState, CountsInBuffer, CapacityOfAllTokens),
    *(CapacityOfExpert, CentredOverExperts, WritesTokens, WritesChoices),
]
