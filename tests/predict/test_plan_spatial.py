"""Spatial ranks in plans: where they are proposed, and what is predicted of them."""

import dataclasses

import pytest

from lightning_hybrid.predict.checks import check_options, misfits
from lightning_hybrid.predict.costs.layers import FeatureMap, LayerCosts, ModelCosts, Product
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout, fixed_fields, spelled, spelled_fields, strategy_options
from lightning_hybrid.predict.memory import predict_memory
from lightning_hybrid.predict.report import PlannedRun
from lightning_hybrid.predict.search import predict_plan, search_layouts

A100, MIXED = load_hardware("a100-80"), FORMATS["bf16-mixed"]
LLAMA = transformer_costs(TransformerShape(32, 4096, 14336, 32, 128256, 4096), "llama")


def convolutions(name, shape, channels, out):
    """Two convolutions of three taps in each dim, each with a batch norm and a ReLU."""
    pixels, rows = 1, max(shape)
    for length in shape:
        pixels *= length
    taps = 3 ** len(shape)
    products = (Product(pixels, taps * channels, out), Product(pixels, taps * out, out))
    maps = [FeatureMap(rows, pixels // rows * read, 2, taps * read * out) for read in (channels, out)]
    maps += 2 * [FeatureMap(rows, pixels // rows * out, 0, 2 * out, 2 * out)]
    parameters = taps * out * (channels + out) + 4 * out
    sizes = {"moved": 8.0 * pixels * out, "saved": 4.0 * pixels * out, "selective_saved": 4.0 * pixels * out}
    return LayerCosts(
        name, products=products, parameters=parameters, outputs=pixels * out, kernels=8, maps=tuple(maps), **sizes
    )


def unet(*shape, width=64, levels=4):
    sizes = [(tuple(length >> level for length in shape), width << level) for level in range(levels)]
    down = [convolutions(f"down.{n}", size, max(3, out // 2), out) for n, (size, out) in enumerate(sizes)]
    up = [convolutions(f"up.{n}", size, 3 * out, out) for n, (size, out) in enumerate(sizes[-2::-1])]
    return ModelCosts("unet", (*down, *up), has_batch_norm=True)


def resnet():
    sizes = [((56, 56), 64), ((28, 28), 128), ((14, 14), 256), ((7, 7), 512)]
    layers = [dataclasses.replace(convolutions(f"layer.{out}", size, out, out), count=4) for size, out in sizes]
    return ModelCosts("resnet", (convolutions("stem", (112, 112), 3, 64), *layers), has_batch_norm=True)


def planned(costs, devices=8, batch=8, is_replica_batch=False, **fixed):
    result = search_layouts(costs, MIXED, A100, devices, batch=batch, is_replica_batch=is_replica_batch, fixed=fixed)
    return PlannedRun(result, costs, MIXED, A100, devices, 1, "bf16-mixed")


@pytest.mark.parametrize("costs", [unet(10240, 10240), unet(640, 640, 640, width=32)], ids=["images", "volumes"])
def test_a_sample_that_does_not_fit_is_shared(costs):
    alone = PlanLayout(replicate=8, batch=8, recompute="full")
    assert not predict_plan(costs, alone, MIXED, A100).fits_with_error
    run = planned(costs, batch=1, is_replica_batch=True)
    layout = run.result.best.layout
    assert layout.spatial and layout.context in (2, 4, 8) and layout.data == 8 // layout.context
    assert f"spatial={layout.context}" in spelled(layout)
    assert f"        spatial_parallel_size={layout.context},\n" in run.trainer_arguments(run.result.best)
    assert "context_parallel_size" not in strategy_options(layout)


def test_fewer_samples_than_devices_are_shared():
    layout = planned(unet(1024, 1024), batch=2).result.best.layout
    assert layout.spatial and layout.data == 2 and layout.context == 4


def test_replicas_are_chosen_where_samples_fit():
    run = planned(resnet(), batch=2048)
    assert run.result.best.layout.has_replicas_alone
    rejected = {each.family: each.reason for each in run.result.rejected}
    assert "spatial=2" in rejected["spatial ranks"]


@pytest.mark.parametrize("fixed", [{}, {"data": 2}, {"pipeline": 1, "tensor": 1}])
def test_a_transformer_has_none(fixed):
    result = planned(LLAMA, batch=64, **fixed).result
    assert not any(plan.layout.spatial for plan in result.plans)
    assert not any(each.family == "spatial ranks" for each in result.rejected)
    reasons = list(misfits(LLAMA, fixed_fields({"spatial_parallel_size": 2}), 8))
    assert reasons == ["spatial=2: the largest feature map of a convolution has 0 rows"]


def test_images_beside_attention_are_shared_only_where_that_is_fixed():
    costs = dataclasses.replace(unet(3072, 3072), heads=8)
    assert not any(mesh.layout.spatial for mesh in search_layouts(costs, MIXED, A100, 8, batch=64).plans)
    fixed = fixed_fields({"spatial_parallel_size": 4})
    assert fixed == {"context": 4, "spatial": True} and spelled_fields(fixed) == "spatial=4"
    assert planned(unet(1024, 1024), **fixed).result.best.layout.context == 4
    alone = fixed_fields({"spatial_parallel_size": 1})
    assert not any(plan.layout.spatial for plan in planned(unet(1024, 1024), **alone).result.plans)


def test_activations_are_divided_where_maps_have_rows():
    costs = unet(64, 64, levels=5)  # down to 4 rows
    full, half, eighth = (
        predict_memory(costs, PlanLayout(context=ranks, spatial=ranks > 1), FORMATS["32-true"], A100).ranks[0]
        for ranks in (1, 2, 8)
    )
    assert half["activations"] == pytest.approx(full["activations"] / 2)
    last, all_saved = costs.layers[4].saved, sum(layer.saved for layer in costs.layers)
    share = ((all_saved - last) / 8 + last) / all_saved
    assert eighth["activations"] == pytest.approx(full["activations"] * share, rel=0.01)
    assert half["parameters"] == full["parameters"] and half["gradients"] == full["gradients"]


def test_time_has_the_messages_of_borders_and_sums():
    costs, alone = unet(2048, 2048), PlanLayout(batch=1)
    time = {
        ranks: predict_plan(costs, alone.replaced(context=ranks, spatial=True), MIXED, A100).time for ranks in (2, 4)
    }
    assert time[4].terms["computation"] == pytest.approx(time[2].terms["computation"] / 2, rel=0.1)
    assert 0 < time[2].terms["spatial ranks"] < 0.2 * time[2].seconds
    assert time[2].terms["replicas"] == 0  # the backward has summed the gradients
    wide = [
        dataclasses.replace(layer, maps=tuple(each._replace(border=2 * each.border) for each in layer.maps))
        for layer in costs.layers
    ]
    more = predict_plan(
        dataclasses.replace(costs, layers=tuple(wide)), alone.replaced(context=2, spatial=True), MIXED, A100
    )
    assert more.time.terms["spatial ranks"] > time[2].terms["spatial ranks"]


@pytest.mark.parametrize("option", ["tensor_parallel_size", "context_parallel_size", "expert_parallel_size"])
def test_sizes_that_gather_images_are_refused_beside_it(option):
    with pytest.raises(ValueError, match=r"spatial=2: layers under .*=2 would gather the images"):
        check_options({"spatial_parallel_size": 2, option: 2})
