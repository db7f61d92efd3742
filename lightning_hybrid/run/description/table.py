"""The table that is printed when a run starts, or its layout has changed: stages, messages and techniques.

One that is long goes to a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.pipeline.stages.plan import StagePlan
from lightning_hybrid.predict.ranks import KINDS, RankMemory
from lightning_hybrid.run.description.lines import (
    describe_batch,
    describe_batch_norm,
    describe_embeddings,
    describe_environment,
    describe_memory,
    describe_overhead,
    describe_parameters,
    knows_batches,
)
from lightning_hybrid.run.description.memory import memory_of_ranks, memory_of_stages
from lightning_hybrid.run.run import Run
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.step.objects.modules import shortened
from lightning_hybrid.text import WIDTH, columns, counted, sized, spanned, spanned_within, wrapped

MAX_DETAILS = 16  # lines; more of them are written to a file
_COUNTS = {  # by which a microbatch is weighted, and the kinds of averages that divide by them
    "number of labels that are not ignored": ("classes",),
    "sum of the class weights of its labels": ("weighted",),
    "number of elements": ("elements", "rows"),
    "sum of a mask or of weights": ("divisor",),
}
_COLUMNS = ("parameters", "gradients", "optimizer", "activations")
_NARROW_COLUMNS = ("params", "grads", "optim", "activ")  # where lines would be too long
FILE_NAME = "hybrid3d_layout.txt"


@dataclasses.dataclass(frozen=True)
class StartTable:
    """Lines that are printed when a run starts."""

    layout: Sequence[str]  # the layout, the batches and the parameters
    details: Sequence[str]  # a row per stage, and the plans of layers
    rest: Sequence[str]  # memory, means and techniques

    def __str__(self) -> str:
        """All lines."""
        return "\n".join([*self.layout, *self.details, *self.rest])

    @property
    def is_long(self) -> bool:
        """Whether the details are better read in a file."""
        return len(self.details) > MAX_DETAILS

    def summary(self, path: str) -> str:
        """Return the lines without the details, which are in the file ``path``."""
        return "\n".join([*self.layout, *self.rest, f"{len(self.details)} lines on stages and layers: {path}"])


def describe_run(run: Run, optimizers: Sequence[Optimizer]) -> StartTable:
    """Return the start table: sizes, stages, messages, and what each technique found."""
    setting = run.setting
    options, layout = setting.options, setting.layout
    first = run.plan.first.assignment if run.plan is not None and run.plan.first is not None else None
    if first is not None and first.num_stages == 1:
        first = None
    head = [_describe_layout(layout) + ("" if first is None else f", schedule {options.schedule}")]
    rank_of = (lambda stage: 0) if run.plan is None else run.plan.rank_of
    ranks = ((0,),) if run.plan is None else run.plan.ranks_of_stages
    details: list[str] = []
    rest: list[str] = []
    if setting.is_fitting:
        batch = run.batch
        count = 1 if batch is None else batch.num_microbatches
        memory: list[RankMemory] | None = None
        with only_informs("the estimated memory"):
            memory = _expected_memory(run, optimizers, count, rank_of)
        head += [describe_batch(run, batch, first)] if knows_batches(run) else []
        head += [*describe_overhead(run, batch, first), *describe_batch_norm(setting, batch)]
        head += [*describe_embeddings(setting), describe_parameters(setting, None if first is None else first.graph)]
        is_upper_bound = layout.tensor_parallel_size * layout.context_parallel_size > 1
        if memory is not None:
            rest.append(describe_memory(memory_of_ranks(memory, run), is_upper_bound=is_upper_bound))
        details += [] if first is None else _stage_rows(first, ranks, memory)
    elif first is not None:
        details += _stage_rows(first, ranks, None)
    rest += [] if first is None else [*_describe_widths(run.plan, first), *_shared_and_means(run, first)]
    if run.fallback is not None and run.fallback.line:
        head.insert(1, run.fallback.line)
    details += [line for technique in run.techniques for line in technique.details(run)]
    return StartTable(head, details, [*rest, *describe_techniques(run)])


def _expected_memory(
    run: Run, optimizers: Sequence[Optimizer], count: int, rank_of: Callable[[int], int]
) -> list[RankMemory]:
    """The memory of each stage, with what a budget of it is expected to choose, if there is one."""
    memory = memory_of_stages(run, optimizers, count)
    budgeted = next((each for each in run.techniques if each.budget is not None), None)
    if budgeted is None:
        return memory
    others = tuple(each for each in run.techniques if each is not budgeted)
    full = memory_of_stages(dataclasses.replace(run, techniques=others), optimizers, count)
    return budgeted.expect(memory, full, rank_of)


def describe_techniques(run: Run) -> list[str]:
    """Return the lines of each technique."""
    setting = run.setting
    options = setting.options
    lines = [line for technique in run.techniques for line in technique.lines(run)]
    if options.optimizer_in_backward and setting.is_fitting:
        lines.append("optimizer: each layer is stepped in the backward, and its gradients are freed")
    return lines


def _describe_layout(layout: ParallelLayout) -> str:
    """Return the sizes of a layout in one line."""
    head = (
        f"hybrid3d: {counted(layout.world_size, 'rank')} = pipeline {layout.pipeline_parallel_size}"
        f" x data {layout.data_parallel_size} x tensor {layout.tensor_parallel_size}"
    )
    if layout.context_parallel_size > 1:
        head += f" x context {layout.context_parallel_size}"
    return head


def _stage_rows(
    assignment: Assignment, ranks: Sequence[Sequence[int]], memory: Sequence[RankMemory] | None
) -> list[str]:
    """Return a row per stage: its units, what each rank holds for it, its cost, and what it sends per microbatch.

    The pipeline ranks are shown where they have other numbers than the stages.
    """
    costs = assignment.costs()
    has_ranks = any(list(ranks[stage]) != [stage] for stage in range(assignment.num_stages))
    titles = ["stage", "rank"] if has_ranks else ["stage"]
    rows = [[*titles, "units", *(_COLUMNS if memory else ()), "cost", "sends"]]
    units = [_units(assignment, stage) for stage in range(assignment.num_stages)]
    for stage in range(assignment.num_stages):
        share = f"{100 * costs[stage] / sum(costs):.0f} %"
        held = () if memory is None else [getattr(memory[stage], kind) for kind in KINDS]
        cells = ["?" if size is None else sized(size) for size in held]
        holders = [", ".join(map(str, ranks[stage]))] if has_ranks else []
        rows.append([str(stage), *holders, spanned(units[stage]), *cells, share, _sends(assignment, stage)])
    if max(map(len, columns(rows))) <= WIDTH:
        return columns(rows)
    rows[0] = [*titles, "units", *(_NARROW_COLUMNS if memory else ()), "cost", "sends"]
    place = len(titles)
    room = WIDTH - max(map(len, columns([[*row[:place], "", *row[place + 1 :]] for row in rows])))
    for row, names in zip(rows[1:], units, strict=True):
        row[place] = spanned_within(names, room)
    return columns(rows)


def _sends(assignment: Assignment, stage: int) -> str:
    """Return what a stage sends per microbatch, and to which stages; those that receive equal bytes are listed once."""
    graph, targets = assignment.graph, dict[int, list[int]]()
    for (source, target), sent in assignment.portals.items():
        if source == stage:
            targets.setdefault(sum(graph.values[value].nbytes for value in sent), []).append(target)
    texts = [f"{sized(nbytes)} to {_targets(to)}" for nbytes, to in targets.items()]
    if len(texts) > 2:  # one line for each stage
        others = list(targets.items())[1:]
        total = sum(nbytes * len(to) for nbytes, to in others)
        texts = [texts[0], f"{sized(total)} to {sum(len(to) for _, to in others)} others"]
    return ", ".join(texts) or "-"


def _targets(stages: Sequence[int]) -> str:
    """Return increasing stages in short, such as "1, 3-7"; only how many there are where that is long."""
    starts = [stage for stage in stages if stage - 1 not in stages]
    ends = [stage for stage in stages if stage + 1 not in stages]
    if len(starts) > 2:
        return f"{len(stages)} stages"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _describe_widths(plan: StagePlan | None, assignment: Assignment) -> list[str]:
    """Return a line on stages of several ranks, and the bytes of their further copies of parameters."""
    if plan is None or not plan.widths:
        return []
    sizes, held = assignment.graph.parameter_bytes, assignment.holders
    of_stages = [sum(sizes[name] for name in held if stage in held[name]) for stage in range(len(plan.widths))]
    copied = sum((width - 1) * size for width, size in zip(plan.widths, of_stages, strict=True))
    chosen = "chosen, " if plan.chooses_widths else ""
    return [f"stage widths: {list(plan.widths)}, {chosen}with {sized(copied)} of further copies of parameters"]


def _shared_and_means(run: Run, assignment: Assignment) -> list[str]:
    """Return lines on parameters of several stages, and on means whose microbatches differ in their counts."""
    options = run.setting.options
    shared = [f"{name} on stages {list(stages)}" for name, stages in assignment.shared.items()]
    lines = [f"shared parameters: {', '.join(shared[:4])}{' ...' if len(shared) > 4 else ''}"] if shared else []
    if options.microbatch_weight is None and options.microbatches != 1 and (runner := run.staged_runner) is not None:
        lines += _means(assignment.graph, runner.recorded_means, is_uneven=runner.has_weighted_means)
    return lines


def _means(graph: StepGraph, means: Collection[int], *, is_uneven: bool) -> list[str]:
    """Return a line for each kind of count that weighs microbatches, with the ``means`` that have it.

    That of a loss over labels matters only where some labels are ignored: where the first batch ``is_uneven``.
    """
    nodes = [graph.nodes[index] for index in sorted(means)]
    nodes = [node for node in nodes if is_uneven or node.averages != "classes"]
    lines = []
    for count, kinds in _COUNTS.items():
        of_kind = [node for node in nodes if node.averages in kinds]
        shown = [f"{node.name} ({_file_and_line(node.line)})" for node in of_kind]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        if shown:
            lines.append(f"each microbatch is weighted by its {count}: {', '.join(shown[:3])}{more}")
    return lines


def _file_and_line(line: str) -> str:
    """The file of a user's line by its name; with the package, if it is an installed one."""
    _, is_installed, within = line.partition("/site-packages/")
    return within if is_installed else line.rsplit("/", 1)[-1]


