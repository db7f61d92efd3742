"""Predictions corrected by measured costs: the measured layout is predicted as measured, other runs are not used."""

import dataclasses
import math
import re

import pytest

from lightning_hybrid.predict.correction import Correction, LinearCorrection, difference
from lightning_hybrid.predict.costs.layers import checksum_of_names
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout
from lightning_hybrid.predict.measured import compared_lines, corrected, corrected_by, measured_layout
from lightning_hybrid.predict.plans import PredictedMemory, PredictedTime
from lightning_hybrid.predict.search import predict_plan, search_layouts
from lightning_hybrid.schedule.measured.lost_time import TimeByCause
from lightning_hybrid.schedule.measured.seconds import FILE_NAME, MeasuredCosts, StageSeconds, save_measured_costs

A100 = load_hardware("a100-80")
FORMAT = FORMATS["bf16-mixed"]
COSTS = dataclasses.replace(
    transformer_costs(TransformerShape(8, 1024, 4096, 16, 32000, 1024)),
    names_checksum=checksum_of_names(["a", "b"]),
    sample_elements=2048.0,
)
STEP = TimeByCause(work=0.3, bubble=0.05, imbalance=0.01, communication=0.04, input=0.002, other=0.01, optimizer=0.02)


def run_of(pp=1, dp=1, tp=1, *, steps=(STEP, STEP, STEP), microbatches=4, batch_size=16, zero=0, **fields):
    """Measured costs of steps 10, 20, ... of a run."""
    numbers = tuple(10 * (index + 1) for index in range(len(steps)))
    costs = MeasuredCosts(
        hardware={"device": "NVIDIA A100-SXM4-80GB", "device_type": "cuda", "num_hosts": 1},
        software={"precision": "bf16-mixed"},
        layout={"pp": pp, "dp_replicate": dp, "dp_shard": 1, "cp": 1, "tp": tp, "ep": 1, "stages_per_rank": 1},
        schedule="1f1b" if pp > 1 else "",
        num_microbatches=microbatches,
        microbatch_size=batch_size // microbatches,
        steps=numbers,
        step=steps[0],
        stages=tuple(StageSeconds(stage, 0.01, 0.02) for stage in range(pp)) if pp > 1 else (),
        model={
            "name": "Decoder",
            "parameters": COSTS.parameters,
            "names_checksum": COSTS.names_checksum,
            "sample_elements": 2048.0,
        },
        options={"zero_stage": zero, "schedule": "1f1b", "recompute": None},
        batch_size=batch_size,
        step_times=steps,
        peak_memory=(3_000_000_000, 4_000_000_000),
    )
    return dataclasses.replace(costs, **fields)


def corrected_costs(run, hardware=A100, costs=COSTS):
    found = corrected_by(costs, FORMAT, hardware, run, "the file")
    assert found.correction is not None, found.notes
    return found


def scaled(factor, step=STEP):
    return TimeByCause(**{name: factor * seconds for name, seconds in step.seconds().items()})


