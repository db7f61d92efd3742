"""A planted difference is found, named, and shown with both numbers; noise is not reported."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.verify.compare import AT_THE_END, compare
from lightning_hybrid.verify.layouts import Layout, layout_of_options, parse_layout
from lightning_hybrid.verify.record import Failure, RunRecord, StepRecord, describe_failure
from lightning_hybrid.verify.verification import Report, _failed, table


def weights(step):
    return {name: torch.full((3,), 1.0 + 0.1 * step, dtype=torch.float64) for name in ("a.weight", "b.weight")}


def run_of(num_steps=3):
    steps = [
        StepRecord(
            loss=1.0 / step,
            metrics={"loss": 1.0 / step, "acc": 0.5},
            learning_rates=[0.1],
            grad_norms={"a.weight": 2.0, "b.weight": 3.0},
            weights=weights(step),
        )
        for step in range(1, num_steps + 1)
    ]
    return RunRecord(
        start=weights(0),
        steps=steps,
        validations=[{"val_loss": 0.25}],
        metrics={"val_loss": 0.25},
        weights=weights(num_steps),
        buffers={"running": torch.ones(2), "count": torch.tensor(3)},
        trained=["a.weight", "b.weight"],
        replica_losses=[[1.0 / step] for step in range(1, num_steps + 1)],
    )


def found(change, *, precision="64-true", noise=None, ranks=1):
    reference, noisy = run_of(), run_of()
    seen = [run_of() for _ in range(ranks)]
    for observed in seen:
        observed.replica_losses = []
    change(seen[-1])
    if noise is not None:
        noise(noisy)
    return compare(seen, reference, noisy, precision=precision)


def set_loss(observed):
    observed.steps[1].loss = 0.75


def set_metric(observed):
    observed.steps[0].metrics["acc"] = 0.25


def drop_metric(observed):
    del observed.steps[0].metrics["acc"]


def add_metric(observed):
    observed.steps[0].metrics["extra"] = 1.0


def set_rate(observed):
    observed.steps[2].learning_rates = [0.05]


def set_norm(observed):
    observed.steps[0].grad_norms["b.weight"] = 6.0


def set_weight(observed):
    observed.steps[1].weights["b.weight"][2] += 1e-3


def do_not_move(observed):
    observed.steps[2].weights["a.weight"] = weights(0)["a.weight"]


def lose_weight(observed):
    del observed.steps[2].weights["a.weight"]


def set_start(observed):
    observed.start["a.weight"][0] = 0.0


def set_validation(observed):
    observed.validations[0]["val_loss"] = 0.5


def set_buffer(observed):
    observed.buffers["count"] = torch.tensor(4)


def set_nan(observed):
    observed.steps[0].loss = float("nan")


def skip_last_step(observed):
    observed.steps.pop()


PLANTED = {
    set_loss: (2, "loss", 0.5, 0.75),
    set_metric: (1, "metric acc", 0.5, 0.25),
    drop_metric: (1, "metric acc", 0.5, None),
    add_metric: (1, "metric extra", None, 1.0),
    set_rate: (3, "learning rate of group 0", 0.1, 0.05),
    set_norm: (1, "gradient norm of b.weight", 3.0, 6.0),
    set_weight: (2, "update of b.weight", 1.2, 1.201),
    do_not_move: (3, "update of a.weight", 1.3, 1.0),
    lose_weight: (3, "update of a.weight", 1.3, None),
    set_start: (0, "initial weights of a.weight", 1.0, 0.0),
    set_validation: (AT_THE_END - 1, "metric after validation 1: val_loss", 0.25, 0.5),
    set_buffer: (AT_THE_END, "buffer count", 3.0, 4.0),
    set_nan: (1, "loss", 1.0, None),
    skip_last_step: (3, "loss", 1 / 3, None),
}


@pytest.mark.parametrize("change", PLANTED, ids=lambda change: change.__name__)
def test_planted_difference_is_named_first(change):
    step, what, reference, value = PLANTED[change]
    first = found(change)[0]
    assert (first.key.step, str(first.key)) == (step, what)
    for number, expected in ((first.reference, reference), (first.value, value)):
        assert number != number if expected is None else number == pytest.approx(expected)
    assert what in str(first) and f"rank {first.rank}" in str(first)


def test_equal_runs_have_no_difference():
    assert found(lambda observed: None) == []


def test_update_difference_is_relative_to_the_update():
    def change(observed):
        observed.steps[0].weights["a.weight"] += 1e-9  # 1e-8 of the update of 0.1

    [first] = found(change)
    assert first.difference == pytest.approx(1e-8, rel=1e-3)


def test_differing_element_is_named():
    def run(value):
        observed = run_of()
        observed.predictions = {"0, batch 1": torch.tensor([[0.0, 1.0], [2.0, value]], dtype=torch.float64)}
        return observed

    seen = run(3.5)
    seen.replica_losses = []
    [first] = compare([seen], run(3.0), run(3.0), precision="64-true")
    assert str(first).startswith("after the run: prediction 0, batch 1, at [1, 1], is 3.5 on rank 0 and 3 in the ref")
    seen.predictions["0, batch 1"] = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float64) + 0j
    seen.predictions["0, batch 1"][1, 0] += 1j
    reference, noisy = run(3.0), run(3.0)
    for observed in (reference, noisy):
        observed.predictions = {name: value + 0j for name, value in observed.predictions.items()}
    [first] = compare([seen], reference, noisy, precision="64-true")
    assert (first.element, first.reference, first.value) == ((1, 0), 0.0, 1.0)
    assert ", at [" not in str(found(set_loss)[0])


def test_shape_mismatch_is_reported():
    [first] = found(lambda observed: observed.buffers.update(running=torch.ones(3)))
    assert str(first) == "after the run: buffer running has the shape (3,) on rank 0 and (2,) in the reference"


def test_noise_is_no_difference():
    def planted(observed):
        observed.steps[1].weights["b.weight"] += 1e-6

    def noise(noisy):
        noisy.steps[1].weights["b.weight"] += 1e-7

    assert found(planted) and not found(planted, noise=noise)
    assert not found(planted, precision="32-true")


def test_margin_is_the_largest_share_of_a_limit():
    observed, noisy, margins = run_of(), run_of(), []
    observed.steps[1].loss *= 1 + 1e-12
    observed.steps[0].metrics["acc"] *= 1 + 3e-11
    noisy.steps[0].metrics["acc"] *= 1 + 1e-11
    observed.replica_losses = []
    assert compare([observed], run_of(), noisy, precision="64-true", margins=margins) == []
    nearest = max(margins)
    assert nearest.difference == pytest.approx(3e-11, rel=1e-3) and nearest.limit == pytest.approx(5e-10, rel=1e-3)
    report = Report("pp=2", "same", steps=2, largest=nearest.difference, limit=nearest.limit)
    assert "3e-11, limit 5e-10" in table([report]) and "none" in table([Report("pp=2", "same", steps=2)])


def test_each_rank_is_compared():
    assert [d.rank for d in found(set_metric, ranks=3)] == [2]


def test_parameter_may_be_on_any_one_rank():
    assert found(lose_weight) and not found(lose_weight, ranks=2)


def test_replica_is_compared_with_its_own_loss_and_buffers():
    reference = run_of()
    reference.replica_losses = [[1.0, 3.0]] * 3
    reference.replica_buffers = [dict(reference.buffers), {**reference.buffers, "running": torch.zeros(2)}]
    second = run_of()
    second.replica, second.replica_losses = 1, []
    for step in second.steps:
        step.loss = 3.0
    second.buffers["running"] = torch.zeros(2)
    noisy = copy.deepcopy(reference)
    assert compare([second], reference, noisy, precision="64-true") == []
    second.replica = 0
    names = {str(d.key) for d in compare([second], reference, noisy, precision="64-true")}
    assert names == {"loss", "buffer running"}


def test_float32_metric_has_float32_tolerance():
    def change(observed):
        observed.steps[0].metrics["acc"] = 0.5 + 1e-7

    assert found(change)
    reference = run_of()
    reference.coarse = {"acc"}
    seen = run_of()
    change(seen)
    assert compare([seen], reference, run_of(), precision="64-true") == []


def test_refusal_is_distinguished_from_a_crash():
    def failure_of(function, steps_done=0):
        try:
            function()
        except Exception as error:
            return describe_failure(error, steps_done=steps_done)

    def refuse():
        from lightning_hybrid.layout import ParallelLayout

        ParallelLayout.resolve(3, data_parallel_size="auto", pipeline_parallel_size=2)

    assert failure_of(refuse).refused
    assert not failure_of(refuse, steps_done=1).refused  # too late: parameters have changed
    assert not failure_of(lambda: torch.ones(2) @ torch.ones(3)).refused


def test_layouts_are_parsed():
    layout = parse_layout("dp=2,pp=2,stages=2,schedule=interleaved_1f1b")
    assert (layout.devices, layout.replicas, layout.num_stages) == (4, 2, 4)
    assert layout.options(3) == {
        "num_microbatches": 3,
        "data_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "stages_per_rank": 2,
        "schedule": "interleaved_1f1b",
    }
    assert parse_layout("dp2 x pp2xtp2").strategy == parse_layout("dp=2,pp=2,tp=2").strategy
    assert parse_layout("dp2 x pp2xtp2").devices == 8
    layout = parse_layout("dp=2,offload={optimizer_states: cpu, 'parameters': 'disk:/x'},recompute=[a.*, b],zero=3")
    assert layout.strategy["offload"] == {"optimizer_states": "cpu", "parameters": "disk:/x"}
    assert layout.strategy["recompute"] == ["a.*", "b"] and layout.strategy["zero_stage"] == 3 and layout.devices == 2
    layout = parse_layout('recompute={"a.*": 0.3, "b": "keep"},compile={"backend": "eager"}')
    assert layout.strategy == {"recompute": {"a.*": 0.3, "b": "keep"}, "compile": {"backend": "eager"}}
    assert parse_layout("recompute=0.4,timeout=None").strategy == {"recompute": 0.4, "timeout": None}
    assert parse_layout(layout_of_options(layout.strategy).name).strategy == layout.strategy
    replicas = layout_of_options({"pipeline_parallel_size": 2, "num_microbatches": 4}, 4)
    assert replicas.name == "dp=2,pp=2,m=4" and "data_parallel_size" not in replicas.strategy
    assert layout_of_options({"pipeline_parallel_size": 2, "data_parallel_size": "auto"}, 6).name == "dp=3,pp=2"
    assert layout_of_options({"pipeline_parallel_size": 2}).name == "pp=2"
    with pytest.raises(ValueError, match="1' is no YAML"):
        parse_layout("pp=2,offload={a: 1")
    assert parse_layout("pp=2,m=4").options(3)["num_microbatches"] == 4
    plan = ["*.up=colwise", "*.down=rowwise"]
    assert parse_layout("tp=2", plan).strategy["tensor_parallel_plan"] == {"*.up": "colwise", "*.down": "rowwise"}
    assert "tensor_parallel_plan" not in parse_layout("pp=2", plan).strategy
    with pytest.raises(ValueError, match="--tensor-plan 'up'"):
        parse_layout("tp=2", ["up"])
    for wrong in ("pp", "pp=", "pp=two", "pp=0"):
        with pytest.raises(ValueError, match="--layout"):
            parse_layout(wrong)
    with pytest.raises(ValueError, match="3 processes"):
        Layout("odd", 3, {"pipeline_parallel_size": 2})


def test_table_says_why():
    reports = [Report("pp=2", "same", steps=4, floor=1e-15), Report("dp=2", "different", "step 1: loss is 1")]
    text = table(reports)
    assert "pp=2" in text and "step 1: loss is 1" in text


def test_table_has_the_batch_and_no_empty_column():
    same = Report("pp=2", "same", steps=4, batch=(2, 2, 16), num_parameters=26, num_weak=13)
    weak = replace(same, num_weak=22)
    text = table([same])
    assert "batch" in text and "2 x 2 x 16" in text
    assert "why" not in text and "weak" not in text
    assert "same (weak)" in table([weak])
    assert weak.outcome == "same" and weak.passes()
    assert "2 x 2 x ?" in table([replace(same, batch=(2, 2, 0))])


def test_failure_after_some_steps_counts_them():
    ranks = [run_of(), run_of()]
    ranks[1].failure = Failure("ValueError: no", refused=False, where="there.py:1")
    report = _failed(parse_layout("dp=2"), ranks)
    assert (report.outcome, report.steps) == ("failed", len(ranks[1].steps)) and report.steps
    rows = [line for line in table([report]).splitlines() if "failed" in line]
    assert "rank 1: ValueError: no (there.py:1)" in rows[0]


def test_rank_that_lost_its_peer_is_not_the_failed_one():
    ranks = [run_of(), run_of()]
    lost = dist.DistNetworkError("rank 1 has closed its connections")
    ranks[0].failure = describe_failure(lost, steps_done=1)
    ranks[1].failure = Failure("StepError: no", refused=True, where="there.py:1")
    report = _failed(parse_layout("pp=2"), ranks)
    assert report.outcome == "failed" and report.message == "rank 1: StepError: no (there.py:1)"
    # One that was stopped by a refusal, before anything changed, makes no failure of it.
    ranks[0].failure = describe_failure(lost, steps_done=0)
    report = _failed(parse_layout("pp=2"), ranks)
    assert report.outcome == "refused" and report.message == "StepError: no"
    ranks[1].failure = describe_failure(lost, steps_done=0)
    assert _failed(parse_layout("pp=2"), ranks).outcome == "failed"


def in_32_bits(observed, step):
    """Weights around 1 that each training step moves by `step`."""
    observed.start = {"w": torch.linspace(1.0, 1.5, 5)}
    for index, one in enumerate(observed.steps):
        one.weights = {"w": observed.start["w"] + (index + 1) * step}
    observed.weights = observed.steps[-1].weights
    observed.trained = ["w"]


def test_weight_perturbation_is_no_noise_of_its_update():
    reference, noisy, seen = run_of(), run_of(), run_of()
    for observed in (reference, noisy, seen):
        in_32_bits(observed, 3e-6)
    # Half of the update is missing; the perturbation is as large, but is constant from the start.
    noisy.perturbed = {"w": noisy.start["w"] + 3e-6}
    for one in noisy.steps:
        one.weights = {"w": one.weights["w"] + 3e-6}
    noisy.weights = noisy.steps[-1].weights
    for one in seen.steps:
        one.weights = {"w": (seen.start["w"] + one.weights["w"]) / 2}
    seen.replica_losses = []
    different = compare([seen], reference, noisy, precision="32-true")
    assert different and str(different[0].key) == "update of w", different


@pytest.mark.parametrize(("digits", "outcome"), [(2, False), (40, True)])
def test_last_digits_of_a_weight_may_differ(digits, outcome):
    reference, seen = run_of(), run_of()
    for observed in (reference, seen):
        in_32_bits(observed, 3e-6)
    seen.steps[0].weights = {"w": seen.steps[0].weights["w"] + digits * torch.finfo(torch.float32).eps}
    seen.replica_losses = []
    assert bool(compare([seen], reference, reference, precision="32-true")) == outcome
