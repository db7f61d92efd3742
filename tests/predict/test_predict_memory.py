"""The predicted memory of a rank against the formulas of the papers, and against what a schedule holds."""

import dataclasses

import pytest

from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout
from lightning_hybrid.predict.memory import in_flight_by_rank, predict_memory
from lightning_hybrid.schedule import SCHEDULE_NAMES, make_schedule, stages_of_each_rank
from lightning_hybrid.schedule.actions import Kind

A100 = load_hardware("a100-80")
MASTER = FORMATS["16-true, float32 master weights"]
S, H, HEADS, T = 1024, 2048, 16, 4
SHAPE = TransformerShape(
    8, H, 4 * H, HEADS, 50257, S, has_learned_positions=True, has_dropout=True, fused_attention=False
)
FEW_EXPERTS = dataclasses.replace(SHAPE, experts=8, experts_per_token=2)


def predict(layout, number_format=MASTER, shape=SHAPE):
    return predict_memory(transformer_costs(shape), layout, number_format, A100)


def terms(layout, number_format=MASTER, shape=SHAPE, rank=0):
    return predict(layout, number_format, shape).ranks[rank]


@pytest.mark.parametrize(
    ("expected", "layout"),
    [
        (34 + 5 * HEADS * S / H, PlanLayout(fused_attention=False)),
        (10 + 24 / T + 5 * HEADS * S / (H * T), PlanLayout(fused_attention=False, tensor=T)),
        (
            34 / T + 5 * HEADS * S / (H * T),
            PlanLayout(fused_attention=False, tensor=T, sequence_parallel=True),
        ),
        (10 + 24 / T, PlanLayout(fused_attention=False, tensor=T, recompute="selective")),
        (34 / T, PlanLayout(fused_attention=False, tensor=T, sequence_parallel=True, recompute="selective")),
        (2, PlanLayout(fused_attention=False, tensor=T, recompute="full")),
        (34 / 2, PlanLayout(context=2)),
    ],
)
def test_a_layer_saves_what_the_paper_says(expected, layout):
    """Korthikanti et al. (arXiv 2205.05198), table 2, in bytes per position and unit of width; two samples."""
    layout = layout.replaced(microbatch=2)
    more = dataclasses.replace(SHAPE, layers=SHAPE.layers + 1)
    added = terms(layout, shape=more)["activations"] - terms(layout)["activations"]
    assert added == pytest.approx(expected * S * 2 * H)


def test_context_ranks_do_not_divide_the_loss():
    """The head has no argument of its result's shape: each rank computes all positions."""
    one = PlanLayout(microbatch=2, batch=2, recompute="full")
    two = one.replaced(context=2)
    assert terms(two)["loss"] == terms(one)["loss"] > 0
    costs = transformer_costs(SHAPE)
    divided = [dataclasses.replace(layer, has_full_positions=False) for layer in costs.layers]
    found = predict_memory(dataclasses.replace(costs, layers=tuple(divided)), two, MASTER, A100).ranks[0]
    assert found["activations"] + found["loss"] < 0.6 * (terms(two)["activations"] + terms(two)["loss"])


