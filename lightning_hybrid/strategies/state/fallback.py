"""The fallback of a layout to ZeRO-3: ranks that cannot hold stages or cut layers hold shards, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hybrid.errors import WITHOUT_STAGES, LayoutError
from lightning_hybrid.mesh import Mesh

_SIZES = {"pp": "pipeline_parallel_size", "cp": "context_parallel_size", "tp": "tensor_parallel_size"}
# The last alternative of a message: to have no stages. These ranks hold shards already.
_NO_STAGES = re.compile(rf"(?:[;,]? or|;|\. To [^.,]+,) {re.escape(WITHOUT_STAGES)}")


class Fallback:
    """The reason, equal on all ranks, why those along some axes hold ZeRO-3 shards and run the step unpartitioned.

    Attributes:
        mesh: The ranks, with shards over these axes.
        reason: Why; a type of error, and its message.
    """

    def __init__(self, module: pl.LightningModule, mesh: Mesh, axes: Sequence[str], reason: str, *, strict: bool):
        self._module, self._strict, self.reason = module, strict, _NO_STAGES.sub("", reason)
        sizes = {axis: mesh.size(axis) for axis in axes if mesh.size(axis) > 1}
        self._sizes = ", ".join(f"{_SIZES[axis]}={size}" for axis, size in sizes.items())
        self._place = "pipelined" if list(axes) == ["pp"] else "cut"
        self.mesh = mesh.with_shards_over(list(sizes))

    @property
    def refusal(self) -> str:
        """The sizes that the step cannot be run under, and the reason."""
        return f"the step cannot be run under {self._sizes}: {self.reason}"

    @property
    def line(self) -> str:
        """The line of the start table."""
        return f"sharded instead of {self._place}: {self.reason}"

    def announce(self, error: Exception | None = None, *, reason: str = "") -> None:
        """Warn that ranks hold shards, and why (``reason`` replaces the first), now that no batch can change that.

        Raises:
            LayoutError: The user wants the layout or nothing.
        """
        self.reason = _NO_STAGES.sub("", reason) or self.reason
        if self._strict:
            name = f"{type(self._module).__name__}.training_step"
            raise LayoutError(
                f"strict_layout=True, and {name} cannot be run under {self._sizes}: {self.reason}; set"
                f" strict_layout=False to have these {self.mesh.size('shares')} ranks hold shards of every parameter,"
                " gradient and optimizer state instead",
                entry="strict-layout",
            ) from error
        if not self._module.automatic_optimization:
            # Its optimizers take as many steps as it likes, so that shares would not give the numbers of one process.
            batch = "on the full batch, which divides memory but not time; replicas with zero_stage=3 divide both"
        else:
            batch = "on its share of the batch"
        rank_zero_warn(
            f"{self.line}. So each of the {self.mesh.size('shares')} ranks of {self._sizes} holds a shard of every"
            f" parameter, gradient and optimizer state, and runs the step {batch}. Set strict_layout=True to make this"
            " an error (docs/howto/step_not_partitioned.md)"
        )
