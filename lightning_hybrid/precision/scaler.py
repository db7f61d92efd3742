"""`GradScaler` for ranks with different parameters: all of them step, or none, and their scales stay equal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from lightning_hybrid.errors import PrecisionError
from lightning_hybrid.mesh import Mesh

# The scalers of Lightning and of users. A user's subclass may override anything, so it cannot be converted.
_PLAIN_SCALERS = (GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)


class MeshGradScaler(GradScaler):
    """Gradient scaler that checks the gradients of all ranks for infinities.

    An optimizer without any gradient on this rank (its stage is frozen) is stepped or skipped with the others, where
    torch's scaler would raise an error; without a mesh this is the only difference. It takes the arguments of
    `torch.amp.GradScaler`, "cpu" included.

    Attributes:
        mesh: mesh whose ranks step together; None for one process. With a mesh `unscale_` and `step` are collective.
        around_unscaling: returns a context that is entered around the unscaling of gradients, which writes to shards
            where code of the user would read full gradients.
    """

    mesh: Mesh | None = None
    around_unscaling: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    @classmethod
    def of(cls, scaler: GradScaler) -> MeshGradScaler:
        """Converts a plain scaler with its settings and state; one of this class is returned unchanged.

        Raises:
            TypeError: the scaler is of a subclass, whose behaviour would be lost.
        """
        if isinstance(scaler, cls):
            return scaler
        if type(scaler) not in _PLAIN_SCALERS:
            raise TypeError(
                f"the scaler is a {type(scaler).__qualname__}, which may override methods that the ranks must call"
                f" together; pass a torch.amp.GradScaler or subclass {cls.__qualname__}"
            )
        if not scaler.is_enabled():
            return cls(scaler._device, enabled=False)
        made = cls(scaler._device)
        made.load_state_dict(scaler.state_dict())
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of torch's scaler, without process groups."""
        return {**super().__getstate__(), "mesh": None, "around_unscaling": nullcontext}

    def check_device(self, device: str) -> None:
        """Checks that a type of device, "cpu" or "cuda", is not trained without the scale that the user has set.

        Raises:
            PrecisionError: torch has disabled the scaler, since it finds no GPU.
        """
        if device == "cpu" and self._device == "cuda" and not self.is_enabled():
            raise PrecisionError(
                "precision='16-mixed' with a GradScaler('cuda') needs a GPU: on a CPU it scales no loss, and small"
                " gradients become 0; set precision='bf16-mixed' on CPUs, or pass torch.amp.GradScaler('cpu')",
                entry="precision-scaler",
            )

    def use_device(self, device: str) -> None:
        """Sets the device type of the gradients, "cpu" or "cuda"."""
        self._device = device

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Private to torch, but the one place that its unscale_ and its fused optimizers pass (FSDP's ShardedGradScaler
        # overrides it too). `found_inf` itself is among the results if a gradient is on its device.
        with self.around_unscaling():
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for other in found.values():
            if other is not found_inf:
                found_inf.copy_(torch.maximum(found_inf, other.to(found_inf.device)))
        if self.mesh is not None:
            self.mesh.all_reduce(found_inf, "world", "max")
        # One result instead of one per device; step() would refuse an empty dict.
        return {found_inf.device: found_inf}
