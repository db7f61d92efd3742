"""PipelineTimeline draws what the selected ranks executed, with stages and without."""

import dataclasses
import json
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
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import PipelineTimeline
from lightning_hybrid.callbacks import timeline as timelines
from lightning_hybrid.callbacks.actions import select_ranks, work_and_bound
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.schedule import chain, make_schedule, simulate
from models.regression import Sequential

SVG = "{http://www.w3.org/2000/svg}"


def fit(*callbacks, max_steps=4, accumulate=1, loggers=(), strategy=None, ckpt_path=None, **options):
    data = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy or Hybrid3DStrategy(**options),
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        callbacks=list(callbacks),
        logger=list(loggers),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sequential(), loader, ckpt_path=ckpt_path)
    return trainer


def written(folder="."):
    """The pictures, once all ranks are done."""
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir() if path.suffix in (".svg", ".png"))


def lanes_of(path):
    """The rank and the coordinates of each lane, by heading, and the actions drawn or hinted at."""
    root = ElementTree.parse(path).getroot()
    texts = [(float(text.get("x")), text.text or "") for text in root.iter(f"{SVG}text") if text.get("x")]
    headings = {x: text for x, text in texts if text in ("rank", "data", "context", "tensor", "pipeline")}
    columns = {
        heading: [int(text) for at, text in texts if at == x and text.isdigit()] for x, heading in headings.items()
    }
    hints = [title.text for title in root.iter(f"{SVG}title")][1:]
    return columns, [hint.split(":")[0] for hint in hints]


@pytest.mark.world(2)
def test_timeline_contains_every_action_of_every_rank():
    fit(PipelineTimeline("pictures/step.svg", step=2), pipeline_parallel_size=2, num_microbatches=4)
    assert written("pictures") == ["step.svg"]
    columns, actions = lanes_of("pictures/step.svg")
    assert columns == {"rank": [0, 1], "pipeline": [0, 1]}
    assert actions.count("S") == 2
    forwards_and_backwards = {action for action in actions if "R" not in action and action != "S"}
    assert forwards_and_backwards == {f"{stage}{kind}{m}" for stage in (0, 1) for kind in "FB" for m in range(4)}


@pytest.mark.world(2)
def test_timeline_as_png():
    callback = PipelineTimeline("step.png", step=1, memory_path="memory.png")
    fit(callback, max_steps=1, pipeline_parallel_size=2, num_microbatches=2)
    assert written() == ["memory.png", "step.png"]
    for name in written():
        assert Path(name).read_bytes().startswith(b"\x89PNG")


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
@pytest.mark.parametrize(
    ("ranks", "drawn"),
    [
        ("first", {"rank": [0, 2], "data": [0, 0], "pipeline": [0, 1]}),
        ("all", {"rank": [0, 2, 1, 3], "data": [0, 0, 1, 1], "pipeline": [0, 1, 0, 1]}),
        ({"data": 1}, {"rank": [1, 3], "data": [1, 1], "pipeline": [0, 1]}),
        ({"pipeline": 1}, {"rank": [2, 3], "data": [0, 1], "pipeline": [1, 1]}),
    ],
    ids=str,
)
def test_selected_ranks_are_drawn(ranks, drawn):
    fit(PipelineTimeline(step=2, ranks=ranks), max_steps=2, pipeline_parallel_size=2, num_microbatches=2)
    assert written() == ["timeline.svg"]
    columns, actions = lanes_of("timeline.svg")
    assert columns == drawn
    assert len([action for action in actions if "F" in action]) == 2 * len(drawn["rank"])


