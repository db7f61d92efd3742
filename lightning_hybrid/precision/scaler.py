"""A `GradScaler` for ranks that hold different parameters: all of them step, or none, and their scales stay equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from lightning_hybrid.mesh import Mesh

# What Lightning and users make. A subclass of theirs may override anything, so that it cannot be replaced.
_PLAIN_SCALERS = (GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)


class MeshGradScaler(GradScaler):
    """torch's scaler whose search for infinite gradients covers the whole world.

    An optimizer without any gradient on this rank (its stage is frozen) is stepped or skipped with the others, where
    torch's scaler would stop. With no mesh connected it only has this difference. It takes the arguments of
    `torch.amp.GradScaler`, "cpu" included.

    Attributes:
        mesh: whose world must agree; None for one process. Then `unscale_` and `step` are collective.
    """

    mesh: Mesh | None = None

    @classmethod
    def of(cls, scaler: GradScaler) -> MeshGradScaler:
        """A scaler with the settings and the state of a plain one; one of this class is returned as it is.

        Raises:
            TypeError: the scaler is of a subclass, whose behaviour would be lost.
        """
        if isinstance(scaler, cls):
            return scaler
        if type(scaler) not in _PLAIN_SCALERS:
            raise TypeError(
                f"the scaler is a {type(scaler).__qualname__}, which may override what the ranks must do together; "
                f"pass a torch.amp.GradScaler or subclass {cls.__qualname__}"
            )
        if not scaler.is_enabled():
            return cls(scaler._device, enabled=False)
        made = cls(scaler._device)
        made.load_state_dict(scaler.state_dict())
        return made

    def __getstate__(self) -> dict[str, Any]:
        """As torch's; process groups stay here."""
        return {**super().__getstate__(), "mesh": None}

    def use_device(self, device: str) -> None:
        """Say where the gradients will be, once that is known: "cpu" or "cuda"."""
        self._device = device

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Private to torch, but the one place that its unscale_ and its fused optimizers pass (FSDP's ShardedGradScaler
        # overrides it too). `found_inf` itself is among the answers if a gradient lives on its device.
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for other in found.values():
            if other is not found_inf:
                found_inf.copy_(torch.maximum(found_inf, other.to(found_inf.device)))
        if self.mesh is not None:
            self.mesh.all_reduce(found_inf, "world", "max")
        # One answer instead of one per device; an empty dict would be refused by step().
        return {found_inf.device: found_inf}
