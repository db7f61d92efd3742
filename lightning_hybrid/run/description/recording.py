"""An estimate of the activations of a step that no stage needs recorded: it is recorded for that alone, on stand-ins.

That is for a plan, after which nothing is trained: the batch comes from the run's own loader.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from lightning_hybrid.batch.split import split
from lightning_hybrid.graph.partition import Assignment, assign, owner_stages
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.run.run import Run
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.recording.record import Recipe
from lightning_hybrid.step.recording.units import choose_units
from lightning_hybrid.step.standins.numbers import GUESSES
from lightning_hybrid.strategies.start.example_batch import example_of_fit
from lightning_hybrid.strategies.start.provisional_optimizers import record_with_optimizers
from lightning_hybrid.strategies.user_code.hooks import current_hook, step_arguments


def record_in_one_stage(
    run: Run,
    randomness: KeyedRandomness,
    layers: Mapping[str, nn.Module] | None = None,
    failures: list[Exception] | None = None,
    watching: Callable[[Mapping[str, nn.Module]], AbstractContextManager[None]] | None = None,
) -> Assignment | None:
    """Record the training step on the first microbatch; None where it cannot be recorded, whatever its branches.

    Units are ``layers``, or those that would be recomputed. The error of each attempt is added to ``failures``;
    ``watching`` gives the context of each recording, of its units.
    """
    setting = run.setting
    trainer, module, options = setting.trainer, setting.module, setting.options
    graphs: list[StepGraph] = []

    def record_with(units: Mapping[str, nn.Module], guesses: Sequence[bool]) -> None:
        batch = example_of_fit(trainer, options.example_batch)
        count = run.count(batch)
        first = split(batch, count, options.batch_splitter)[0][0]
        step = partial(module.training_step, *step_arguments(module, "training_step", first))
        context = setting.contexts.of("training_step", delays_calls=True)
        around = contextlib.nullcontext() if watching is None else watching(units)
        recipe = Recipe(module, step, units, "training_step", randomness, context, guesses=guesses)
        with torch.enable_grad(), current_hook(module, "training_step"), around:
            graphs.append(recipe.record().graph)

    if layers is None:
        layers = {fqn: module.get_submodule(fqn) for fqn in run.policies or find_layers(dict(module.named_children()))}
    # Units as of stages where a step reads parameters inside of layers.
    for units, guesses in itertools.product((layers, choose_units(module, 2)), GUESSES):
        try:
            record_with_optimizers(trainer, module, partial(record_with, units, guesses))
            return assign(graphs[0], owner_stages(graphs[0], 1), 1)
        except Exception as error:  # any step can be trained; only this estimate needs a recording
            if failures is not None:
                failures.append(error.with_traceback(None))
    return None