def _units(assignment: Assignment, stage: int) -> list[str]:
    nodes = [node for node, s in zip(assignment.graph.nodes, assignment.node_stage, strict=True) if s == stage]
    units = dict.fromkeys(node.unit for node in nodes if node.unit)
    return [shortened(unit) for unit in units] or ["(glue)"]


@only_informs("the start table")
def announce_run(run: Run, *, with_environment: bool) -> None:
    """Print what a run does under its layout; on the first rank only, without any communication.

    ``with_environment`` adds the ranks, the precision and the versions, which no layout changes.
    """
    setting = run.setting
    if setting.world.mesh.rank:
        return
    table = describe_run(run, setting.trainer.optimizers if setting.is_fitting else [])
    if with_environment:
        table = dataclasses.replace(table, layout=[*table.layout, *describe_environment(setting)])
    path = _write(table, setting.trainer) if table.is_long else None
    rank_zero_info(wrapped(str(table) if path is None else table.summary(str(path))))


@only_informs(f"the file {FILE_NAME}")
def _write(table: StartTable, trainer: Any) -> Path | None:
    """Write all lines to the folder of the logs; return the path, or None where it cannot be written."""
    logger: Any = trainer.logger
    folder = getattr(logger, "log_dir", None)
    if folder:
        _ = logger.experiment  # makes the folder; it would warn of a file that is there before it
    folder = folder or getattr(logger, "save_dir", None) or trainer.default_root_dir
    if "://" in str(folder):
        return None
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{table}\n", encoding="utf-8")
    return path
