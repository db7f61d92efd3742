"""LAMB: the update of Adam, scaled for each parameter by the ratio of the norms of the parameter and of the update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.trust_ratio import TrustRatioOptimizer, check_range


class LAMB(TrustRatioOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962, "Large Batch Optimization for Deep Learning", algorithm 2).

    For a parameter x with gradient g::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g g
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay x
        x = x - lr min(|x|, max_norm) / |u| u        with a ratio of 1 where either norm is 0

    Under ZeRO and over tensor ranks the norms are those of full parameters: one all-reduce of two numbers per parameter
    in each step. States take the bytes of two shards.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_norm: float | None = None,
    ) -> None:
        """Make the optimizer.

        Args:
            params: Parameters, or dicts of parameters and options for groups.
            lr: Learning rate.
            betas: Decay rates of the averages of the gradient and of its square.
            eps: Added to the denominator.
            weight_decay: Multiple of the parameter that the update includes, inside of the trust ratio.
            bias_correction: Whether to divide averages by ``1 - beta^t``, as Adam does.
            max_norm: Upper bound of the parameter's norm in the ratio; None for none.

        Raises:
            ValueError: An option is out of its range.
        """
        check_range("lr", lr, 0.0)
        check_range("eps", eps, 0.0)
        check_range("weight_decay", weight_decay, 0.0)
        for number, beta in enumerate(betas):
            check_range(f"betas[{number}]", beta, 0.0, 1.0)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction, "max_norm": max_norm})

    def update_states(self, p: Tensor, group: dict[str, Any]) -> None:
        """Update both averages of a parameter, of its shape, and its count of steps, a scalar."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    def normed(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The parameter, of any shape, and its update, of the same shape."""
        return p, self._update(p, group)

    def step_parameter(self, p: Tensor, group: dict[str, Any], norms: tuple[Tensor, Tensor]) -> None:
        """Step a parameter of any shape by the ratio of its norm to its update's norm, both scalars."""
        weight_norm, update_norm = norms
        bounded = weight_norm if group["max_norm"] is None else weight_norm.clamp(max=group["max_norm"])
        has_ratio = (weight_norm > 0) & (update_norm > 0)
        ratio = torch.where(has_ratio, bounded / update_norm, torch.ones_like(update_norm))
        # The update is computed again: to keep the updates of all parameters would take as many bytes as these.
        p.sub_(self._update(p, group).mul_(ratio * group["lr"]))

    def _update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state, (beta1, beta2) = self.state[p], group["betas"]
        steps = float(state["step"])
        corrections = (1 - beta1**steps, 1 - beta2**steps) if group["bias_correction"] else (1.0, 1.0)
        denominator = state["exp_avg_sq"].div(corrections[1]).sqrt_().add_(group["eps"])
        update = torch.div(state["exp_avg"], denominator, out=denominator).div_(corrections[0])
        return update.add_(p, alpha=group["weight_decay"]) if group["weight_decay"] else update