@pytest.mark.parametrize(("stage", "expected"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_states_per_parameter_by_zero_stage(stage, expected):
    """Rajbhandari et al. (arXiv 1910.02054), section 5: Adam in mixed precision."""
    found = terms(PlanLayout(shard=8, zero_stage=stage, batch=16))
    states = found["parameters"] + found["gradients"] + found["optimizer states"]
    assert states == pytest.approx(expected * transformer_costs(SHAPE).parameters)


def test_tensor_and_expert_ranks_divide_what_they_shard():
    costs = transformer_costs(FEW_EXPERTS)
    layer = costs.layers[1]
    found = terms(PlanLayout(replicate=4, tensor=2, expert=4, batch=4), shape=FEW_EXPERTS)["parameters"] / 2
    sharded = costs.layers[0].sharded_parameters + layer.sharded_parameters * layer.count
    experts = layer.routed_parameters * layer.count
    assert found == pytest.approx(costs.parameters - sharded / 2 - experts * 7 / 8)


def test_the_last_rank_has_a_copy_of_the_tied_embedding():
    untied = dataclasses.replace(SHAPE, has_tied_embedding=False)
    layout = PlanLayout(pipeline=2, batch=4)
    assert terms(layout, rank=1)["parameters"] == pytest.approx(terms(layout, shape=untied, rank=1)["parameters"])
    assert transformer_costs(SHAPE).parameters < transformer_costs(untied).parameters


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages"),
    [(name, *sizes, 1) for name in SCHEDULE_NAMES for sizes in ((1, 1), (4, 3), (4, 9))]
    + [(name, *sizes) for name in ("gpipe", "1f1b", "interleaved_1f1b") for sizes in ((2, 5, 2), (3, 7, 3))],
)
def test_microbatches_in_flight_are_those_of_the_schedule(name, ranks, microbatches, stages):
    most = []
    for row in make_schedule(name, ranks, microbatches, stages).actions:
        held = peak = 0
        for action in row:
            held += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
            peak = max(peak, held)
        most.append(peak)
    assert [sum(row) for row in in_flight_by_rank(name, ranks, microbatches, stages)] == most


def test_gradients_that_are_reduced_in_each_microbatch_need_no_bucket():
    layout = PlanLayout(shard=4, batch=16, zero_stage=2, reshard_after_forward=True)
    each, once = terms(layout), terms(layout.replaced(reshard_after_forward=False))
    assert each["communication buffers"] == 0 < once["communication buffers"]
    assert each["gradients"] == once["gradients"]


def test_schedules_of_many_ranks_are_not_generated(monkeypatch):
    monkeypatch.setattr("lightning_hybrid.predict.memory.make_schedule", None)
    for name in SCHEDULE_NAMES:
        assert len(in_flight_by_rank(name, 1000, 5000, stages_of_each_rank(name, 1))) == 1000


def test_an_unknown_schedule_counts_as_1f1b():
    assert in_flight_by_rank("a schedule from elsewhere", 4, 8, 1) == in_flight_by_rank("1f1b", 4, 8, 1)


def test_earlier_ranks_of_1f1b_hold_more_activations():
    held = [rank["activations"] for rank in predict(PlanLayout(pipeline=4, batch=16)).ranks]
    assert held == sorted(held, reverse=True) and held[0] > 3 * held[3]


def test_the_first_rank_of_a_v_holds_the_first_and_the_last_stage():
    layout = PlanLayout(pipeline=4, batch=8, schedule="zero_bubble_v", stages_per_rank=2)
    predicted = predict(layout)
    assert [rank["loss"] > 0 for rank in predicted.ranks] == [True, False, False, False]
    again = predict(layout.replaced(stages_per_rank=1))
    assert again.ranks == predicted.ranks


def test_the_loss_is_on_the_last_rank_and_chunks_remove_it():
    layout = PlanLayout(pipeline=2, batch=4, recompute="full")
    logits = S * 50257
    assert terms(layout)["loss"] == 0
    assert terms(layout, rank=1)["loss"] == pytest.approx(14 * logits)
    assert terms(layout.replaced(chunked_loss=True), rank=1)["loss"] == 0
    gpipe = layout.replaced(schedule="gpipe")  # whose last rank has all microbatches in flight
    assert terms(gpipe, rank=1)["loss"] == pytest.approx((14 + 3 * 4) * logits)


def test_zero_3_gathers_layers_and_keeps_all_where_it_does_not_reshard():
    layout = PlanLayout(shard=8, zero_stage=3, batch=8, recompute="full", chunked_loss=True)
    kept = terms(layout.replaced(reshard_after_forward=False))["gathered"]
    costs = transformer_costs(SHAPE)
    assert 2 * 2 * costs.layers[1].parameters < terms(layout)["gathered"] < kept
    assert kept >= 2 * costs.parameters
    assert terms(layout.replaced(zero_stage=1))["gathered"] == 0


def test_zero_3_that_reduces_once_holds_the_gradients_of_all_layers():
    layout = PlanLayout(shard=8, zero_stage=3, batch=16, reshard_after_forward=False)
    sharded = terms(layout.replaced(reshard_after_forward=True))["gradients"]
    assert terms(layout)["gradients"] == pytest.approx(8 * sharded)
    assert terms(layout.replaced(microbatch=2, recompute="full"))["gradients"] in (0, sharded)


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer_states", "activations"])
def test_what_is_offloaded_takes_no_memory(kind):
    layout = PlanLayout(shard=2, zero_stage=3, batch=4, recompute="full", offload=frozenset({kind}))
    before, after = terms(layout.replaced(offload=frozenset())), terms(layout)
    name = kind.replace("_", " ")
    assert after[name] < before[name] if kind == "activations" else after[name] == 0 < before[name]


def test_frozen_parameters_have_neither_gradients_nor_states():
    costs = transformer_costs(SHAPE)
    frozen = dataclasses.replace(costs, frozen_parameters=costs.parameters)
    found = predict_memory(frozen, PlanLayout(), MASTER, A100).ranks[0]
    assert found["gradients"] == found["optimizer states"] == 0 < found["parameters"]


@pytest.mark.parametrize(("microbatch", "smaller"), [(8, ("gradients",)), (1, ("activations", "loss"))])
def test_gradients_of_one_microbatch_grow_while_activations_shrink(microbatch, smaller):
    layout = PlanLayout(shard=2, zero_stage=3, microbatch=microbatch, batch=2 * microbatch, recompute="full")
    layout = layout.replaced(chunked_loss=microbatch == 1)
    full, found = terms(layout.replaced(batch=4 * microbatch)), terms(layout)
    assert sum(full[name] for name in smaller) > 0 == sum(found[name] for name in smaller)
    assert {name for name in ("gradients", "activations") if found[name] == full[name]} == {
        "gradients",
        "activations",
    } - set(smaller)
    replicas = layout.replaced(replicate=2, shard=1, zero_stage=0)
    assert terms(replicas)["gradients"] > 0 < terms(replicas)["activations"]


def test_autocast_saves_parameters_in_the_format_of_products():
    layout, mixed = PlanLayout(batch=2), FORMATS["bf16-mixed"]
    sharded = dataclasses.replace(mixed, gathered=2)
    copies = terms(layout, mixed)["activations"] - terms(layout, sharded)["activations"]
    assert copies == pytest.approx(2 * transformer_costs(SHAPE).parameters)
    recomputed = layout.replaced(recompute="full")
    outside = transformer_costs(SHAPE).layers[0].parameters + transformer_costs(SHAPE).layers[2].parameters
    copies = terms(recomputed, mixed)["activations"] - terms(recomputed, sharded)["activations"]
    assert copies == pytest.approx(2 * outside)


def test_a_step_fits_without_what_the_allocator_gives_back():
    predicted = predict(PlanLayout(microbatch=4, batch=4))
    assert predicted.tensors < predicted.peak
    assert predicted.least < predicted.peak
    between = dataclasses.replace(predicted, capacity=(predicted.least + predicted.peak) / 2)
    assert between.fits
    assert not dataclasses.replace(predicted, capacity=predicted.least - 1).fits


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="10 layers, too few for 12 stages"):
        predict(PlanLayout(pipeline=12))


@pytest.mark.parametrize("name", ["zero_bubble_v", "dualpipe_v", "zero_bubble", "zero_bubble_searched", "eager_1f1b"])
def test_stages_that_a_schedule_never_has_are_refused(name):
    with pytest.raises(ValueError, match="per rank, not stages_per_rank=3"):
        predict(PlanLayout(pipeline=2, batch=8, schedule=name, stages_per_rank=3))
