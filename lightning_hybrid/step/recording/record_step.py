"""Record a step: run the user's own code once with every parameter absent, and note what it does.

The recording writes nothing (``module_state.snapshot``), needs no parameter's content, and may therefore be repeated at
any time, also while most parameters live on other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.instrument.autograd_functions import unseen_functions_refused
from lightning_hybrid.step.instrument.instrument import asking
from lightning_hybrid.step.module_state.snapshot import ModuleState, reachable
from lightning_hybrid.step.objects.pytree import ClassOpened
from lightning_hybrid.step.recording.choose_units import buffers_of, owned_members
from lightning_hybrid.step.recording.escaped_values import refuse_number_in_buffer
from lightning_hybrid.step.recording.guards import Looks, modules_around
from lightning_hybrid.step.recording.inner_derivatives import GraphWanted
from lightning_hybrid.step.recording.kept_values import find_appended
from lightning_hybrid.step.recording.recorder import RecordWatch
from lightning_hybrid.step.standins.absent_tensors import absent_members, owned_by
from lightning_hybrid.step.standins.cost_counter import CostWatch
from lightning_hybrid.step.standins.fake_kernel_fallback import (
    quiet_fakes,
)
from lightning_hybrid.step.tracing.bound_apply import bound_functions
from lightning_hybrid.step.tracing.metric_nodes import SinkRehearsal, find_sinks
from lightning_hybrid.step.tracing.recording import Recording
from lightning_hybrid.step.tracing.step_mode import Current


def record(
    root: nn.Module,
    step: Callable[[], Any],
    units: Mapping[str, nn.Module],
    *,
    name: str,
    randomness: KeyedRandomness,
    loss_required: bool = False,
    tracked_buffers: Iterable[str] = (),
    whole_graph: bool = False,
    looks: Looks | None = None,
    draws_as: tuple[int, int] = (0, 0),
    guesses: Sequence[bool] = (),
) -> Recording:
    """Record one run of ``step``.

    Args:
        root: The user's LightningModule.
        step: Runs the step on one microbatch, in the contexts (autocast, grad mode) of training.
        units: Modules that are one node each, by FQN.
        name: Name of the step, for messages.
        randomness: Its generators are left as they were.
        loss_required: Whether the step must return a loss.
        tracked_buffers: FQNs of buffers that have a home like parameters.
        whole_graph: Whether the step takes derivatives, so that no unit may borrow what a like one showed.
        looks: Told what the step looks at that may be another one in the next batch.
        draws_as: Number of the step and microbatch that key what the glue draws.
        guesses: What the step finds, in turn, where it decides by values of the model, in a recording that is only
            looked at; empty where it will be replayed, so that the step may not.

    Raises:
        StepError: No loss, or a value that reached the glue on a way that cannot be followed.
        ControlFlowError: The step branches on a value of the model.
    """
    tracked = set(tracked_buffers)
    owners = owned_by(root, tracked)
    state, looks = ModuleState(root), Looks() if looks is None else looks
    around_units, bound = modules_around(root, units), bound_functions(root)
    old = [leaf for _, leaf in reachable(root)]
    costs = CostWatch(root)
    watch: RecordWatch | None = None
    try:
        with randomness.isolated(), absent_members(owners) as names:
            owned = {fqn: owned_members(unit, names) for fqn, unit in units.items()}
            sinks = find_sinks(root)
            buffers = buffers_of(root, units)
            watch = RecordWatch(
                names, costs, buffers, SinkRehearsal(sinks), units, looks, randomness, whole_graph=whole_graph
            )
            watch.guesses = itertools.cycle(guesses) if guesses else None
            watch.asked = set() if loss_required or guesses else None  # evaluation decides itself
            with contextlib.ExitStack() as stack:
                stack.enter_context(randomness.microbatch(*draws_as))
                # Glue draws what it draws in a replay: it may decide by it.
                stack.enter_context(randomness.modules({n: m for n, m in around_units.items() if n}))
                stack.enter_context(randomness.watching(True))
                stack.enter_context(costs.module_stack())
                current = Current()
                current.watch = watch
                stack.enter_context(asking(current, randomness, units, owned, sinks, bound))
                stack.enter_context(unseen_functions_refused(current))
                stack.enter_context(quiet_fakes())
                stack.enter_context(looks.during(root, list(around_units.values())))
                stack.enter_context(costs)
                stack.enter_context(watch)
                result = step()
            refuse_number_in_buffer(root, state, "" if guesses else watch.numbers_read)
            recording = watch.finish(root, name, result, units, owned, loss_required=loss_required)
            return replace(recording, bound=bound, **find_appended(root, state, old, watch, recording)._asdict())
    except GraphWanted:
        assert not whole_graph
        whole_graph = True
    except ClassOpened:
        pass
    finally:
        if watch is not None:
            watch.opened.undo()
        state.restore()
    return record(
        root,
        step,
        units,
        name=name,
        randomness=randomness,
        loss_required=loss_required,
        tracked_buffers=tracked,
        whole_graph=whole_graph,
        looks=looks,
        draws_as=draws_as,
        guesses=guesses,
    )
