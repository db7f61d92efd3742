"""The norm of gradients that are spread over ranks, each parameter counted once."""

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
    """Gradient norms over a mesh.

    Attributes:
        mesh: the ranks.
        owned_parameters: answers the ids of the parameters that this rank counts. One that several ranks hold (shared
            by stages, replicated over "tp") is owned by one of them.
        axes: where other ranks hold other parameters, or other parts of them.
        parts: answers, for a parameter and its gradient, what of the gradient this rank counts; all of it if None.
    """

    mesh: Mesh
    owned_parameters: Callable[[], Set[int]]
    axes: Sequence[str] = ("pp", "cp", "parts")
    parts: Callable[[Tensor, Tensor], list[Tensor]] | None = None

    @property
    def is_local(self) -> bool:
        """Whether this rank holds all there is to count."""
        return all(self.mesh.size(axis) == 1 for axis in self.axes)

    @torch.no_grad()
    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of all ranks' gradients as one vector; collective over the axes.

        Args:
            parameters: the parameters of this rank, others among them. Without a gradient one does not count.

        Returns:
            A scalar of the gradients' dtype, at least float32, equal on all ranks that hold the same dtypes.
        """
        owned = self.owned_parameters()
        held = [(p, _local(p.grad)) for p in parameters if p.grad is not None]
        pairs = [(p, grad) for p, grad in held if id(p) in owned]
        gradients = [part for p, grad in pairs for part in ([grad] if self.parts is None else self.parts(p, grad))]
        dtype = torch.float32
        for _, grad in held:  # also of what another rank counts: those that hold the same find the same number
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
        """Scale gradients down so that their norm over all ranks is at most `max_norm`; collective over the axes.

        The formula is torch's, `max_norm / (norm + 1e-6)` and never above 1; so is what happens to a norm that is not
        finite.

        Returns:
            The norm before.
        """
        parameters = list(parameters)
        norm = self.grad_norm(parameters)
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def _local(gradient: Tensor) -> Tensor:
    """What this rank holds of a gradient, as real numbers."""
    gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
