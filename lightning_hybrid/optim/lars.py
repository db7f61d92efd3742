"""LARS: SGD with momentum, whose rate for each parameter is a ratio of the norms of the parameter and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.optim.trust_ratio import TrustRatioOptimizer, check_range


class LARS(TrustRatioOptimizer):
    """LARS (You et al. 2017, arXiv:1708.03888, "Large Batch Training of Convolutional Networks", algorithm 1).

    For a parameter x of two or more dims with gradient g::

        r = trust_coefficient |x| / (|g| + weight_decay |x|)        1 where |x| or the denominator is 0
        m = momentum m + (1 - dampening) r (g + weight_decay x)
        x = x - lr m

    Parameters of one dim (biases, scales of norms) are stepped with r = 1 and without weight decay.

    Under ZeRO and over tensor ranks the norms are those of full parameters: one all-reduce of two numbers per parameter
    in each step. States take the bytes of one shard; none without momentum.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 1e-3,
        dampening: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        """Make the optimizer.

        Args:
            params: Parameters, or dicts of parameters and options for groups.
            lr: Learning rate.
            momentum: Decay rate of the sum of past updates; 0 for no state.
            weight_decay: Multiple of the parameter that is added to its gradient.
            trust_coefficient: Factor of the ratio of norms.
            dampening: Reduces what a new update adds to the momentum.
            nesterov: Whether to step by the update plus ``momentum`` times the momentum.

        Raises:
            ValueError: An option is out of its range.
        """
        check_range("lr", lr, 0.0)
        check_range("momentum", momentum, 0.0, 1.0)
        check_range("weight_decay", weight_decay, 0.0)
        check_range("trust_coefficient", trust_coefficient, 0.0)
        check_range("dampening", dampening, 0.0, 1.0)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        more = {"trust_coefficient": trust_coefficient, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, {**defaults, **more})

    def update_states(self, p: Tensor, group: dict[str, Any]) -> None:
        """Do nothing for a parameter of any shape: the momentum depends on the ratio, which is not known yet."""

    def normed(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The parameter, of any shape, and its gradient, of the same shape."""
        assert p.grad is not None
        return p, p.grad

    def step_parameter(self, p: Tensor, group: dict[str, Any], norms: tuple[Tensor, Tensor]) -> None:
        """Step a parameter of any shape by the ratio of its norm to its gradient's norm, both scalars."""
        assert p.grad is not None
        update = p.grad.clone()
        if p.dim() > 1:
            weight_norm, gradient_norm = norms
            denominator = gradient_norm + group["weight_decay"] * weight_norm
            has_ratio = (weight_norm > 0) & (denominator > 0)
            ratio = torch.where(has_ratio, group["trust_coefficient"] * weight_norm / denominator, 1.0)
            update.add_(p, alpha=group["weight_decay"]).mul_(ratio)
        if group["momentum"]:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=1 - group["dampening"])
            update = update.add_(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        p.sub_(update * group["lr"])
