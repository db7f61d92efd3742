"""The step of a run as its plan predicted it beside what was measured, in lines of text."""

from __future__ import annotations

from lightning_hybrid.planner.measured.correct_by_run import measured_layout, median_step, usable_steps
from lightning_hybrid.planner.measured.correction import COMMUNICATION, OPTIMIZER
from lightning_hybrid.planner.search.layout_options import spelled
from lightning_hybrid.planner.search.plans_and_rejections import Plan
from lightning_hybrid.schedule.measured.seconds import MeasuredCosts
from lightning_hybrid.text import columns, sized, timed


def compared_lines(plan: Plan, measured: MeasuredCosts) -> list[str]:
    """Return the predicted and the measured time of a step by term, the memory, and the errors of the prediction.

    Args:
        plan: By which the run was laid out, with its time.
        measured: What the run measured.
    """
    assert plan.time is not None
    try:
        layout = measured_layout(measured)
    except ValueError as error:
        return [f"the step is not compared with its plan: {error}"]
    if (spelled(layout), layout.batch) != (spelled(plan.layout), plan.layout.batch):
        of = f"{spelled(plan.layout)} with {plan.layout.batch} samples"
        return [f"the step is not compared with its plan, {of}: it ran as {spelled(layout)} with {layout.batch}"]
    steps = usable_steps(measured)
    step = median_step(steps) if steps else measured.step
    terms = dict(plan.time.terms)
    communication, optimizer = (sum(terms.pop(name, 0.0) for name in names) for names in (COMMUNICATION, OPTIMIZER))
    waits = terms.pop("input", 0.0)
    work = step.work + step.bubble + step.imbalance + step.variation + step.other
    values = [
        ("layers, with the bubble", sum(terms.values()), work),
        ("communication", communication, step.communication),
        ("optimizer", optimizer, step.optimizer),
        ("input", waits, step.input),
        ("step", plan.time.seconds, step.step_seconds),
    ]
    rows = [("", "predicted", "measured", "error")]
    rows += [(name, timed(own), timed(real), _error(own, real)) for name, own, real in values]
    if peak := max(measured.peak_memory, default=0):
        tensors = plan.memory.tensors
        rows.append(("memory of tensors", sized(tensors), sized(peak), _error(tensors, peak)))
    relative = plan.time.seconds / step.step_seconds - 1.0
    few = "" if steps else ", one of the first steps of the run, which are slower than the others"
    return [
        f"predicted {timed(plan.time.seconds)} ± {plan.time_error:.0%} of a step, measured"
        f" {timed(step.step_seconds)}{few}: the error of the prediction is {relative:+.0%}",
        *columns(rows),
    ]


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1.0:+.0%}" if predicted and measured else ""