RUNS = {
    "one device": run_of(),
    "replicas": run_of(dp=4),
    "ZeRO-3": run_of(dp=4, zero=3),
    "stages and replicas": run_of(pp=2, dp=2),
    "tensor ranks": run_of(tp=2, dp=2),
    "fifty times as long": run_of(pp=2, dp=2, steps=(scaled(50),) * 3),
    "little of the optimizer": run_of(dp=4, steps=(dataclasses.replace(STEP, optimizer=1e-6, communication=0.0),)),
    "little memory": run_of(pp=2, peak_memory=(2_000_000_000,)),
    "much memory": run_of(pp=2, peak_memory=(40_000_000_000,)),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_measured_layout_is_predicted_as_measured(run):
    layout = measured_layout(run)
    plan = predict_plan(corrected_costs(run), layout, FORMAT, A100)
    measured = run.step_times[0]
    assert plan.time.seconds == pytest.approx(measured.step_seconds, rel=1e-9)
    assert plan.time.seconds == pytest.approx(sum(plan.time.terms.values()))
    assert plan.time.terms["input"] == measured.input
    assert plan.time.terms["optimizer"] == pytest.approx(measured.optimizer)
    assert plan.memory.tensors == pytest.approx(max(run.peak_memory), rel=1e-9)
    without = predict_plan(COSTS, layout, FORMAT, A100)
    assert without.time.seconds != pytest.approx(measured.step_seconds, rel=0.01)


def test_layout_of_a_run():
    run = run_of(pp=2, dp=2, options={"zero_stage": 1, "shard_size": 2, "recompute": "full", "offload": None})
    layout = measured_layout(run)
    assert (layout.pipeline, layout.replicate, layout.shard, layout.microbatch, layout.batch) == (2, 1, 2, 4, 32)
    assert (layout.zero_stage, layout.recompute, layout.num_microbatches) == (1, "full", 4)


OTHERS = {
    "another model": (
        run_of(model={"name": "Other", "parameters": 5}),
        r"Other has 5 parameters, and the planned .* has",
    ),
    "other names": (
        run_of(model={"name": "Other", "names_checksum": 1}),
        "parameters of the measured Other have other",
    ),
    "longer samples": (run_of(model={"sample_elements": 8192}), "8,192 elements, and those of a planned one 2,048"),
    "another precision": (
        run_of(software={"precision": "32-true"}),
        "with precision 32-true, and the plan is for bf16",
    ),
    "an unknown precision": (run_of(software={"precision": "odd"}), "precision='odd' is unknown to the planner"),
    "another device": (
        run_of(hardware={"device": "NVIDIA H100 80GB HBM3", "device_type": "cuda"}),
        "measured on NVIDIA H100 80GB HBM3, the plan is for a100-80",
    ),
    "a CPU": (run_of(hardware={"device": "a CPU", "device_type": "cpu"}), "measured on a CPU, the plan is for a100-80"),
    "the first steps": (run_of(first_step=29), r"no step after the first 3 of its run; set step=4 or more"),
    "shards in place of stages": (run_of(pp=2, stages=()), "sharded over pipeline ranks in place of stages"),
    "more stages than layers": (run_of(pp=16), "too few for 16 stages"),
    "a much faster device": (run_of(pp=2, steps=(scaled(1e-3),)), "less than a tenth of their time; give the hardware"),
    "no layout": (run_of(layout={}), "it does not say 'dp_replicate'"),
}
OTHERS["an unknown batch"] = (
    dataclasses.replace(run_of(), batch_size=None),
    "number of samples of its batches is unkn",
)


@pytest.mark.parametrize(("run", "reason"), OTHERS.values(), ids=OTHERS)
def test_other_runs_are_not_used(run, reason):
    found = corrected_by(COSTS, FORMAT, A100, run, "FILE")
    *others, note = found.notes
    assert found.correction is None and tuple(others) == COSTS.notes
    assert note.startswith("the measured costs of FILE are not used: ")
    assert re.search(reason, note), note


def test_what_is_unknown_is_not_compared():
    run = run_of(model={"name": "Decoder"}, hardware={"device": "a new device", "device_type": "cuda", "num_hosts": 1})
    assert corrected_costs(run).correction is not None
    own = dataclasses.replace(A100, name="our-cluster")
    assert corrected_costs(run_of(), own).correction is not None


def test_the_note_has_both_numbers():
    note = corrected_costs(run_of(dp=4)).notes[-1]
    predicted = predict_plan(COSTS, measured_layout(run_of(dp=4)), FORMAT, A100)
    assert "432 ms of a step (median of 3 steps) against " in note and "dp=4,m=4;" in note
    assert f"{1e3 * predicted.time.seconds:,.3g} ms predicted" in note
    assert "4 GB of tensors measured against" in note


def test_the_median_of_the_later_steps_counts():
    steps = scaled(9), scaled(1.2), scaled(1.0), scaled(1.1)
    run = run_of(dp=4, steps=steps, first_step=8)  # the first of these is one of the first three of the run
    plan = predict_plan(corrected_costs(run), measured_layout(run), FORMAT, A100)
    assert plan.time.seconds == pytest.approx(1.1 * STEP.step_seconds)
    assert plan.time_error == pytest.approx((0.1 / 1.1 + 0.1 / 1.1) / 3)


def test_error_bars_grow_with_the_difference_of_layouts():
    step = dataclasses.replace(STEP, other=0.0, communication=0.0)
    costs = corrected_costs(run_of(dp=4, steps=(step,) * 3))
    at, near, far = (
        predict_plan(costs, layout, FORMAT, A100)
        for layout in (
            PlanLayout(replicate=4, microbatch=4, batch=64),
            PlanLayout(replicate=4, microbatch=8, batch=128),
            PlanLayout(pipeline=2, tensor=2, microbatch=1, batch=16),
        )
    )
    assert at.time_error == at.memory_error == 0.03
    assert 0.03 < near.time_error < far.time_error == 0.08
    assert 0.03 < near.memory_error < far.memory_error == 0.08
    few = corrected_costs(run_of(dp=4, steps=(step, step)))
    assert predict_plan(few, at.layout, FORMAT, A100).time_error == 0.08
    assert "fewer than 3 steps" in few.notes[-1]
    host = corrected_costs(run_of(dp=4, steps=(dataclasses.replace(STEP, other=0.3),) * 3))
    assert predict_plan(host, far.layout, FORMAT, A100).time_error > 0.3  # most of the step is not explained


def test_differences_of_layouts():
    one = PlanLayout(replicate=4, microbatch=4, batch=64)
    assert difference(one, one) == 0
    assert difference(one, one.replaced(microbatch=8, batch=128)) == 1
    assert difference(one, one.replaced(replicate=2, batch=32)) == 1
    assert difference(one, one.replaced(recompute="full", zero_stage=1, replicate=1, shard=4)) == 2
    sharded = one.replaced(zero_stage=1, replicate=1, shard=4)
    assert difference(sharded, sharded.replaced(replicate=2, shard=2)) == 1


def correction(**parts):
    names = "computation", "communication", "optimizer"
    return Correction(LAYOUT, **{name: parts.pop(name, LinearCorrection()) for name in names}, **parts)


LAYOUT, FAR = PlanLayout(replicate=4, microbatch=4, batch=64), PlanLayout(pipeline=4, replicate=4, tensor=4, batch=64)
TIME = PredictedTime(1.0, {"computation": 0.6, "bubble": 0.1, "replicas": 0.2, "optimizer": 0.1})


@pytest.mark.parametrize(("factor", "far"), [(1.1, 1.0), (0.9, 1.0), (4.0, 4.0**0.9867)], ids=["more", "less", "much"])
def test_a_small_factor_is_of_the_measured_layout(factor, far):
    """A factor within twice the error of predictions ends at layouts that differ much; a large one is of all."""
    found = correction(computation=LinearCorrection(factor))
    assert found.time(TIME, LAYOUT).terms["computation"] == pytest.approx(0.6 * factor)
    assert found.time(TIME, FAR).terms["computation"] == pytest.approx(0.6 * far, rel=1e-3)


def test_each_term_has_its_correction():
    found = correction(
        computation=LinearCorrection(2.0, 0.5),
        communication=LinearCorrection(3.0, 0.25),
        optimizer=LinearCorrection(0.5, 0.125),
        input_seconds=0.0625,
    ).time(TIME, LAYOUT)
    assert found.terms == pytest.approx(
        {
            "computation": 1.2,
            "bubble": 0.2,
            "replicas": 0.6,
            "optimizer": 0.175,
            "input": 0.0625,
            "unexplained": 0.75,
        }
    )
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    on_host = correction(optimizer=LinearCorrection(1.0, 0.5)).time(PredictedTime(1.0, {"host": 1.0}), LAYOUT)
    assert on_host.terms["host"] == 1.5 and "optimizer" not in on_host.terms


def test_a_factor_of_memory_below_1_is_of_the_measured_layout():
    """Other layouts must not be underestimated."""
    memory = PredictedMemory(({"parameters": 10.0, "framework": 3.0}, {"parameters": 8.0, "framework": 3.0}), 100.0)
    assert correction().bytes(memory, LAYOUT) is memory
    less = correction(memory=LinearCorrection(0.5))
    assert less.bytes(memory, LAYOUT).ranks[0] == {"parameters": 5.0, "framework": 3.0}
    assert less.bytes(memory, FAR).ranks[0] == {"parameters": 10.0, "framework": 3.0}
    more = correction(memory=LinearCorrection(2.0, 4.0)).bytes(memory, FAR)
    assert more.ranks[1] == {"parameters": 16.0, "framework": 3.0, "unexplained": 4.0}


def test_factors_are_bounded():
    unhidden = dataclasses.replace(A100, overlap=0.0)
    found = corrected_costs(run_of(dp=4, steps=(scaled(5000),) * 3), unhidden).correction
    assert found.computation.factor == found.communication.factor == 10
    assert found.unexplained_seconds > 0 and "that no factor explains" in corrected_costs(run_of(pp=2, dp=2)).notes[-1]
    memory = corrected_costs(run_of(peak_memory=(100_000_000_000,))).correction.memory
    assert memory.factor == 2 and memory.added > 0
    few = corrected_costs(run_of(peak_memory=(1_000_000,)))
    assert few.correction.memory is None and "memory is not corrected: 1 MB" in few.notes[-1]
    unmeasured = corrected_costs(run_of(peak_memory=()))
    assert unmeasured.correction.memory is None and "memory was not measured" in unmeasured.notes[-1]


def test_communication_has_no_factor_where_little_was_predicted():
    """Waits of a pipeline whose messages are small say nothing about reductions over replicas."""
    step = dataclasses.replace(STEP, communication=0.2)
    found = corrected_costs(run_of(pp=2, steps=(step,) * 3)).correction
    assert found.communication.factor == 1
    assert found.communication.added == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(("communication", "zero"), [(0.001, 0), (0.2, 3)], ids=["not seen", "ZeRO-3"])
def test_communication_within_layers_has_their_factor(communication, zero):
    """Reductions of gradients may run while backwards do: layers alone would be too slow, and reductions free."""
    slow = dataclasses.replace(A100, overlap=0.0, within_node=scaled_curve(A100.within_node, 1 / 20))
    step = dataclasses.replace(STEP, communication=communication)
    run = run_of(dp=4, zero=zero, steps=(step,) * 3)
    costs = corrected_costs(run, slow)
    assert costs.correction.communication.factor == costs.correction.computation.factor
    plan = predict_plan(costs, measured_layout(run), FORMAT, slow)
    assert plan.time.terms["replicas"] > 0.05 * plan.time.seconds
    assert plan.time.seconds == pytest.approx(step.step_seconds)


def scaled_curve(curve, share):
    return dataclasses.replace(curve, bandwidths=tuple(share * bandwidth for bandwidth in curve.bandwidths))


def test_search_predicts_with_the_correction():
    run = run_of(dp=4, steps=(scaled(4),) * 3)
    arguments = {"batch": 64, "fixed": {"num_microbatches": 4, "data": 4, "zero_stage": 0, "recompute": "none"}}
    result = search_layouts(corrected_costs(run), FORMAT, A100, 4, **arguments)
    without = search_layouts(COSTS, FORMAT, A100, 4, **arguments)
    assert result.best.layout == without.best.layout == measured_layout(run)
    assert result.best.time.seconds == pytest.approx(4 * STEP.step_seconds)


def test_files(tmp_path):
    assert corrected(COSTS, FORMAT, A100, None) is COSTS
    assert corrected(COSTS, FORMAT, A100, tmp_path) is COSTS  # there is no file
    path = tmp_path / "checkpoints" / FILE_NAME
    save_measured_costs(run_of(dp=4), path)
    expected = corrected_costs(run_of(dp=4)).correction
    for given in (path, str(path.parent), tmp_path):
        found = corrected(COSTS, FORMAT, A100, given)
        assert found.correction == expected and str(given) in found.notes[-1]
    path.write_text("{}")
    found = corrected(COSTS, FORMAT, A100, path)
    assert found.correction is None and "not used" in found.notes[-1] and "no file of measured costs" in found.notes[-1]


def test_predicted_beside_measured():
    run = run_of(dp=4)
    plan = predict_plan(COSTS, measured_layout(run), FORMAT, A100)
    first, head, *rows = compared_lines(plan, run)
    error = plan.time.seconds / STEP.step_seconds - 1
    assert first.endswith(f"measured 432 ms: the error of the prediction is {error:+.0%}")
    assert f"predicted {1e3 * plan.time.seconds:,.3g} ms ± 8%" in first
    assert head.split() == ["predicted", "measured", "error"]
    assert [row.split("  ")[0] for row in rows] == [
        *("layers, with the bubble", "communication", "optimizer", "input", "step", "memory of tensors")
    ]
    assert rows[3].split()[1:] == ["0", "ms", "2", "ms"]  # no error of what was not predicted
    exact = predict_plan(corrected_costs(run), plan.layout, FORMAT, A100)
    assert compared_lines(exact, run)[0].endswith("the error of the prediction is +0%")
    assert math.isclose(exact.time.seconds, STEP.step_seconds)


def test_another_layout_than_the_planned_is_not_compared():
    plan = predict_plan(COSTS, measured_layout(run_of(dp=4)), FORMAT, A100)
    [line] = compared_lines(plan, run_of(dp=4, microbatches=8))
    assert "its plan, dp=4,m=4 with 64 samples: it ran as dp=4,m=8 with 64" in line
    [line] = compared_lines(plan, dataclasses.replace(run_of(dp=4), batch_size=None))
    assert line == "the step is not compared with its plan: the number of samples of its batches is unknown"
    first, *_ = compared_lines(plan, run_of(dp=4, first_step=100))
    assert "one of the first steps of the run" in first
