"""Measured steps on the first rank: planted causes are named in the table, files and metrics; better cuts are named."""

import json
from types import SimpleNamespace

import pytest
import torch

from lightning_hybrid.callbacks.actions import MeasuredStep
from lightning_hybrid.callbacks.lost_time.cuts import RebalancedCuts
from lightning_hybrid.callbacks.lost_time.files import write_lost_time, write_measured_costs
from lightning_hybrid.callbacks.lost_time.steps import MeasuredSteps, analyze_step, metrics_of
from lightning_hybrid.graph.partition import assign, owner_stages
from lightning_hybrid.graph.step_graph import Node, StepGraph, Value
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.schedule import Action, Kind, Portals, Span, Timeline, make_schedule, simulate
from lightning_hybrid.schedule.measured.cuts import CutSearch
from lightning_hybrid.schedule.measured.seconds import load_measured_costs, seconds_of_nodes


def assignment(count=8, num_stages=2):
    """Blocks of equal cost one after the other."""
    nodes = tuple(
        Node(i, f"@blocks.{i}", (i - 1,) if i else (), (f"blocks.{i}.weight",), (i,), flops=1e6) for i in range(count)
    )
    values = tuple(Value(i, (2, 2), "float32", (2, 1), requires_grad=True) for i in range(count))
    sizes = {f"blocks.{i}.weight": 4 for i in range(count)}
    graph = StepGraph("training_step", nodes, values, sizes, loss=count - 1)
    return assign(graph, owner_stages(graph, num_stages), num_stages)


STAGES = assignment()


def pipeline(forward=0.01, *, transfer=0.0, wait=0.0, num_pipelines=1, schedule="1f1b"):
    """A measured step of two stages and eight microbatches, with a step of the optimizer of 5 ms."""
    portals = Portals.of(STAGES)
    times = simulate(
        make_schedule(schedule, 2, 8),
        portals,
        forward_seconds=forward,
        backward_seconds=[2 * f for f in forward] if isinstance(forward, list) else 2 * forward,
        transfer_seconds=transfer,
    )
    end = times.makespan_seconds
    optimizer = [Span(rank, Action(Kind.OPTIMIZER, 0), end, end + 0.005) for rank in range(2)]
    spans = tuple(
        span._replace(rank=span.rank + 2 * first)
        for first in range(num_pipelines)
        for span in (*times.spans, *optimizer)
    )
    lanes = 2 * num_pipelines
    columns = {"rank": list(range(lanes)), "pipeline": [0, 1] * num_pipelines}
    return MeasuredStep(
        Timeline(spans, lanes),
        (),
        columns,
        group_size=2,
        portals=portals,
        inputs=((-wait, 0.0),) * lanes,
    )


def measured(*steps):
    collected = MeasuredSteps()
    for number, step in enumerate(steps):
        assert collected.add(10 * (number + 1), step, STAGES) is not None
    return collected


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (pipeline(), "bubble"),
        (pipeline([0.01, 0.02]), "imbalance"),
        (pipeline(transfer=0.01), "communication"),
        (pipeline(wait=0.2), "input"),
    ],
    ids=["equal stages", "slow stage", "slow link", "late batch"],
)
def test_the_planted_cause_is_named(step, cause):
    first, headings, *rows = measured(step).lines(STAGES)
    assert (
        first.startswith("step 10 took ")
        and f"besides work and the optimizer the largest loss is {'fill+drain' if cause == 'bubble' else cause}, "
        in first
    )
    assert headings.split() == [
        *("ms", "work", "fill+drain", "imbalance", "variation", "communication", "input", "host", "optimizer")
    ]
    assert [row.split()[0] for row in rows[:4]] == ["step", "share", "rank", "rank"]
    total = [float(cell) for cell in rows[0].split()[1:]]
    assert sum(total) == pytest.approx(1000 * measured(step).typical.lost.total.step_seconds, abs=0.5)
    metrics = metrics_of(measured(step).typical.lost.total)
    shares = {name.split("/")[1]: share for name, share in metrics.items() if name != "lost_time/step_seconds"}
    assert max(shares, key=shares.get) == cause
    assert metrics["lost_time/step_seconds"] == pytest.approx(sum(total) / 1000, abs=5e-4)


def test_the_slowest_stage_and_the_cuts_are_named():
    lines = measured(pipeline([0.01, 0.03])).lines(STAGES)
    assert lines[-2] == (
        "slowest stage: 1 (blocks.4 to blocks.7), forward 30.0 ms, backward 60.0 ms per microbatch,"
        " 1.50 times the mean stage"
    )
    # Stages of 52.5 and 67.5 ms in place of 30 and 90.
    assert lines[-1].startswith("pipeline_cuts=['blocks.5'] is predicted to take 597.5 ms per step instead of 755.0 ms")
    split = measured(pipeline([0.01, 0.03], schedule="zero_bubble")).lines(STAGES)
    assert "forward 30.0 ms, backward 30.0 ms, weights 30.0 ms per microbatch" in split[-2]
    assert (
        measured(pipeline()).lines(STAGES)[-1] == "no other pipeline_cuts are predicted to save more than 3% of a step"
    )


