"""Routers of MoE layers: choice of experts and weights per token, balance losses, load statistics.

Losses and counts are returned as values of the step like any other, so they are right under recomputation (nothing is
appended to attributes) and are sent between pipeline stages. Shapes: T tokens, D features, E experts, k experts per
token, P pairs (token, expert).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Score: TypeAlias = Literal["softmax", "sigmoid"]


class Report(NamedTuple):
    """Losses and load statistics of one call; all tensors, so that it can be sent between stages.

    Attributes:
        loss: [] auxiliary losses, already times their coefficients; differentiable.
        load: [E] floating point, detached: pairs routed to each expert, before drops.
        dropped: [] floating point, detached: pairs dropped for lack of capacity.
        entropy: [] floating point, detached: mean entropy of the router's distribution over experts, in nats.
    """

    loss: Tensor
    load: Tensor
    dropped: Tensor
    entropy: Tensor


class Routing(NamedTuple):
    """Routing decision of one call.

    Attributes:
        experts: [T, k] the experts of each token, by decreasing score; None for expert choice.
        tokens: [E, C] the tokens of each expert, by decreasing score; None for token choice.
        weights: [T, k] or [E, C], factors of the experts' results; differentiable.
        report: Its ``dropped`` is still 0.
    """

    experts: Tensor | None
    tokens: Tensor | None
    weights: Tensor
    report: Report


@torch.library.custom_op("lightning_hybrid::check_logits", mutates_args=())
def _check_logits(total: Tensor, name: str) -> None:
    """Checks the sum of the logits; a custom operator, so that fake tensors pass."""
    if not math.isfinite(total.item()):
        raise ValueError(
            f"{name}: the router's logits are not finite; the tokens that it was given, or its weights, hold NaN or"
            " infinite values; lower the learning rate, clip gradients, or set z_loss=1e-3"
        )


@_check_logits.register_fake
def _(total: Tensor, name: str) -> None:
    return None


class _Router(nn.Module):
    """Base class of routers: logits, scores and z-loss. Computes in float32 or float64."""

    def __init__(self, dim: int, num_experts: int, top_k: int, *, score: Score, jitter: float, z_loss: float) -> None:
        super().__init__()
        for name, size in {"dim": dim, "num_experts": num_experts}.items():
            if size < 1:
                raise ValueError(f"{name}={size}; it must be at least 1")
        if score not in get_args(Score):
            raise ValueError(f"score={score!r}; use one of {', '.join(map(repr, get_args(Score)))}")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter={jitter}; it must be at least 0 and below 1")
        if z_loss < 0:
            raise ValueError(f"z_loss={z_loss}; it must not be negative")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k}; it must be at least 1 and at most num_experts={num_experts}")
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.score, self.jitter, self.z_loss = score, jitter, z_loss
        self.name = type(self).__name__
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the weight as ``nn.Linear`` does."""
        nn.init.uniform_(self.weight, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))

    def logits(self, x: Tensor) -> Tensor:
        """Computes the logits: shape [T, D] -> [T, E].

        Raises:
            ValueError: The logits are not finite. On the CPU only: elsewhere the check would make the host wait for the
                device. There, ``Report.entropy`` of such a call is not finite.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            if self.training and self.jitter:
                x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
            logits = F.linear(x, self.weight.to(dtype))
        if logits.device.type == "cpu":
            _check_logits(logits.detach().sum(), self.name)
        return logits

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scores that rank the experts, and probabilities over the experts, both of shape [T, E] as logits."""
        if self.score == "softmax":
            probabilities = logits.softmax(-1)
            return probabilities, probabilities
        scores = logits.sigmoid()
        return scores, scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def losses(self, logits: Tensor) -> Tensor:
        """Returns the z-loss of logits [T, E], times its coefficient, a scalar (ST-MoE: Zoph et al. 2022, eq. 5)."""
        if not self.z_loss or not logits.shape[0]:
            return logits.new_zeros(())
        return self.z_loss * logits.logsumexp(-1).square().mean()

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(module)``."""
        return f"dim={self.dim}, num_experts={self.num_experts}, score={self.score!r}"


def entropy_of(probabilities: Tensor) -> Tensor:
    """Computes the mean entropy in nats, shape [T, E] -> []; 0 without tokens."""
    with torch.no_grad():
        return -torch.xlogy(probabilities, probabilities).sum() / max(probabilities.shape[0], 1)


def count(experts: Tensor, num_experts: int) -> Tensor:
    """Counts expert indices of any shape, in int64 of shape [E]; it does not depend on data, unlike ``bincount``'s."""
    flat = experts.reshape(-1)
    return flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))


