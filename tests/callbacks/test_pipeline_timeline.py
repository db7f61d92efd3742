"""PipelineTimeline draws what the pipeline ranks executed, and does nothing without a pipeline."""

import dataclasses
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import PipelineTimeline, pipeline_timeline
from lightning_hybrid.callbacks.pipeline_timeline import work_and_bound
from lightning_hybrid.schedule import chain, make_schedule, simulate
from models.regression import Sequential

SVG = "{http://www.w3.org/2000/svg}"


def fit(callback, max_steps=4, accumulate=1, **options):
    data = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=Hybrid3DStrategy(**options),
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sequential(), loader)


def written(folder="."):
    """The pictures, once all ranks are done."""
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir() if path.suffix in (".svg", ".png"))


def lanes_of(path):
    """The names of the lanes, and the numbers of the microbatches drawn or hinted at."""
    root = ElementTree.parse(path).getroot()
    names = {text.text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("rank")}
    hints = [title.text for title in root.iter(f"{SVG}title")][1:]
    return names, [hint.split(":")[0] for hint in hints]


@pytest.mark.world(2)
def test_timeline_contains_every_action_of_every_rank():
    fit(PipelineTimeline("pictures/step.svg", step=2), pipeline_parallel_size=2, num_microbatches=4)
    assert written("pictures") == ["step.svg"]
    names, actions = lanes_of("pictures/step.svg")
    assert names == {"rank 0", "rank 1"}
    forwards_and_backwards = {action for action in actions if "R" not in action}
    assert forwards_and_backwards == {f"{stage}{kind}{m}" for stage in (0, 1) for kind in "FB" for m in range(4)}


@pytest.mark.world(2)
def test_timeline_as_png():
    fit(PipelineTimeline("step.png", step=1), max_steps=1, pipeline_parallel_size=2, num_microbatches=2)
    assert written() == ["step.png"]
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.world(2)
def test_steps_count_optimizer_steps_and_may_repeat():
    callback = PipelineTimeline(step=1, every_n_steps=2)
    fit(callback, max_steps=4, accumulate=2, pipeline_parallel_size=2, num_microbatches=2)
    assert written() == ["timeline-1.svg", "timeline-3.svg"]


@pytest.mark.world(2)
def test_ranks_measure_the_step_chosen_by_rank_0():
    """A rank that measured another step would never be joined."""
    fit(PipelineTimeline(step=1 + dist.get_rank()), max_steps=3, pipeline_parallel_size=2, num_microbatches=2)
    assert written() == ["timeline.svg"]


@pytest.mark.world(4)
def test_one_replica_is_drawn():
    fit(PipelineTimeline(step=2), max_steps=2, pipeline_parallel_size=2, num_microbatches=2)
    assert written() == ["timeline.svg"]
    assert lanes_of("timeline.svg")[0] == {"rank 0", "rank 1"}


@pytest.mark.world(4)
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "context_parallel_size"])
def test_one_pipeline_per_replica_is_drawn(axis):
    with mock.patch.object(PipelineTimeline, "_report") as reported:
        fit(PipelineTimeline(step=1), max_steps=1, pipeline_parallel_size=2, num_microbatches=2, **{axis: 2})
    drawn = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, reported.call_count)
    assert drawn == [1, 0, 0, 0]


@pytest.mark.world(2)
def test_nothing_is_drawn_without_stages():
    with mock.patch.object(pipeline_timeline, "rank_zero_info") as info:
        fit(PipelineTimeline(step=1), max_steps=1)
    assert written() == []
    assert "one pipeline stage" in info.call_args.args[0]


@pytest.mark.world(2)
def test_unreached_step_is_reported():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(PipelineTimeline(step=9), max_steps=2, pipeline_parallel_size=2, num_microbatches=2)
    assert written() == []
    if dist.get_rank() == 0:
        assert any("before step=9" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": "timeline.pdf"}, ValueError, "must end in .svg or .png"),
        ({"step": 0}, ValueError, "step=0 must be at least 1"),
        ({"step": 2.5}, TypeError, "step=2.5 must be an int"),
        ({"step": True}, TypeError, "step=True must be an int"),
        ({"every_n_steps": -1}, ValueError, "every_n_steps=-1 must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        PipelineTimeline(**arguments)


SCHEDULES = pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("eager_1f1b", 1)],
)


def simulated(name, stages_per_rank, transfer=0.0):
    """A timeline with four microbatches, and the data dependencies in it."""
    schedule = make_schedule(name, 2, 4, stages_per_rank)
    links = chain(schedule.num_stages)
    assignment = SimpleNamespace(
        num_stages=schedule.num_stages,
        portals=dict.fromkeys(links.forward, ()),
        gradient_portals=lambda: dict.fromkeys(links.backward, ()),
    )
    costs = {"forward_seconds": 1.0, "backward_seconds": 2.0, "reduce_seconds": 0.5, "transfer_seconds": transfer}
    return simulate(schedule, links, **costs), assignment


@SCHEDULES
def test_bound_of_an_ideal_timeline_is_itself(name, stages_per_rank):
    ideal, assignment = simulated(name, stages_per_rank)
    worked, bound = work_and_bound(ideal, assignment)
    assert worked == ideal
    assert bound.makespan_seconds == pytest.approx(ideal.makespan_seconds)
    assert bound.bubble == pytest.approx(ideal.bubble)


@SCHEDULES
def test_bound_excludes_transfer_time(name, stages_per_rank):
    slow, assignment = simulated(name, stages_per_rank, transfer=0.25)
    ideal, _ = simulated(name, stages_per_rank)
    worked, bound = work_and_bound(slow, assignment)
    assert worked.bubble == slow.bubble > ideal.bubble
    assert bound.makespan_seconds == pytest.approx(ideal.makespan_seconds)
    assert bound.bubble == pytest.approx(ideal.bubble)


@SCHEDULES
def test_early_action_only_waits(name, stages_per_rank):
    ideal, assignment = simulated(name, stages_per_rank)
    last = {}
    early = []
    for span in ideal.spans:  # each begins as soon as its rank is free
        early.append(span._replace(start=last.get(span.rank, 0.0)))
        last[span.rank] = span.end
    waiting = dataclasses.replace(ideal, spans=tuple(early))
    assert waiting.bubble < ideal.bubble
    worked, bound = work_and_bound(waiting, assignment)
    assert worked.bubble == pytest.approx(ideal.bubble)
    assert bound.makespan_seconds == pytest.approx(ideal.makespan_seconds)


@SCHEDULES
@pytest.mark.parametrize("seed", range(8))
def test_no_measured_step_beats_its_bound(seed, name, stages_per_rank):
    chance = random.Random(seed)
    ideal, assignment = simulated(name, stages_per_rank, transfer=0.1)
    # Actions take longer at times, equally on all ranks: the order holds for any duration.
    points = sorted({time for span in ideal.spans for time in span[2:]})
    clock, now = {}, 0.0
    for before, after in zip([points[0], *points], points, strict=False):
        now += (after - before) * chance.uniform(0.3, 3)
        clock[after] = now
    measured = tuple(span._replace(start=clock[span.start], end=clock[span.end]) for span in ideal.spans)
    worked, bound = work_and_bound(dataclasses.replace(ideal, spans=measured), assignment)
    assert bound.makespan_seconds <= worked.makespan_seconds + 1e-9
    assert bound.bubble <= worked.bubble + 1e-9