def test_the_step_of_median_length_is_shown():
    collected = measured(pipeline(0.02), pipeline(0.01), pipeline(0.03))
    assert collected.typical.step == 10
    assert collected.lines(STAGES)[0].startswith("step 10 (of median length of 3) took 545.0 ms")
    assert collected.stages[0].forward == pytest.approx(0.02)  # median of all


def test_rows_of_all_pipelines():
    two = measured(pipeline([0.01, 0.02], num_pipelines=2))
    assert two.typical.lost.total == measured(pipeline([0.01, 0.02])).typical.lost.total
    assert [line.split("  ")[0] for line in two.lines(STAGES)[4:8]] == [f"rank {rank}" for rank in range(4)]


def test_other_stages_forget_the_steps_before():
    collected = measured(pipeline(), pipeline())
    other = assignment()
    collected.add(30, pipeline([0.01, 0.02]), other)
    assert [step.step for step in collected.steps] == [30] and collected.assignment is other
    assert collected.proposal() is not None and collected.lines(other)[-1].startswith("pipeline_cuts=")
    assert "the stages have changed since" in collected.lines(assignment())[-1]


def test_parts_of_pipelines_and_repeated_actions_are_not_analyzed():
    part = MeasuredStep(pipeline().timeline, (), {"rank": [0, 1]}, group_size=1)
    assert analyze_step(1, part, STAGES) is None
    spans = [Span(0, Action(Kind.F, 0, 0), at, at + 1.0) for at in (0.0, 2.0)]
    assert analyze_step(1, MeasuredStep(Timeline(tuple(spans), 1), (), {"rank": [0]}, group_size=1), None) is None
    empty = MeasuredStep(Timeline((), 1), (), {"rank": [0]}, group_size=1)
    assert analyze_step(1, empty, None) is None and MeasuredSteps().proposal() is None


def replicas():
    """Two replicas without stages, of which the second waits for its batch, and the first for the second."""
    rows = [
        [(Kind.F, 0, 1.0), (Kind.B, 1.0, 3.0), (Kind.REDUCE, 3.0, 7.0), (Kind.OPTIMIZER, 7.0, 7.5)],
        [(Kind.F, 3.0, 4.0), (Kind.B, 4.0, 6.0), (Kind.REDUCE, 6.0, 7.0), (Kind.OPTIMIZER, 7.0, 7.5)],
    ]
    spans = [
        Span(rank, Action(kind, 0, 0) if kind in (Kind.F, Kind.B) else Action(kind, 0), start, end)
        for rank, row in enumerate(rows)
        for kind, start, end in row
    ]
    inputs = ((-1.0, 0.0), (-1.0, 3.0))
    return MeasuredStep(Timeline(tuple(spans), 2), (), {"rank": [0, 1]}, group_size=1, inputs=inputs)


def test_runs_without_stages_have_no_bubble():
    collected = MeasuredSteps()
    assert collected.add(1, replicas(), None) is not None
    first, second = collected.typical.lost.ranks
    assert (first.work, first.communication, first.input) == pytest.approx((3.0, 4.0, 1.0))
    assert (second.work, second.communication, second.input) == pytest.approx((3.0, 1.0, 4.0))
    lines = collected.lines(None)
    assert len(lines) == 6 and lines[1].split() == ["ms", "work", "communication", "input", "host", "optimizer"]


def test_seconds_of_the_host_before_and_between_actions():
    spans = [Span(0, Action(kind, 0, 0), at, at + 1.0) for kind, at in ((Kind.F, 0.5), (Kind.B, 1.75))]
    collected = MeasuredSteps()
    collected.add(1, MeasuredStep(Timeline(tuple(spans), 1), (), {"rank": [0]}, 1, inputs=((-0.1, 0.0),)), None)
    assert collected.lines(None)[-1] == (
        "host, of rank 0: 500.0 ms before the first action (callbacks, split of the batch, dry runs, comparisons of"
        " microbatches), 250.0 ms between actions (Python)"
    )


def test_files(tmp_path):
    collected = measured(pipeline([0.01, 0.03], wait=0.2), pipeline([0.01, 0.03]))
    path = write_lost_time(collected, tmp_path / "pictures" / "step.svg")
    assert path == tmp_path / "pictures" / "step_lost_time.json"
    content = json.loads(path.read_text())
    assert [step["step"] for step in content["steps"]] == [10, 20]
    assert content["steps"][0]["total"]["input"] == pytest.approx(0.2)
    assert content["steps"][0]["ranks"][1]["rank"] == 1 and content["steps"][0]["ranks"][1]["input"] == pytest.approx(
        0.2
    )
    assert [stage["units"] for stage in content["stages"]] == [["blocks.0", "blocks.3"], ["blocks.4", "blocks.7"]]
    assert content["pipeline_cuts"] == ["blocks.5"] and 0.1 < content["predicted_gain"] < 0.3


