"""Torchmetrics of expert load balance: each is updated with the reports of one layer.

    self.balance = LoadBalance(num_experts=8)
    y, report = self.moe(x)
    self.balance.update(report)
    self.log("balance", self.balance)

All of them have the same state, sums that are reduced over the ranks with other samples; a `MetricCollection` keeps one
copy of it.
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
    """Normalizes load of shape [..., E] to shares of the same shape that sum to 1; uniform where there is no load."""
    total = load.sum(-1, keepdim=True)
    return torch.where(total > 0, load / total.clamp_min(1e-30), 1 / load.shape[-1])


def balance_of(load: Tensor) -> Tensor:
    """Computes max load / mean load, of shape [..., E] -> [...]: 1 is balanced, E is all load on one expert."""
    return shares_of(load).amax(-1) * load.shape[-1]


def entropy_of_load(load: Tensor) -> Tensor:
    """Computes the entropy of the shares relative to log E, shape [..., E] -> [...]: 1 is balanced, 0 all on one."""
    if load.shape[-1] == 1:
        return torch.ones_like(load[..., 0])
    return torch.special.entr(shares_of(load)).sum(-1) / math.log(load.shape[-1])


class OfReports(Metric, ABC):
    """Base class: accumulates the reports of one layer."""

    full_state_update = False
    load: Tensor  # [E] number of (token, expert) pairs routed to each expert, before drops
    dropped: Tensor  # number of dropped pairs
    entropy: Tensor  # sum over reports of the router's mean entropy, in nats
    count: Tensor  # number of reports

    def __init__(self, num_experts: int, **options: Any) -> None:
        """Creates the metric for a layer of ``num_experts``; ``options`` go to ``torchmetrics.Metric``.

        Raises:
            ValueError: ``num_experts`` is below 1.
        """
        super().__init__(**options)
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts} must be at least 1")
        self.num_experts = num_experts
        for name, shape in (("load", (num_experts,)), ("dropped", ()), ("entropy", ()), ("count", ())):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, report: Report) -> None:
        """Adds one report to the sums.

        Raises:
            ValueError: The report has another number of experts.
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
        """Returns the metric from the sums, of shape [] or [E]."""


class ExpertLoad(OfReports):
    """Share of the load of each expert, [E]."""

    def compute(self) -> Tensor:
        """Returns the share of each expert in the load, of shape [E]; they sum to 1."""
        return shares_of(self.load)


class LoadBalance(OfReports):
    """Maximum load over mean load; 1 is balanced."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """Returns maximum load / mean load, a scalar between 1 and the number of experts."""
        return balance_of(self.load)


class LoadEntropy(OfReports):
    """Entropy of the load relative to the maximum, log E; 1 is balanced."""

    higher_is_better = True

    def compute(self) -> Tensor:
        """Returns the entropy of the load over log E, a scalar between 0 and 1."""
        return entropy_of_load(self.load)


class DroppedShare(OfReports):
    """Share of the (token, expert) pairs dropped for lack of capacity."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """Returns dropped pairs / all pairs, a scalar between 0 and 1."""
        return self.dropped / self.load.sum().clamp_min(1)


class RouterEntropy(OfReports):
    """Mean entropy of the router's distribution over experts per token, in nats: 0 is one-hot, log E is uniform."""

    def compute(self) -> Tensor:
        """Returns the mean entropy per token, a scalar in nats."""
        return self.entropy / self.count.clamp_min(1)
