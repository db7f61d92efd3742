"""Grouped experts: MLPs of one shape with stacked weights, each applied to its own rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.moe.grouped_mlp_operators import ACTIVATIONS, grouped_mlp


class GroupedExperts(nn.Module):
    """E MLPs, ``down(activation(up(x)))``; gated (SwiGLU: Shazeer 2020) ``down(activation(u) * v)`` with u, v = up(x).

    Attributes:
        up: [E, H, D]; gated [E, 2H, D]: first u, then v. Each expert's slice is a weight of ``nn.Linear``.
        down: [E, D, H].
        up_bias: [E, H or 2H], or None.
        down_bias: [E, D], or None.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        """Creates the experts.

        Args:
            num_experts: E.
            dim: D, features of rows and results.
            hidden_dim: H, features between the two products of an expert.
            gated: Multiply the activation by a second product.
            activation: "silu", "gelu", "gelu_tanh" or "relu".
            bias: Add a bias to both products.

        Raises:
            ValueError: A size is not positive, or the activation unknown.
        """
        super().__init__()
        sizes = {"num_experts": num_experts, "dim": dim, "hidden_dim": hidden_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size}; it must be at least 1")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}; use one of {', '.join(map(repr, ACTIVATIONS))}")
        self.num_experts, self.dim, self.hidden_dim = num_experts, dim, hidden_dim
        self.gated, self.activation = gated, activation
        between = (2 if gated else 1) * hidden_dim
        self.up = nn.Parameter(torch.empty(num_experts, between, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, between)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes weights as ``nn.Linear`` does."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Applies each expert to its rows.

        Args:
            rows: Of shape [P, D], sorted by expert.
            counts: Integers of shape [E]: rows of each expert, P in all.

        Returns:
            The results, of shape [P, D], in the dtype of autocast if that is on.

        Raises:
            ValueError: The counts do not sum to P.
        """
        inputs: list[Any] = [rows, self.up, self.up_bias, self.down, self.down_bias]
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
            inputs = [None if tensor is None else tensor.to(dtype) for tensor in inputs]
        rows, up, up_bias, down, down_bias = inputs
        return grouped_mlp(rows, counts, up, up_bias, down, down_bias, activation=self.activation, gated=self.gated)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(module)``."""
        return (
            f"num_experts={self.num_experts}, dim={self.dim}, hidden_dim={self.hidden_dim}, gated={self.gated},"
            f" activation={self.activation!r}, bias={self.up_bias is not None}"
        )