def trainer_with(folder, **options):
    strategy = SimpleNamespace(
        layout=ParallelLayout(pipeline_parallel_size=2),
        options=SimpleNamespace(
            stages_of_each_rank=1, stages_per_rank=1, schedule="1f1b", pipeline_cuts=None, **options
        ),
        root_device=torch.device("cpu"),
    )
    return SimpleNamespace(
        strategy=strategy,
        checkpoint_callback=None if folder is None else SimpleNamespace(dirpath=folder),
        num_nodes=1,
        precision="32-true",
    )


def test_measured_costs_are_kept_beside_the_checkpoints(tmp_path):
    collected = measured(pipeline([0.01, 0.03]))
    assert write_measured_costs(trainer_with(None), collected, 32) is None
    assert write_measured_costs(trainer_with("s3://bucket"), collected, 32) is None
    assert write_measured_costs(trainer_with(str(tmp_path)), collected, 30) == tmp_path / "measured_costs.json"
    costs = load_measured_costs(tmp_path)
    assert (costs.num_microbatches, costs.microbatch_size, costs.steps) == (8, 4, (10,))
    assert costs.layout["pp"] == 2 and costs.hardware["device_type"] == "cpu" and costs.cuts == ("blocks.4",)
    assert [stage.forward for stage in costs.stages] == pytest.approx([0.01, 0.03])
    assert [unit.forward for unit in costs.units] == pytest.approx([0.0025] * 4 + [0.0075] * 4)
    assert costs.step.imbalance > costs.step.bubble


class Strategy:
    """One rank of a run in stages."""

    global_rank = 0

    def __init__(self, module):
        self.run = SimpleNamespace(is_pipelined=True, plan=SimpleNamespace(num_stages=2, widths=(), root=module))
        self.options = SimpleNamespace(pipeline_cuts=None)
        self.lightning_module = SimpleNamespace(trainer=SimpleNamespace(callbacks=[]))

    def broadcast(self, value):
        return value


def module_of(count=8):
    module = torch.nn.Module()
    module.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(count))
    return module


def test_cuts_within_the_noise_are_not_chosen():
    module, cuts = module_of(), RebalancedCuts()
    nearly = measured(pipeline([0.0100, 0.0101]))
    cuts.propose(Strategy(module), nearly, 10)
    assert cuts.pending is None and cuts.state_dict() == {}
    slow = measured(pipeline([0.01, 0.03]))
    cuts.propose(Strategy(module), slow, 10)
    assert cuts.pending == ["blocks.5"]
    cuts.propose(Strategy(module), nearly, 20)  # more measurements have not confirmed it
    assert cuts.pending is None and cuts.state_dict() == {}


def test_a_gain_below_the_noise_is_not_proposed():
    """The gain is a share of the step, most of which is the wait for its batch here."""
    cuts, late = RebalancedCuts(), measured(pipeline([0.01, 0.03], wait=20.0))
    search = CutSearch(STAGES.graph, 2, late.typical.schedule, seconds_of_nodes(STAGES, late.stages))
    gain = search.simulated(STAGES) - search.seconds(search.fastest_of_others(()))
    assert 0 < gain / late.step_seconds < 0.03
    cuts.propose(Strategy(module_of()), late, 10)
    assert late.proposal() is None and cuts.pending is None


@pytest.fixture
def chosen():
    cuts = RebalancedCuts()
    cuts.propose(Strategy(module_of()), measured(pipeline([0.01, 0.03])), 10)
    return cuts


def test_cuts_of_a_checkpoint_begin_the_next_run(chosen):
    later = RebalancedCuts()
    later.load_state_dict(json.loads(json.dumps(chosen.state_dict())))
    assert later.pending is None
    assert later.cuts_of_start(module_of(), None, 2) == ["blocks.5"]
    assert later.state_dict() == chosen.state_dict()  # for the run after that
    assert RebalancedCuts().cuts_of_start(module_of(), None, 2) is None


@pytest.mark.parametrize(
    ("module", "cuts", "num_stages"),
    [(module_of(), ["blocks.3"], 2), (module_of(), None, 4), (module_of(9), None, 2)],
    ids=["the user's cuts", "more stages", "another module"],
)
def test_cuts_for_other_stages_are_not_used(chosen, module, cuts, num_stages):
    assert chosen.cuts_of_start(module, cuts, num_stages) is None


def test_applied_cuts_stay_in_checkpoints(chosen):
    state = chosen.state_dict()
    chosen.applied()
    assert chosen.pending is None and chosen.state_dict() == state
