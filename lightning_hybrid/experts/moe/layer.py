"""The MoE layer: routes tokens, sorts rows by expert, runs the experts, combines the results."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.moe.dispatch import (
    Dispatch,
    DropBy,
    combine,
    dispatch_all_pairs,
    dispatch_expert_choice,
    dispatch_with_capacity,
    gather_rows,
)
from lightning_hybrid.experts.moe.grouped import ACTIVATIONS, GroupedExperts
from lightning_hybrid.experts.moe.routers import ExpertChoiceRouter, Report, Routing, Score, TopKRouter, capacity

RouterKind: TypeAlias = Literal["token_choice", "expert_choice"]
Overflow: TypeAlias = Literal["drop", "pad"]


def _check_options(
    router: str, overflow: str, drop_by: str, capacity_factor: float | None, bias_rate: float, shared_experts: int
) -> None:
    for option, value, allowed in (
        ("router", router, RouterKind),
        ("overflow", overflow, Overflow),
        ("drop_by", drop_by, DropBy),
    ):
        if value not in get_args(allowed):
            raise ValueError(f"{option}={value!r}; use one of {', '.join(map(repr, get_args(allowed)))}")
    if capacity_factor is not None and capacity_factor <= 0:
        raise ValueError(f"capacity_factor={capacity_factor}; it must be positive, or None to drop nothing")
    if overflow == "pad" and capacity_factor is None:
        raise ValueError("overflow='pad' needs a capacity to fill; set capacity_factor, to 1.25 say")
    if router == "expert_choice" and bias_rate:
        raise ValueError(
            f"bias_update_rate={bias_rate} balances what tokens choose, but router='expert_choice' is even;"
            " leave it out"
        )
    if shared_experts < 0:
        raise ValueError(f"shared_experts={shared_experts}; it must not be negative")


class MoE(nn.Module):
    """Mixture-of-experts layer: each token is processed by a few of its MLPs.

        y, report = moe(x)              # in a block; y has the shape of x
        loss = loss + report.loss       # in training_step

    Attributes:
        router: ``TopKRouter`` or ``ExpertChoiceRouter``.
        experts: ``GroupedExperts``; called with the rows of this rank, sorted by expert, and their counts.
        shared: The shared expert, an MLP for all tokens, or None.
        name: Name of this layer in errors.

    Args:
        dim: D, features of a token.
        hidden_dim: H, of each expert.
        num_experts: E.
        top_k: k, experts per token; with ``router="expert_choice"`` on average.
        router: Who chooses: "token_choice" or "expert_choice".
        capacity_factor: An expert takes at most ``ceil(T * k / E * capacity_factor)`` of T tokens; None, the
            default, takes all (dropless). A token whose pairs are all dropped gets zeros (plus the shared expert).
        overflow: Rows under a capacity: "drop" computes those that fit; "pad" computes exactly the capacity for every
            expert, so that no shape depends on data.
        drop_by: Priority of pairs under a capacity: "position", first choices before second ones, each in the order of
            tokens; "weight", the pairs of largest weight.
        gated: Experts are ``down(activation(u) * v)`` with u, v = up(x), and not ``down(activation(up(x)))``.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        bias: Experts have biases.
        shared_experts: Size of the shared expert in multiples of ``hidden_dim``; all tokens see it, with weight 1.
        jitter: Range of the noise on the router's inputs in training, as in ``TopKRouter``.
        balance_loss: Coefficient; not used with ``router="expert_choice"``, which is balanced.
        z_loss: Coefficient.
        bias_update_rate: Balances without a loss; call ``update_bias`` once per step of the optimizer.
        score: "softmax" or "sigmoid".
        normalize: Weights of a token sum to 1. Not used with ``router="expert_choice"``.

    Raises:
        ValueError: An argument is out of its range, or two are incompatible.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        num_experts: int,
        top_k: int = 2,
        router: RouterKind = "token_choice",
        capacity_factor: float | None = None,
        overflow: Overflow = "drop",
        drop_by: DropBy = "position",
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        shared_experts: int = 0,
        jitter: float = 0.0,
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        bias_update_rate: float = 0.0,
        score: Score = "softmax",
        normalize: bool = True,
    ) -> None:
        super().__init__()
        _check_options(router, overflow, drop_by, capacity_factor, bias_update_rate, shared_experts)
        self.router: TopKRouter | ExpertChoiceRouter
        if router == "token_choice":
            self.router = TopKRouter(
                dim,
                num_experts,
                top_k,
                score=score,
                normalize=normalize,
                jitter=jitter,
                balance_loss=balance_loss,
                z_loss=z_loss,
                bias_update_rate=bias_update_rate,
            )
        else:
            factor = 1.0 if capacity_factor is None else capacity_factor
            self.router = ExpertChoiceRouter(
                dim, num_experts, top_k, capacity_factor=factor, score=score, jitter=jitter, z_loss=z_loss
            )
        self.capacity_factor, self.overflow, self.drop_by = capacity_factor, overflow, drop_by
        self.experts = GroupedExperts(num_experts, dim, hidden_dim, gated=gated, activation=activation, bias=bias)
        self.shared: SharedExpert | None = None
        if shared_experts:
            self.shared = SharedExpert(dim, shared_experts * hidden_dim, gated=gated, activation=activation, bias=bias)
        self.name = type(self).__name__

    @property
    def name(self) -> str:
        """Name of this layer in errors."""
        return self.router.name

    @name.setter
    def name(self, name: str) -> None:
        self.router.name = name

    def name_in_errors(self, fqn: str) -> None:
        """Names this layer by its FQN in error messages, unless the user has named it."""
        if self.name == type(self).__name__:
            self.name = fqn

    def forward(self, x: Tensor) -> tuple[Tensor, Report]:
        """Routes tokens and combines the results of their experts.

        Args:
            x: Of shape [..., D].

        Returns:
            The results, of the same shape as ``x``, and the report of this call.

        Raises:
            ValueError: The router's logits are not finite (on the CPU).
        """
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        dispatch = self._dispatch(routing, tokens.shape[0])
        results = self.experts(gather_rows(tokens, dispatch), dispatch.counts)
        y = combine(results, dispatch, tokens.shape[0])
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view(*x.shape[:-1], y.shape[-1]), routing.report._replace(dropped=dispatch.dropped.detach())

    def update_bias(self, load: Tensor | None = None) -> None:
        """Moves the router's biases towards an even load; to be called once per step of the optimizer.

        Args:
            load: Pairs of the step, of shape [E], summed over replicas; those that this rank has counted, if None.
        """
        if isinstance(self.router, TopKRouter):
            self.router.update_bias(load)

    def _dispatch(self, routing: Routing, num_tokens: int) -> Dispatch:
        if routing.experts is None:
            assert routing.tokens is not None
            return dispatch_expert_choice(routing.tokens, routing.weights)
        counts = routing.report.load.to(torch.int64)
        if self.capacity_factor is None:
            return dispatch_all_pairs(routing.experts, routing.weights, counts)
        slots = capacity(num_tokens, routing.experts.shape[1], counts.shape[0], self.capacity_factor)
        return dispatch_with_capacity(
            routing.experts, routing.weights, counts, slots, drop_by=self.drop_by, pad=self.overflow == "pad"
        )


class SharedExpert(nn.Module):
    """Shared expert: an MLP of plain linear layers, with the structure of an expert, that all tokens see."""

    def __init__(self, dim: int, hidden_dim: int, *, gated: bool, activation: str, bias: bool) -> None:
        super().__init__()
        self.gated, self.activation = gated, activation
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.multiplier = nn.Linear(dim, hidden_dim, bias=bias) if gated else None
        self.down = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the MLP to shape [..., D]; the result has the same."""
        hidden = ACTIVATIONS[self.activation].plain(self.up(x))
        if self.multiplier is not None:
            hidden = hidden * self.multiplier(x)
        y: Tensor = self.down(hidden)
        return y
