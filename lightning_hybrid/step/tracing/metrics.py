"""torchmetrics objects as nodes (*sinks*) of the step graph: updated on the stage of their inputs, synced in the end.

A call of ``forward``, ``update``, ``compute`` or ``reset`` on the outermost Metric or MetricCollection is one node. It
reads and writes the pseudo-parameter ``metric:FQN``, so all of a metric's nodes lie on one stage.

A patch for functional torchmetrics that branch on whether their input is probabilities or logits.

On a CPU they use a Python branch, on other devices ``torch.where``; a step with absent values uses the latter.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torchmetrics import Metric, MetricCollection

from lightning_hybrid.step.objects.pytree import flatten, map_tensors, unflatten
from lightning_hybrid.step.standins.numbers import AbsentArray, source_values
from lightning_hybrid.step.standins.tensors import is_absent, make_absent

if TYPE_CHECKING:
    from lightning_hybrid.step.tracing.mode import CurrentRun


def find_sinks(root: nn.Module) -> dict[str, nn.Module]:
    """The outermost metrics of a module, by FQN."""
    sinks: dict[str, nn.Module] = {}
    for fqn, module in root.named_modules():
        if isinstance(module, Metric | MetricCollection) and not any(fqn.startswith(outer + ".") for outer in sinks):
            sinks[fqn] = module
    return sinks


class MetricDryRun:
    """Calls copies of the metrics on random values during recording: shapes are learnt, no state is written."""

    def __init__(self, sinks: Mapping[str, nn.Module]) -> None:
        self._sinks = sinks
        self._copies: dict[str, nn.Module] = {}

    def run(self, fqn: str, method: str) -> Callable[..., Any]:
        """The function to run in place of the metric's method."""

        def dry_run(*args: Any, **kwargs: Any) -> Any:
            if fqn not in self._copies:
                self._copies[fqn] = isolated_copy(self._sinks[fqn])
            leaves, spec = flatten((args, kwargs))
            real_args, real_kwargs = unflatten([_random_content(leaf) for leaf in leaves], spec)
            try:
                out = getattr(self._copies[fqn], method)(*real_args, **real_kwargs)
            except Exception:  # a metric may refuse random values; its result is then assumed to be one number
                out = torch.zeros(()) if method in ("forward", "compute") else None
            return map_tensors(make_absent, out)

        return dry_run


def isolated_copy(sink: nn.Module) -> nn.Module:
    """A deep copy of a metric that does not synchronize with other processes."""
    # The last result may still have a graph through the model, and such a tensor cannot be deep-copied.
    leaves = [leaf for module in sink.modules() for leaf in flatten(list(vars(module).values()))[0]]
    copies = {id(leaf): leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_leaf}
    copied = copy.deepcopy(sink, copies)
    for metric in copied.modules():
        if isinstance(metric, Metric):
            metric.distributed_available_fn = _never
    return copied


def plain_attributes(metric: Metric) -> list[str]:
    """Names of the plain attributes in which a metric may count beside its states."""
    return [
        name
        for name, value in vars(metric).items()
        if not name.startswith("_") and name not in metric._defaults and all(map(_is_plain, flatten(value)[0]))
    ]


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor or leaf is None or isinstance(leaf, bool | int | float | str)


def _never() -> bool:
    return False


def _random_content(leaf: Any) -> Any:
    """Random content for an absent tensor; it requires grad if the tensor does, for metrics that are losses.

    Also for what was read from one: a number, or an array.
    """
    if isinstance(leaf, AbsentArray):
        return numpy.zeros(leaf.shape, leaf.dtype)
    if source_values(leaf) is not None:
        return 0.0
    if not isinstance(leaf, Tensor):
        return leaf
    if not is_absent(leaf):
        return leaf.detach()
    device = leaf.fake_device if isinstance(leaf, FakeTensor) else leaf.device
    if leaf.is_floating_point():
        random = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(0)).to(device, leaf.dtype)
        return random.requires_grad_(leaf.requires_grad)
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)


_NAME = "normalize_logits_if_needed"


def branchless_normalization(current: CurrentRun) -> Sequence[tuple[Any, str, Any]]:
    """Replacements, as (module, name, function), of the branching function in modules of torchmetrics."""
    original = getattr(sys.modules.get("torchmetrics.utilities.compute"), _NAME, None)
    if original is None:
        return ()
    return [(module, _NAME, _normalize_by_where(current, original)) for module in _importing_modules(len(sys.modules))]


@functools.lru_cache(maxsize=1)
def _importing_modules(count: int) -> list[ModuleType]:
    del count  # cached until another module is loaded
    loaded = [module for name, module in sys.modules.items() if name.startswith("torchmetrics.functional.")]
    return [module for module in loaded if _NAME in vars(module)]


def _normalize_by_where(current: CurrentRun, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def normalize(tensor: Tensor, normalization: str | None) -> Tensor:
        """The probabilities of a tensor of logits or probabilities, of the same shape."""
        watch = current.glue
        if not normalization or watch is None or not watch.is_model_value(tensor):
            return original(tensor, normalization)
        normalized = tensor.sigmoid() if normalization == "sigmoid" else tensor.softmax(1)
        return torch.where(((tensor < 0) | (tensor > 1)).any(), normalized, tensor)

    return normalize
