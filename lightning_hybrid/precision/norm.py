"""Gradient norm over a mesh: gradients are distributed over ranks, and each parameter counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from lightning_hybrid.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class MeshNorm:
    """Computes gradient norms over a mesh, and clips by them."""

    mesh: Mesh  # the ranks
    # returns the ids of the parameters that this rank counts. One that several ranks have (tied over stages,
    # replicated over "tp") is owned by one of them
    owned_parameters: Callable[[], Set[int]]
    # mesh axes along which ranks have other parameters, or other shards of them
    axes: Sequence[str] = ("pp", "cp", "parts")
    # returns, for a parameter and its gradient, the slices that this rank counts; the full gradient if None
    parts: Callable[[Tensor, Tensor], list[Tensor]] | None = None

    @property
    def is_local(self) -> bool:
        """Whether this rank has all gradients, so that no communication is needed."""
        return all(self.mesh.size(axis) == 1 for axis in self.axes)

    @torch.no_grad()
    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Computes the 2-norm of all ranks' gradients as one vector; collective over the axes.

        Parameters that this rank does not own, or without a gradient, do not count.

        Returns:
            A scalar of the gradients' dtype, at least float32, equal on all ranks that hold the same dtypes.
        """
        owned = self.owned_parameters()
        local = [(p, _local(p.grad)) for p in parameters if p.grad is not None]
        pairs = [(p, grad) for p, grad in local if id(p) in owned]
        gradients = [x for p, grad in pairs for x in ([grad] if self.parts is None else self.parts(p, grad))]
        dtype = torch.float32
        for _, grad in local:  # also those that another rank counts: ranks with the same parameters agree on the dtype
            dtype = torch.promote_types(dtype, grad.dtype)
        # The message has one dtype on all ranks; a rank whose stage is frozen cannot know theirs.
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device_mesh.device_type)
        if gradients:
            norms = torch._foreach_norm(gradients, 2.0, dtype=dtype)
            total = total + torch.stack([norm.to(total.device) for norm in norms]).double().square().sum()
        for axis in self.axes:
            self.mesh.all_reduce(total, axis)
        return total.sqrt().to(dtype)

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scales gradients so that their norm over all ranks is at most `max_norm`; collective over the axes.

        The factor is torch's, `max_norm / (norm + 1e-6)` and never above 1; a norm that is not finite is treated as in
        torch.

        Returns:
            The norm before clipping, a scalar.
        """
        parameters = list(parameters)
        norm = self.grad_norm(parameters)
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def _local(gradient: Tensor) -> Tensor:
    """Returns the local shard of a gradient, as real numbers."""
    gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
