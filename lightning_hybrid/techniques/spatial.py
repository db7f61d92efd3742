"""Spatial parallelism: images, volumes and feature maps are sharded along one dim of space (Dryden et al. 2019)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.pipeline.stages.plan import TraceVariant
from lightning_hybrid.spatial.tensor import Convolution, Convolutions, SpatialMode
from lightning_hybrid.techniques.technique import Active, Messages, Technique
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
        most = max((each.rows for each in self._found.found), default=0)
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

    @property
    def _sharded(self) -> list[Convolution]:
        return [each for each in self._found.found if each.rows >= self._size]

    def activation_share(self, run: Any) -> float:
        """Return the share of the inputs of convolutions on the rank with most rows."""
        sharded = sum(-(-each.rows // self._size) * each.row_bytes for each in self._sharded)
        full = sum(each.rows * each.row_bytes for each in self._found.found)
        return (sharded + full - sum(each.rows * each.row_bytes for each in self._sharded)) / max(1, full)

    def messages(self, run: Any, num_microbatches: int) -> Iterable[Messages]:
        """Return the rows at borders, with their gradients, and the sums of gradients of kernels."""
        neighbours = min(2, self._size - 1)
        borders = [each.border * each.row_bytes for each in self._sharded if each.border]
        count, nbytes = 2 * neighbours * len(borders), neighbours * sum(borders)
        yield Messages("context", "rows at borders", "send", 2, count * num_microbatches, nbytes * num_microbatches)
        count, nbytes = len(self._sharded), sum(each.weight_bytes for each in self._sharded)
        name, amounts = "gradients of kernels", (count * num_microbatches, nbytes * num_microbatches)
        yield Messages("context", name, "all_reduce", self._size, *amounts)

    def lines(self, run: Any) -> list[str]:
        """Return which convolutions share images."""
        sharded = sorted(each.rows for each in self._sharded)
        small = len(self._found.found) - len(sharded)
        line = f"images over {self._size} ranks: {len(sharded)} convolutions, of {sharded[0]} to {sharded[-1]} rows"
        return [line + (f"; {small} of fewer rows run on every rank" if small else "")]


class _Spatial(Active):
    """The rows of this rank, while steps run."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def around_step(self) -> AbstractContextManager[Any]:
        """Cut the inputs of convolutions."""
        return SpatialMode(self._ranks)
