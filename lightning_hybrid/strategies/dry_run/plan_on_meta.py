"""The plan of a run on parameters without storage; wide layers are searched on narrow copies, or left unsharded."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.step.batch.split_batch_into_microbatches import batch_size_of, check_count, choose_count, split
from lightning_hybrid.strategies.execution.lifecycle import RunLifecycle
from lightning_hybrid.strategies.plan_in_one_process import MetaPlanningStrategy
from lightning_hybrid.strategies.run.run import RecordedBatch, Run
from lightning_hybrid.strategies.start.example_batch import example_of_fit
from lightning_hybrid.tensor.search.unit_search import plan_unit


class DryRunStrategy(MetaPlanningStrategy):
    """Plans a run whose step is recorded on its first microbatch, which stands for all of them.

    Attributes:
        run_as_planned: The decisions; None if there are none.
        recorded: The recorded step where there are no stages.
        samples: Samples in the batch of a replica; None if unknown.
        num_microbatches: Microbatches of that batch.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.run_as_planned: Run | None = None
        self.recorded: Assignment | None = None
        self.samples: int | None = None
        self.num_microbatches = 1

    def _begin(self, lifecycle: RunLifecycle) -> None:
        """Let the first microbatch be the whole batch of the recording: all microbatches have its shapes."""
        setting = lifecycle.setting
        if not (setting.layout.pipeline_parallel_size > 1 and setting.is_fitting):
            return
        options, batch = setting.options, example_of_fit(setting.trainer, setting.options.example_batch)
        check_count(batch, options.microbatches)
        num_stages = setting.layout.pipeline_parallel_size * options.stages_of_each_rank
        self.num_microbatches = choose_count(batch, options.microbatches, num_stages, options.batch_splitter)
        self.samples = batch_size_of(batch)
        first = split(batch, self.num_microbatches, options.batch_splitter)[0][0]
        options = dataclasses.replace(options, example_batch=first, num_microbatches=1, batch_splitter=None)
        lifecycle.setting = dataclasses.replace(setting, options=options)
        lifecycle.run = dataclasses.replace(lifecycle.run, setting=lifecycle.setting)

    _find_tensor_plan = staticmethod(partial(plan_unit, at_full_width=False))

    def _describe(self, run: Run, recorded: Assignment | None) -> None:
        partition = self.partition
        if run.is_pipelined and partition is not None and run.batch is not None:
            run = dataclasses.replace(run, batch=RecordedBatch(self.samples, self.num_microbatches))
            partition.run = run
        elif run.batch is not None:
            self.samples, self.num_microbatches = run.batch.samples, run.batch.num_microbatches
        elif run.setting.is_fitting:
            batch = example_of_fit(run.setting.trainer, run.setting.options.example_batch)
            self.samples = batch_size_of(batch)
            self.num_microbatches = 1 if run.runner is None else run.runner.count("training_step", batch)
        super()._describe(run, recorded)
        self.run_as_planned, self.recorded = run, recorded
