"""What one batch leaves on the modules and the next one reads, where a microbatch could not pick its samples of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.pipeline.variant import Variant
from lightning_hybrid.step.absent import is_absent
from lightning_hybrid.step.recording import Recording, StepError
from lightning_hybrid.step.transaction import Place, reachable
from lightning_hybrid.step.tree import flatten
from lightning_hybrid.step.watch import user_line


class Carried(TorchFunctionMode):
    """Finds tensors of one batch that the step reads in the next: a microbatch cannot pick its samples of them."""

    def __init__(self, root: nn.Module, without: set[nn.Module], samples: int | None) -> None:
        """Args: root: the user's module. without: modules to pass over. samples: of the microbatch."""
        super().__init__()
        self._root, self._without, self._samples = root, without, samples
        self._left: dict[int, tuple[Place, Tensor]] = {}
        self._read = ""

    @contextlib.contextmanager
    def left_by_first(self) -> Iterator[None]:
        """Note which tensors, made from the batch alone, the step leaves that runs inside."""
        before = set(self._tensors())
        yield
        self._left = {key: found for key, found in self._tensors().items() if key not in before}

    def _tensors(self) -> dict[int, tuple[Place, Tensor]]:
        leaves = reachable(self._root, self._without)
        return {id(leaf): (place, leaf) for place, leaf in leaves if isinstance(leaf, Tensor) and not is_absent(leaf)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is read."""
        if not self._read and getattr(func, "__name__", "") not in ("__get__", "size", "dim"):
            for leaf in flatten((args, kwargs or {}))[0]:
                if isinstance(leaf, Tensor) and id(leaf) in self._left and self._samples in leaf.shape:
                    self._read = f"{user_line()} reads {self._left[id(leaf)][0]} of shape {list(leaf.shape)}"
        return func(*args, **(kwargs or {}))

    def refuse(
        self, kept: str, first: Variant, pairs: Mapping[int, int], whole: Variant, twice: Recording | None
    ) -> None:
        """Refuse a step that reads one.

        Args:
            kept: What it keeps, and where.
            first: Of a microbatch.
            pairs: The values that are alike in the two, by value of the batch.
            whole: Of the batch.
            twice: What the step does in two batches.

        Raises:
            StepError: It does.
        """
        small, large = first.recording.graph, whole.recording.graph
        large_of = {one: other for other, one in pairs.items()}
        for node in twice.graph.nodes[len(small.nodes) :] if twice is not None else ():
            for value in node.inputs:
                known = large_of.get(value, value)
                if value < len(small.values) and small.values[value].shape != large.values[known].shape:
                    self._read = f"{node.line} reads a tensor of shape {list(large.values[known].shape)}"
        if self._read:
            raise StepError(
                f"{kept}, and {self._read} that the batch before left on the module, whose samples a microbatch cannot"
                " pick; set num_microbatches=1"
            )