@pytest.mark.world(4)
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "context_parallel_size"])
def test_one_pipeline_per_replica_is_drawn(axis):
    with mock.patch.object(PipelineTimeline, "_report") as reported:
        fit(PipelineTimeline(step=1), max_steps=1, pipeline_parallel_size=2, num_microbatches=2, **{axis: 2})
    drawn = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, reported.call_count)
    assert drawn == [1, 0, 0, 0]
    if dist.get_rank() == 0:
        assert reported.call_args.args[1].columns["rank"] == [0, 2]


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        ("first", [0, 8]),
        ({"data": 0, "context": 0}, [0, 8, 1, 9]),
        ({"pipeline": 0, "tensor": 1}, [1, 3, 5, 7]),
        ("all", [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]),
    ],
    ids=str,
)
def test_ranks_of_a_pipeline_are_neighbours(ranks, chosen):
    sizes = dict(pipeline_parallel_size=2, data_shard_size=2, context_parallel_size=2, tensor_parallel_size=2)
    assert select_ranks(ParallelLayout(**sizes), ranks) == chosen


PLAIN = ["0F0", "0B0", "S"]
REPLICAS = ["0F0", "0B0", "0R", "S"]
IN_MICROBATCHES = ["0F0", "0B0", "0F1", "0B1", "0R", "S"]


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("options", "actions"),
    [
        ({}, REPLICAS),
        ({"num_microbatches": 2}, IN_MICROBATCHES),
        ({"zero_stage": 2, "num_microbatches": 2}, [action for action in IN_MICROBATCHES if action != "0R"]),
        ({"tensor_parallel_size": 2}, PLAIN),
    ],
    ids=str,
)
def test_runs_without_stages_are_drawn(options, actions):
    with mock.patch.object(PipelineTimeline, "_report") as reported:
        fit(PipelineTimeline(step=2, ranks="all"), max_steps=2, **options)
    if dist.get_rank():
        return
    measured = reported.call_args.args[1]
    assert measured.bubbles is None and measured.columns["rank"] == [0, 1]
    for rank in range(2):
        spans = sorted((span for span in measured.timeline.spans if span.rank == rank), key=lambda span: span.start)
        assert [str(span.action) for span in spans] == actions
        assert all(span.start <= span.end for span in spans)


@pytest.mark.world(2)
@pytest.mark.parametrize("options", [{}, {"pipeline_parallel_size": 2}], ids=["replicas", "not partitioned"])
def test_manual_backwards_and_steps_are_recorded(options):
    class Manual(Sequential):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    with mock.patch.dict(globals(), Sequential=Manual), mock.patch.object(PipelineTimeline, "_report") as reported:
        fit(PipelineTimeline(step=2), max_steps=2, **options)
    if dist.get_rank() == 0:
        measured = reported.call_args.args[1]
        actions = [str(span.action) for span in measured.timeline.spans if span.rank == 0]
        assert actions == REPLICAS and measured.bubbles is None


