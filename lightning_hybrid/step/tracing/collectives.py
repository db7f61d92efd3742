"""Patches for collectives of user code: each ``torch.distributed`` call on values of the model is one event of a step.

A recording replaces them by a dry run, since other replicas need not record at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.mode import CurrentRun

# The output argument of each collective: its position and its name.
_OUTPUT_ARGUMENTS = {
    "all_reduce": (0, "tensor"),
    "reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "all_gather_single": (0, "output"),
    "reduce_scatter": (0, "output"),
    "reduce_scatter_tensor": (0, "output"),
    "reduce_scatter_single": (0, "output"),
    "all_to_all": (0, "output_tensor_list"),
    "all_to_all_single": (0, "output"),
    "gather": (1, "gather_list"),
    "scatter": (0, "tensor"),
}
COLLECTIVE = "collective:"


class CompletedWork:
    """The work handle that an asynchronous collective returns where it does not run."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True


def collective_patches(current: CurrentRun) -> Sequence[tuple[Any, str, Any]]:
    """Replacements, as (module, name, function), that make each collective one event of the current run."""
    originals = [(name, getattr(dist, name, None)) for name in _OUTPUT_ARGUMENTS]
    return [(dist, name, _intercepted_collective(current, name, run)) for name, run in originals if run is not None]


def _intercepted_collective(current: CurrentRun, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        watch = current.watch
        if watch is None:
            return original(*args, **kwargs)
        run = _dry_run(name) if watch.is_recording else original
        if watch.inside_unit:
            return run(*args, **kwargs)
        return watch.call(COLLECTIVE + name, (), run, args, kwargs)

    return collective


def collective_outputs(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """The output tensors, of any shapes, of a call of a collective of ``torch.distributed``."""
    position, keyword = _OUTPUT_ARGUMENTS[name.removeprefix(COLLECTIVE)]
    output = args[position] if len(args) > position else kwargs.get(keyword)
    return [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]


def _dry_run(name: str) -> Callable[..., Any]:
    def dry_run(*args: Any, **kwargs: Any) -> Any:
        written = collective_outputs(name, args, kwargs)
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        source = next((leaf for leaf in tensors if not any(leaf is tensor for tensor in written)), None)
        with torch.no_grad():
            for tensor in written:
                # The result of a group of one rank: the step may read what it gathered from the batch.
                if source is None or is_absent(source) or is_absent(tensor) or tensor.numel() % max(source.numel(), 1):
                    tensor.mul_(1)
                elif source.numel():
                    tensor.copy_(source.reshape(-1).repeat(tensor.numel() // source.numel()).view(tensor.shape))
        return CompletedWork() if kwargs.get("async_op") else None

    return dry_run
