"""How evenly a router deals its tokens, as torchmetrics: each is fed the reports of one layer.

    self.balance = LoadBalance(num_experts=8)
    y, report = self.moe(x)
    self.balance.update(report)
    self.log("balance", self.balance)

All of them keep the same sums, which are added up over the ranks that see other samples; a `MetricCollection` keeps
them once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hybrid.experts.moe.routers import Report


def shares_of(load: Tensor) -> Tensor:
    """Load [..., E] as shares that sum to 1; even where there is no load."""
    total = load.sum(-1, keepdim=True)
    return torch.where(total > 0, load / total.clamp_min(1e-30), 1 / load.shape[-1])


def balance_of(load: Tensor) -> Tensor:
    """Load of the busiest expert over the mean: 1 is even, the number of experts is all on one. [..., E] -> [...]."""
    return shares_of(load).amax(-1) * load.shape[-1]


def entropy_of_load(load: Tensor) -> Tensor:
    """Entropy of the shares in parts of the largest, log E: 1 is even, 0 is all on one. [..., E] -> [...]."""
    if load.shape[-1] == 1:
        return torch.ones_like(load[..., 0])
    return torch.special.entr(shares_of(load)).sum(-1) / math.log(load.shape[-1])


class OfReports(Metric, ABC):
    """Sums over the reports of one layer.

    Attributes:
        load: [E] pairs that asked for each expert.
        dropped: Pairs dropped.
        entropy: Sum over reports of the router's mean entropy, in nats.
        count: Number of reports.
    """

    full_state_update = False
    load: Tensor
    dropped: Tensor
    entropy: Tensor
    count: Tensor

    def __init__(self, num_experts: int, **options: Any) -> None:
        """Args: num_experts: of the layer. options: of torchmetrics.

        Raises:
            ValueError: Fewer than one expert.
        """
        super().__init__(**options)
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts} must be at least 1")
        self.num_experts = num_experts
        for name, shape in (("load", (num_experts,)), ("dropped", ()), ("entropy", ()), ("count", ())):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, report: Report) -> None:
        """Add one report.

        Raises:
            ValueError: It is of another number of experts.
        """
        if report.load.shape != self.load.shape:
            raise ValueError(
                f"{type(self).__name__}(num_experts={self.num_experts}) got a report of {report.load.numel()} experts"
            )
        self.load += report.load
        self.dropped += report.dropped
        self.entropy += report.entropy
        self.count += 1

    @abstractmethod
    def compute(self) -> Tensor:
        """The metric."""


class ExpertLoad(OfReports):
    """The share of each expert, [E]."""

    def compute(self) -> Tensor:
        """Shares that sum to 1."""
        return shares_of(self.load)


class LoadBalance(OfReports):
    """Load of the busiest expert over the mean; 1 is even."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """From 1 to the number of experts."""
        return balance_of(self.load)


class LoadEntropy(OfReports):
    """Entropy of the load in parts of the largest; 1 is even."""

    higher_is_better = True

    def compute(self) -> Tensor:
        """From 0 to 1."""
        return entropy_of_load(self.load)


class DroppedShare(OfReports):
    """Share of the pairs (token, expert) that an expert had no room for."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """From 0 to 1."""
        return self.dropped / self.load.sum().clamp_min(1)


class RouterEntropy(OfReports):
    """Mean entropy of what the router thinks of a token, in nats: 0 is sure, log E is undecided."""

    def compute(self) -> Tensor:
        """Nats."""
        return self.entropy / self.count.clamp_min(1)
