"""Spatial parallelism: images, volumes and feature maps are sharded along one dim of space (Dryden et al. 2019)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning_hybrid.spatial.tensor import SpatialMode
from lightning_hybrid.techniques.technique import Active, Technique
from lightning_hybrid.tensor.collectives import GroupRanks, Ranks


class SpatialParallel(Technique):
    """Ranks share each image; all hold all parameters, whose gradients are summed as they are computed."""

    option = "spatial_parallel_size"

    def build(self, run: Any, owner: Any) -> Active:
        """Connect the ranks."""
        if (runner := run.plain_runner) is not None:
            runner.gather_outputs(True)
        return _Spatial(GroupRanks(run.mesh.group("cp")))


class _Spatial(Active):
    """The rows of this rank, while steps run."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def around_step(self) -> AbstractContextManager[Any]:
        """Cut the inputs of convolutions."""
        return SpatialMode(self._ranks)
