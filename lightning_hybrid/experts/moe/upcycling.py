"""Sparse upcycling: experts initialized as copies of a dense MLP (Komatsuzaki et al. 2022, section 3).

The router's weights sum to 1 and the experts are equal, so the first output is the dense one, up to rounding. Experts
diverge because each is trained on the positions that the router sends to it.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid.experts.moe.dense import DenseMLP, NotAnMLP, experts_of, recognise
from lightning_hybrid.experts.moe.layer import MoE
from lightning_hybrid.experts.moe.routers import Routing, TopKRouter
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.asides import give_aside


class AuxiliaryLoss(NamedTuple):
    """Side output of a layer: a loss that is added to the loss of the step."""

    value: Tensor


class NormalizedTopKRouter(TopKRouter):
    """Top-k router whose weights sum to 1 for k=1 too: there they are 1, and have the gradient of log p."""

    def forward(self, x: Tensor) -> Routing:
        """Chooses k experts for each token of shape [T, D]; raises ``ValueError`` as ``TopKRouter.forward``."""
        routing = super().forward(x)
        if self.top_k > 1:
            return routing
        return routing._replace(weights=routing.weights / routing.weights.detach())


class UpcycledMLP(nn.Module):
    """Replaces a dense MLP, with the same input and output.

    In training it emits its auxiliary losses as side outputs (`step.tracing.collect_side_outputs_of_modules`).

    Attributes:
        moe: The experts and their router.
        num_experts: Number of experts.
        is_grouped: Whether the experts are grouped, or a list of copies of the user's module.
    """

    def __init__(self, moe: MoE, dense: DenseMLP, dense_names: tuple[str, ...], *, emits_loss: bool) -> None:
        """Take ``moe`` with its weights, ``dense`` (structure of the replaced MLP), and the names of its parameters."""
        super().__init__()
        self.moe = moe
        self.num_experts = moe.experts.num_experts
        self.is_grouped = bool(dense.matrices)
        self.dropout = nn.Dropout(dense.dropout)
        self._dense_names = dense_names
        self._emits_loss = emits_loss

    def forward(self, x: Tensor) -> Tensor:
        """Applies the experts to shape [..., dim]; the result has the same."""
        y, report = self.moe(x)
        if self.training and self._emits_loss:
            give_aside(AuxiliaryLoss(report.loss))
        out: Tensor = self.dropout(y)
        return out

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads the state; raises ``ValueError`` for the state of the dense module."""
        dense = [prefix + name for name in self._dense_names if prefix + name in state_dict]
        if dense and not any(name.startswith(f"{prefix}moe.") for name in state_dict):
            raise ValueError(
                f"{prefix[:-1]} is dense in the checkpoint, which has {dense[0]}, and has experts here; a run cannot"
                " be resumed with other parameters than it had. Load the dense weights into the module before fit and"
                " leave ckpt_path out, and the experts start as copies of them; or pass MoEUpcycle the layers of that"
                " run"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


class ListedExperts(nn.Module):
    """Experts of any class, each called with its rows; has the interface of `GroupedExperts`."""

    counts_on_host = True

    def __init__(self, experts: list[nn.Module], *, takes_rows: bool) -> None:
        """Take ``experts`` (the modules), ``takes_rows`` (whether they take [rows, dim], or need [1, rows, dim])."""
        super().__init__()
        self.num_experts = len(experts)
        self.experts = nn.ModuleList(experts)
        self._takes_rows = takes_rows

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Runs experts on rows of shape [P, dim], sorted by expert, with counts [E]; the result has the rows' shape."""
        outputs = []
        # Experts without rows run too: all their parameters get gradients, as in a grouped layer.
        for expert, inputs in zip(self.experts, rows.split(counts.tolist()), strict=True):
            outputs.append(expert(inputs) if self._takes_rows else expert(inputs[None])[0])
        return torch.cat(outputs)


def upcycle_mlp(
    fqn: str,
    module: nn.Module,
    *,
    num_experts: int,
    top_k: int,
    capacity_factor: float | None,
    balance_loss: float,
    z_loss: float,
    jitter: float,
    noise: float,
    router_std: float,
) -> UpcycledMLP:
    """Creates a mixture of experts from a dense MLP, which has weights and is not changed; options as `MoEUpcycle`.

    Raises:
        ValueError: The module cannot be an expert, or has no weights yet.
    """
    if any(parameter.is_meta or is_absent(parameter) for parameter in module.parameters()):
        raise ValueError(
            f"{fqn} has no weights to initialize experts with, since the module was built empty; build it without"
            " empty_init, or load its weights before fit"
        )
    try:
        dense = recognise(module)
    except NotAnMLP as error:
        raise ValueError(
            f"{fqn} ({type(module).__name__}) cannot become experts: it {error}; name modules that take one tensor"
            " [..., dim] and return one of its shape, and process each position independently"
        ) from error
    copies = [copy.deepcopy(module) for _ in range(num_experts)]
    if noise:
        _add_noise(copies, noise)
    like = next(module.parameters())
    width = dense.matrices[-1].weight_of(module).shape[1] if dense.matrices else 1
    moe = MoE(dense.dim, width, num_experts=num_experts, capacity_factor=capacity_factor)
    moe.router = NormalizedTopKRouter(
        dense.dim, num_experts, top_k, balance_loss=balance_loss, z_loss=z_loss, jitter=jitter
    )
    moe = moe.to(like.device, like.dtype)
    nn.init.normal_(moe.router.weight, 0.0, router_std)
    moe.name = fqn
    experts = experts_of(dense, copies) if dense.matrices else ListedExperts(copies, takes_rows=dense.takes_rows)
    moe.experts = experts  # type: ignore[assignment]
    names = tuple(name for name, _ in module.named_parameters())
    made = UpcycledMLP(moe, dense, names, emits_loss=balance_loss > 0 or z_loss > 0)
    return made.train(module.training)


@torch.no_grad()
def _add_noise(copies: list[nn.Module], noise: float) -> None:
    for module in copies:
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
