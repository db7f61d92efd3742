"""Stages of different width in plans: where they are proposed, and what is predicted of them."""

import dataclasses

import pytest

from lightning_hybrid.predict.bubble import StageSeconds, program_seconds, seconds_of_widths
from lightning_hybrid.predict.costs.cut import best_widths, cut_into_stages
from lightning_hybrid.predict.costs.layers import LayerCosts, ModelCosts, Product
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout, fixed_fields, spelled, strategy_options
from lightning_hybrid.predict.report import PlannedRun
from lightning_hybrid.predict.search import predict_plan, search_layouts

A100, MIXED = load_hardware("a100-80"), FORMATS["bf16-mixed"]
LLAMA = transformer_costs(TransformerShape(32, 4096, 14336, 32, 128256, 4096), "llama")


def layer(name, rows, parameters, count=1):
    products = (Product(rows, 4096, 4096),)
    sizes = {"parameters": parameters, "outputs": 1e6, "moved": 1e6, "saved": 2e6, "kernels": 4}
    return LayerCosts(name, count=count, products=products, **sizes)


def model(encoder_rows=24_000, encoder_parameters=20_000_000):
    """An encoder with three times the FLOPs of eight layers, which have most of the parameters."""
    return ModelCosts(
        "heavy", (layer("encoder", encoder_rows, encoder_parameters), layer("layer", 1000, 500_000_000, 8))
    )


def planned(costs, devices=4, **fixed):
    result = search_layouts(costs, MIXED, A100, devices, batch=64, fixed=fixed)
    return PlannedRun(result, costs, MIXED, A100, devices, 1, "bf16-mixed")


def test_one_heavy_layer_gets_several_ranks():
    run = planned(model(), data=1, tensor=1)
    layout = run.result.best.layout
    assert (layout.pipeline, layout.widths, layout.schedule) == (4, (3, 1), "1f1b")
    assert "pp=4,stage_widths=3+1,m=" in spelled(layout)
    assert "        stage_widths=[3, 1],\n" in run.trainer_arguments(run.result.best)
    ordinary = planned(model(), data=1, tensor=1, widths=()).result.best
    assert ordinary.seconds_per_sample > 1.5 * run.result.best.seconds_per_sample


@pytest.mark.parametrize("fixed", [{}, {"pipeline": 8}, {"pipeline": 4, "data": 2}])
def test_a_llama_has_ordinary_stages(fixed):
    result = planned(LLAMA, 8, **fixed).result
    assert not any(plan.layout.widths for plan in result.plans)


def test_heavy_layers_that_do_not_fit_twice_have_one_rank():
    found = planned(model(encoder_parameters=3_000_000_000), data=1, tensor=1).result.best
    copies = found.layout.replaced(widths=(3, 1), schedule="1f1b", stages_per_rank=1)
    plan = predict_plan(model(encoder_parameters=3_000_000_000), copies, MIXED, A100)
    assert plan.time is None or found.seconds_per_sample <= plan.seconds_per_sample


def test_best_widths_where_one_layer_is_much_heavier():
    assert best_widths(model(), 4) == (3, 1)
    assert best_widths(model(), 2) == ()  # a rank each: three times as slow, as with any cut
    assert best_widths(model(1000), 4) == () == best_widths(LLAMA, 8)
    assert [len(stage) for stage in cut_into_stages(model(), 2, widths=(3, 1))] == [1, 1]


def test_memory_and_sums_of_copies():
    costs, wide = model(), PlanLayout(pipeline=4, widths=(3, 1), microbatch=2, batch=64)
    plan = predict_plan(costs, wide, MIXED, A100)
    parameters = [rank["parameters"] for rank in plan.memory.ranks]
    assert parameters == [4 * 20e6] * 3 + [4 * 4e9] and plan.time.terms["replicas"] > 0
    whole = dataclasses.replace(costs, frozen_parameters=costs.parameters)
    assert predict_plan(whole, wide, MIXED, A100).time.terms["replicas"] == 0


@pytest.mark.parametrize("widths, seconds", [((3, 1), (3.0, 1.0)), ((1, 2), (1.0, 2.0)), ((2, 1, 3), (2.0, 1.0, 4.0))])
@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe"])
def test_long_steps_take_what_their_program_takes(schedule, widths, seconds):
    stages = [StageSeconds(each / 3, each / 3, each / 3) for each in seconds]
    for count in (1, 7, 60, 200):
        found = seconds_of_widths(schedule, count, stages, widths)
        exact = program_seconds(schedule, sum(widths), count, stages, widths)
        assert found == pytest.approx(exact, rel=0.03), count


def test_options_and_fields():
    layout = PlanLayout(pipeline=4, widths=(3, 1), microbatch=2, batch=64)
    options = strategy_options(layout)
    assert options == {"pipeline_parallel_size": 4, "stage_widths": [3, 1], "num_microbatches": 32}
    assert fixed_fields({"stage_widths": [3, 1]}) == {"widths": (3, 1), "pipeline": 4}
    assert fixed_fields({"stage_widths": None}) == {"widths": ()}
    assert fixed_fields({"stage_widths": "auto"}) == {}
