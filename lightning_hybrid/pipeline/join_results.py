"""The result of a step in stages, joined from its microbatches: its loss, what it returns, and what it appends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.pipeline.results.prepare_step_outputs_for_hooks import check_content, detached, returned_batch
from lightning_hybrid.pipeline.runtime.executor import Outcome, fill_placeholders
from lightning_hybrid.pipeline.side_effects.join_appended_entries import AppendedEntries
from lightning_hybrid.pipeline.side_effects.side_effect_run import SideEffectRun
from lightning_hybrid.pipeline.stages.select_recorded_trace import ChosenTraces
from lightning_hybrid.step.batch.merge import join
from lightning_hybrid.step.batch.split import sizes_of
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.recording.kept import refuse_absent_numbers


def join_results(
    root: nn.Module,
    chosen: ChosenTraces,
    outcome: Outcome,
    content: Sequence[Mapping[int, Tensor]],
    weights: Sequence[float],
    *,
    train: bool,
    appended: AppendedEntries | None,
    side_effects: SideEffectRun | None,
) -> tuple[Any, Tensor | None]:
    """Fill absent tensors, and join the microbatches.

    Args:
        root: The user's module.
        chosen: The microbatches.
        outcome: Their runs on this rank.
        content: The exchanged values of each microbatch, by index, in their full shapes.
        weights: The weight of each microbatch.
        train: Whether the step has a loss.
        appended: Joins what they have appended to lists.
        side_effects: The run of a step that keeps numbers of the model.

    Returns:
        What the step returns, tensors in it of the shapes of the full batch, and its loss, a scalar.
    """
    variants, microbatches = chosen.variants, chosen.microbatches
    runs = [outcome.runs[index] for index in range(len(variants))]
    outputs = []
    for run, values in zip(runs, content, strict=True):
        fill_placeholders(run, values)
        if not train or not isinstance(run.result, Tensor):  # a bare loss is joined below
            outputs.append(map_leaves(detached, run.result))
    loss = None
    if train:
        losses = [values[variant.loss] for values, variant in zip(content, variants, strict=True)]
        total = sum(float(loss) * weight for loss, weight in zip(losses, weights, strict=True))
        loss = losses[0].new_tensor(total)
    name, sizes = variants[0].recording.graph.step, sizes_of(microbatches)
    output = join(outputs, weights, sizes, step=name) if outputs else loss
    if side_effects is not None:
        returned = map_leaves(detached, side_effects.returned(content[0]))
        output = returned if outputs else loss
    if appended is not None:
        appended.put(appended.evenly(len(variants), content), weights, sizes)
    check_content(name, output)
    if read_at := next((run.numbers_read for run in runs if run.numbers_read), ""):
        refuse_absent_numbers(root, [variant.recording for variant in variants], read_at)
    return returned_batch(chosen.batch, microbatches, [run.result for run in runs], output), loss
