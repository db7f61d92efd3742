"""Patches for units and metrics: each call of a unit's forward, or of a metric's method, is one event of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_hybrid.graph.step_graph import SINK
from lightning_hybrid.patching import replace, replaced_forwards
from lightning_hybrid.step.tracing.collect_side_outputs_of_modules import emit_side_outputs, with_side_outputs
from lightning_hybrid.step.tracing.full_backward_hooks_of_units import backward_hooks_inside
from lightning_hybrid.step.tracing.intercept_step_operations import CurrentRun
from lightning_hybrid.step.tracing.user_compiled_modules import compiled_forward

_METRIC_METHODS = ("forward", "update", "compute", "reset")


@contextlib.contextmanager
def intercepted_units(
    current: CurrentRun, units: Mapping[str, nn.Module], owned: Mapping[str, tuple[str, ...]]
) -> Iterator[None]:
    """Make each call of these units one event of the current run, outside its forward and inside its hooks."""
    with backward_hooks_inside(units) as hooked:

        def wrap(fqn: str, original: Callable[..., Any]) -> Callable[..., Any]:
            name, members = "@" + fqn, owned[fqn]
            unit_forward = hooked.get(fqn, compiled_forward(units[fqn], original))
            run = with_side_outputs(unit_forward)

            def forward(*args: Any, **kwargs: Any) -> Any:
                watch = current.watch
                if watch is None or watch.inside_unit or fqn not in watch.units:
                    return unit_forward(*args, **kwargs)
                return emit_side_outputs(watch.call(name, members, run, args, kwargs))

            return forward

        with replaced_forwards(units, wrap, reason="units are nodes of a step"):
            yield


@contextlib.contextmanager
def intercepted_metrics(current: CurrentRun, sinks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Make each call of these metrics one event of the current run."""

    def intercepted(fqn: str, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        state = SINK + fqn  # the pseudo-parameter that represents the metric's state

        def call(*args: Any, **kwargs: Any) -> Any:
            watch = current.watch
            if watch is None or watch.inside_unit:
                return original(*args, **kwargs)
            return watch.call(f"{state}.{method}", (state,), watch.sink_method(fqn, method, original), args, kwargs)

        return call

    with contextlib.ExitStack() as undo:
        for fqn, sink in sinks.items():
            for method in _METRIC_METHODS:
                function = intercepted(fqn, method, getattr(sink, method))
                undo.callback(replace(sink, method, function, reason="metrics are nodes of a step"))
        yield