@pytest.mark.world(2)
def test_trace_has_a_process_per_rank_and_the_memory():
    callback = PipelineTimeline(["a/trace.json", "a/step.svg"], step=2, every_n_steps=1)
    fit(callback, max_steps=3, pipeline_parallel_size=2, num_microbatches=2)
    dist.barrier()
    assert sorted(path.name for path in Path("a").iterdir()) == [
        *("step-2.svg", "step-3.svg", "trace-2.json", "trace-3.json", "trace_lost_time.json")
    ]
    events = json.loads(Path("a/trace-3.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1 and event["dur"] > 0]
    assert {"forward 0", "forward 1", "backward 0", "backward 1", "optimizer"} <= set(names)
    assert sum(event["ph"] == "s" for event in events) == 2 * 2  # a message each way, for each microbatch
    assert all(event["args"]["bytes"] > 10**7 for event in events if event["ph"] == "C")
    assert {event["pid"] for event in events if event["ph"] == "C"} == {0, 1}


@pytest.mark.world(2)
def test_memory_is_sampled_in_measured_steps_only():
    sampled = []

    class Watched(PipelineTimeline):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            recorder = trainer.strategy.recorder
            assert bool(recorder.time_readers) == bool(recorder.memory_readers)
            sampled.append(bool(recorder.memory_readers))

    drawn = Watched(step=2, every_n_steps=2, memory_path="memory.svg")
    without = PipelineTimeline("without.svg", step=2)  # does not end the measurement of the other
    fit(drawn, without, max_steps=4, pipeline_parallel_size=2)
    assert sampled == [False, True, False, True]
    assert written() == ["memory-2.svg", "memory-4.svg", "timeline-2.svg", "timeline-4.svg", "without.svg"]
    assert lanes_of("memory-2.svg")[0] == {"rank": [0, 1], "pipeline": [0, 1]}


@pytest.mark.world(2)
def test_loggers_receive_numbers_and_images():
    logger = TensorBoardLogger(".")
    callback = PipelineTimeline(step=2, memory_path="memory.svg")
    fit(callback, max_steps=2, loggers=[logger], pipeline_parallel_size=2, num_microbatches=2)
    if dist.get_rank():
        return
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert {tag: events.Images(tag)[0].step for tag in events.Tags()["images"]} == {
        "pipeline_timeline": 2,
        "memory_timeline": 2,
    }
    [bubble] = events.Scalars("pipeline_bubble")
    assert bubble.step == 2 and 0 < bubble.value < 1


@pytest.mark.world(2)
def test_another_strategy_is_reported():
    with mock.patch.object(timelines, "rank_zero_info") as info:
        fit(PipelineTimeline(step=1), max_steps=1, strategy="ddp")
    assert written() == []
    assert "DDPStrategy, which records no actions" in info.call_args.args[0]


@pytest.mark.world(2)
def test_ranks_that_a_run_does_not_have_are_refused():
    with pytest.raises(ValueError, match="this run has 1 tensor ranks; set 'tensor' to at most 0"):
        fit(PipelineTimeline(ranks={"tensor": 1}), pipeline_parallel_size=2)


@pytest.mark.world(2)
def test_a_resumed_run_counts_a_step_that_has_passed_from_its_start():
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    fit(max_steps=3, **options).save_checkpoint("step3.ckpt")
    with mock.patch.object(timelines, "rank_zero_info") as info:
        fit(PipelineTimeline(step=2), ckpt_path="step3.ckpt", max_steps=6, **options)
    assert written() == ["timeline.svg"]
    assert "the run starts after step=2, so it draws step 5" in info.call_args_list[0].args[0]
    if dist.get_rank() == 0:
        assert "Step 5" in Path("timeline.svg").read_text()


@pytest.mark.world(2)
def test_unreached_step_is_reported():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(PipelineTimeline(step=9), max_steps=2, pipeline_parallel_size=2, num_microbatches=2)
    assert written() == []
    if dist.get_rank() == 0:
        assert any("before step 9" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": []}, ValueError, "names no file for the timeline"),
        ({"path": "timeline.pdf"}, ValueError, "must end in .svg, .png or .json"),
        ({"path": ["timeline.svg", "trace.txt"]}, ValueError, "path='trace.txt' must end in"),
        ({"memory_path": "memory.json"}, ValueError, "memory_path='memory.json' must end in .svg or .png"),
        ({"ranks": "second"}, ValueError, "ranks='second' must be 'first', 'all', or a mapping of 'data'"),
        ({"ranks": {"expert": 0}}, ValueError, "must be 'first', 'all'"),
        ({"ranks": {"data": -1}}, ValueError, "must be 'first', 'all'"),
        ({"step": 0}, ValueError, "step=0 must be at least 1"),
        ({"step": 2.5}, TypeError, "step=2.5 must be an int"),
        ({"step": True}, TypeError, "step=True must be an int"),
        ({"rebalance": 1}, TypeError, "rebalance=1 must be True or False"),
        ({"ranks": {"pipeline": 0}, "rebalance": True}, ValueError, "measures a part; leave 'pipeline' out"),
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
