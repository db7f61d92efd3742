"""Spatial parallelism: images, volumes and feature maps are sharded along one dim of space (Dryden et al. 2019)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.pipeline.stages.plan import TraceVariant
from lightning_hybrid.spatial.tensor import Convolutions, SpatialMode
from lightning_hybrid.techniques.technique import Active, Technique
from lightning_hybrid.tensor.collectives import GroupRanks, Ranks


class SpatialParallel(Technique):
    """Ranks share each image; all hold all parameters, whose gradients are summed as they are computed."""

    option = "spatial_parallel_size"
    records = True

    def __init__(self, size: int) -> None:
        """Take the number of ranks."""
        self._size = size
        self._found = Convolutions()

    @contextlib.contextmanager
    def watching(self, variant: TraceVariant) -> Iterator[None]:
        """Observe the inputs of convolutions while the step is recorded inside."""
        with self._found:
            yield

    def place(self, run: Any, earlier: Sequence[AxisSharding]) -> Sequence[AxisSharding]:
        """Check that something is sharded; ranks have all parameters in common.

        Raises:
            LayoutError: No convolution reads as many rows as there are ranks.
        """
        most = max(self._found.rows, default=0)
        if most < self._size:
            what = f"the largest image has {most} rows" if most else "the step calls no convolution of 2 or 3 dims"
            raise LayoutError(
                f"spatial_parallel_size={self._size} shards the rows of images over {self._size} ranks, and {what}; set"
                f" spatial_parallel_size={max(1, most)}" + (" or less" if most > 1 else ""),
                entry="spatial-size",
            )
        return [AxisSharding(run.mesh.group("cp"), {}, axis="cp", places=run.mesh.places("cp"))]

    def build(self, run: Any, owner: Any) -> Active:
        """Connect the ranks."""
        if (runner := run.plain_runner) is not None:
            runner.gather_outputs(True)
        return _Spatial(GroupRanks(run.mesh.group("cp")))

    def lines(self, run: Any) -> list[str]:
        """Return which convolutions share images."""
        sharded = sorted(rows for rows in self._found.rows if rows >= self._size)
        small = len(self._found.rows) - len(sharded)
        line = f"images over {self._size} ranks: {len(sharded)} convolutions, of {sharded[0]} to {sharded[-1]} rows"
        return [line + (f"; {small} of fewer rows run on every rank" if small else "")]


class _Spatial(Active):
    """The rows of this rank, while steps run."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def around_step(self) -> AbstractContextManager[Any]:
        """Cut the inputs of convolutions."""
        return SpatialMode(self._ranks)