class TopKRouter(_Router):
    """Token choice: each token chooses k experts (k=1: Switch, Fedus et al. 2021; k=2: GShard, Lepikhin et al. 2020).

    Losses: balance, ``E * sum over e of (share of pairs that chose e) * (mean probability of e)``, which is 1 when both
    are even (Switch, eq. 4), and the z-loss. Both are means over the tokens of one call, a microbatch on one rank.

    Without a loss, ``bias_update_rate`` balances by a bias per expert that is added to scores when experts are chosen,
    not to the weights (DeepSeek-V3; Wang et al. 2024). Calls in training mode add their load to the buffer ``load``, a
    call that a backward repeats (recomputation) adds nothing, and ``update_bias``, to be called once per step of the
    optimizer, raises the bias of experts with less than the mean load, lowers that of those with more, and clears the
    buffer: the bias is the same for any number of microbatches.

    Attributes:
        weight: [E, D].
        name: Name of this router in errors.
        bias: [E] buffer, or None without ``bias_update_rate``.
        load: [E] buffer, or None: the load since the last ``update_bias``.
    """

    bias: Tensor | None
    load: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        score: Score = "softmax",
        normalize: bool = True,
        jitter: float = 0.0,
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        """Creates the router.

        Args:
            dim: D.
            num_experts: E.
            top_k: k.
            score: Scores are a softmax over the experts, or a sigmoid for each.
            normalize: Weights of a token are divided by their sum. Ignored for k=1, where they would all be 1 and the
                router would get no gradient.
            jitter: In training, inputs of the router are multiplied by uniform numbers in [1 - jitter, 1 + jitter].
            balance_loss: Coefficient.
            z_loss: Coefficient.
            bias_update_rate: Step size of each expert's bias in ``update_bias``.

        Raises:
            ValueError: An argument is out of its range.
        """
        super().__init__(dim, num_experts, top_k, score=score, jitter=jitter, z_loss=z_loss)
        if balance_loss < 0 or bias_update_rate < 0:
            raise ValueError(
                f"balance_loss={balance_loss}, bias_update_rate={bias_update_rate}; they must not be negative"
            )
        self.normalize, self.balance_loss, self.bias_update_rate = normalize, balance_loss, bias_update_rate
        for name in ("bias", "load"):
            self.register_buffer(name, torch.zeros(num_experts) if bias_update_rate else None)

    def forward(self, x: Tensor) -> Routing:
        """Chooses k experts for each token of shape [T, D]; raises ``ValueError`` if logits are not finite (CPU)."""
        logits = self.logits(x)
        scores, probabilities = self.scores(logits)
        if self.bias is None:
            weights, experts = scores.topk(self.top_k, dim=-1)
        else:
            experts = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
            weights = scores.gather(-1, experts)
        if self.normalize and self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        load = count(experts, self.num_experts).to(logits.dtype)
        if self.load is not None and self.training and not _in_backward():
            with torch.no_grad():
                self.load += load
        loss = self.losses(logits)
        if self.balance_loss and x.shape[0]:
            share = load / experts.numel()
            loss = loss + self.balance_loss * self.num_experts * (share @ probabilities.mean(0))
        report = Report(loss, load, load.new_zeros(()), entropy_of(probabilities))
        return Routing(experts, None, weights, report)

    @torch.no_grad()
    def update_bias(self, load: Tensor | None = None) -> None:
        """Moves each expert's bias by ``bias_update_rate`` towards an even load, and resets the counts.

        To be called once per step of the optimizer. Without ``bias_update_rate`` this does nothing.

        Args:
            load: Pairs of the step, of shape [E]; those counted on this rank, if None. Over replicas, pass the sum of
                their ``load``, so that all biases stay equal.
        """
        if self.bias is None or self.load is None:
            return
        load = self.load if load is None else load
        self.bias += self.bias_update_rate * (load.mean() - load).sign()
        self.load.zero_()


def _in_backward() -> bool:
    """Returns whether autograd runs a backward in this thread: then a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class ExpertChoiceRouter(_Router):
    """Expert-choice router: each expert chooses C = ceil(T * k / E * capacity_factor) tokens (Zhou et al. 2022).

    The load is even and nothing is dropped; a token may be chosen by any number of experts, or by none. Which tokens an
    expert sees depends on the other tokens of the call, later positions included.

    Attributes:
        weight: [E, D].
        name: Name of this router in errors.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float = 1.0,
        score: Score = "softmax",
        jitter: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        """Creates the router.

        Args:
            dim: D.
            num_experts: E.
            top_k: k, the mean number of experts per token at a factor of 1.
            capacity_factor: Factor of the number of tokens per expert, C.
            score: A softmax over the experts of each token, or a sigmoid.
            jitter: As in ``TopKRouter``.
            z_loss: Coefficient.

        Raises:
            ValueError: An argument is out of its range.
        """
        super().__init__(dim, num_experts, top_k, score=score, jitter=jitter, z_loss=z_loss)
        if capacity_factor <= 0:
            raise ValueError(f"capacity_factor={capacity_factor}; it must be positive")
        self.capacity_factor = capacity_factor

    def forward(self, x: Tensor) -> Routing:
        """Chooses C of the tokens, of shape [T, D], for each expert; raises ``ValueError`` as ``TopKRouter``."""
        logits = self.logits(x)
        scores, probabilities = self.scores(logits)
        num_tokens = x.shape[0]
        slots = min(capacity(num_tokens, self.top_k, self.num_experts, self.capacity_factor), num_tokens)
        weights, tokens = scores.t().topk(slots, dim=-1)
        load = logits.new_full((self.num_experts,), float(slots))
        report = Report(self.losses(logits), load, load.new_zeros(()), entropy_of(probabilities))
        return Routing(None, tokens, weights, report)


def capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Returns the capacity of each expert in rows: ceil(T * k / E * factor), where 10 * 1.1 is 11."""
    return math.ceil(num_tokens * top_k / num_experts * factor - 1e-9)
