"""The calls of the units that a step makes, with their arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.modules import copied
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, unflatten
from lightning_hybrid.step.recording.layers import without_deduplication
from lightning_hybrid.step.standins.tensors import SHAPE_PROPERTIES
from lightning_hybrid.step.tracing.mode import VIEW_PROPERTIES

_PLAIN = (bool, int, float, str, type(None))
# Properties of a parameter that differ where a rank has a shard of it; its dtype, for example, does not.
_SHAPE_OR_VIEW_PROPERTIES = VIEW_PROPERTIES | SHAPE_PROPERTIES


@dataclass
class UnitCalls:
    """The calls of the tensor units in a recorded step, and reads of their parameters outside of them.

    Attributes:
        arguments: Positional and keyword arguments of one call of each unit that is called.
        read_outside: For each unit, FQNs inside it of parameters that code outside of it reads.
        running: FQNs of the units that are running.
    """

    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    read_outside: dict[str, set[str]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)


@contextlib.contextmanager
def record_calls(units: Mapping[str, nn.Module], pipeline_units: Mapping[str, nn.Module]) -> Iterator[UnitCalls]:
    """Records the calls of units while a step is recorded in this context.

    Args:
        units: The tensor units.
        pipeline_units: Modules that the recording runs as one operation; reads inside of them are recorded here.
    """
    calls = UnitCalls()
    running = calls.running

    def wrap(fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.arguments[fqn] = _copied_call(args, kwargs)
            running.append(fqn)
            try:
                return forward(*args, **kwargs)
            finally:
                running.pop()

        return recorded

    def wrap_pipeline_unit(fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            owners = {
                id(parameter): (inner, name)
                for inner, unit in units.items()
                if inner == fqn or inner.startswith(fqn + ".")
                for name, parameter in unit.named_parameters()
            }
            with _OutsideReads(owners, running, calls):
                return forward(*args, **kwargs)

        return recorded

    with (
        without_deduplication(units),
        replaced_forwards(units, wrap, reason="records calls of units"),
        replaced_forwards(pipeline_units, wrap_pipeline_unit, reason="records calls of units"),
    ):
        yield calls


class _OutsideReads(TorchFunctionMode):
    """A function mode that records parameters which are read while their unit does not run."""

    def __init__(self, owners: Mapping[int, tuple[str, str]], running: list[str], calls: UnitCalls) -> None:
        super().__init__()
        self._owners, self._running, self._calls = owners, running, calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_property = getattr(func, "__name__", "") == "__get__"
        if not is_property or func.__self__.__name__ in _SHAPE_OR_VIEW_PROPERTIES:
            for leaf in flatten_call(args, kwargs)[0]:
                if id(leaf) in self._owners:
                    unit, name = self._owners[id(leaf)]
                    if unit not in self._running:
                        self._calls.read_outside.setdefault(unit, set()).add(name)
        return func(*args, **kwargs)


def _copied_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies the arguments as they are now: a unit may change the objects that it receives."""
    leaves, spec = flatten((args, kwargs))
    copies = [leaf if isinstance(leaf, (Tensor, *_PLAIN)) else copied(leaf) for leaf in leaves]
    return unflatten(copies, spec)
