"""Seconds of one layer's forward and backward for one microbatch on one rank: a roofline per operation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.predict.costs.layers import LayerCosts, Product, layout_of_layer
from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layout import NumberFormat, PlanLayout


@dataclass(frozen=True)
class EfficiencyConstants:
    """What a step achieves of the figures of its hardware."""

    # size of one dimension of a matrix product at which it reaches half of the rate of a large one
    half_size: float = 116
    half_inner: float = 20  # the same of the dimension that is summed over
    # rate of a product one of whose sizes is a multiple of 8 elements but not of 16, relative to one of multiples of 64
    misaligned: float = 0.69
    # rate of the products of several experts, relative to one product of as many rows as each has
    grouped: float = 0.67
    half_head: float = 10  # width of a head at which fused attention reaches half of its rate
    attention_backward: float = 3.0  # seconds of fused attention's backward over those of its forward
    memory_share: float = 0.82  # share of the memory's bandwidth that operations between products achieve
    backward_moved: float = 2.6  # bytes that memory-bound operations move in the backward over those of the forward
    # kernels of a layer of experts for whose starts the device waits in the forward, and in the backward
    waited_kernels: float = 356
    within_share: float = 0.65  # share of the bandwidth of links that collectives achieve beside kernels


CONSTANTS = EfficiencyConstants()


_DOCUMENTED_HEAD = 128  # width of heads for which the rates of kernels of attention are given
# A softmax with dropout reads and writes 4.5 times the scores in the forward, and 5.5 times in the backward.
SCORES_BACKWARD = 5.5 / 4.5
# Selective layers that drop 0.6 of the bytes of a GPT's block repeat 0.3 of the work of its products.
_REPEATED_PRODUCTS = 0.3 / 0.6


class LayerSeconds(NamedTuple):
    """Seconds of one layer for one microbatch, without communication."""

    forward: float  # of the forward
    backward: float  # of the backward, without what it computes again
    again: float  # of what the backward computes again
    kernel_starts: float  # the part of all of these in which the device waits for kernels to start
    weights: float = 0.0  # the part of the backward that makes gradients of weights


def layer_seconds(
    layer: LayerCosts,
    layout: PlanLayout,
    number_format: NumberFormat,
    hardware: Hardware,
    constants: EfficiencyConstants,
) -> LayerSeconds:
    """Return the seconds of one layer for one microbatch of ``layout.microbatch`` samples on one rank."""
    layout = layout_of_layer(layer, layout)
    linear = attention = attention_backward = casts = not_repeated = 0.0
    for product in layer.products:
        if number_format.products == "float8" and product.has_weight and product.in_float8:
            casts += cast_elements(product, layout, number_format)
        seconds = product_seconds(product, layout, number_format, hardware, constants)
        if not product.has_weight:
            attention += seconds
            attention_backward += seconds * (constants.attention_backward if layout.fused_attention else 2.0)
        else:
            linear += seconds
            not_repeated += 0.0 if product.repeats else seconds
    rate = hardware.memory_bandwidth * constants.memory_share / (layout.microbatch * number_format.activation)
    shared = layout.tensor if layout.sequence_parallel else 1
    moved = (layer.replicated_moved / shared + (layer.moved - layer.replicated_moved) / layout.tensor) / layout.context
    around = (moved + casts / layout.microbatch) / rate
    waited = constants.waited_kernels * hardware.kernel_seconds if layer.waits_for_rows else 0.0
    scores = layer.moved_scores / (layout.tensor * layout.context) / rate
    device = linear + attention + around + scores
    device_backward = 2.0 * linear + attention_backward + constants.backward_moved * around + SCORES_BACKWARD * scores
    starts = layer.kernels * hardware.kernel_seconds
    forward, backward = max(device, starts) + waited, max(device_backward, 2.0 * starts) + waited
    waits = forward - device + backward - device_backward
    weights = linear * backward / device_backward if device_backward else 0.0
    again = layer.again * forward
    if layer.repeats and layout.forwards:
        again += max(device - not_repeated, starts) + waited
        waits += max(0.0, starts - device + not_repeated) + waited
    elif layer.repeats and layout.repeats_cheap:
        dropped = 1.0 - layer.selective_saved / layer.saved if layer.saved else 0.0
        again += dropped * (around + _REPEATED_PRODUCTS * linear)
        again += 0.0 if layout.fused_attention else attention + scores
    return LayerSeconds(forward, backward, again, waits, weights)


def cast_elements(product: Product, layout: PlanLayout, number_format: NumberFormat) -> float:
    """Elements of 16 bits that casts of a product's operands to 8 bits move in the forward: two read, one written."""
    rows = product.rows * layout.microbatch * product.count / layout.context
    shared = layout.tensor if product.sharded == "inner" else 1
    weights = product.inner * product.columns * product.count / (layout.tensor if product.sharded else 1)
    weights *= max(1.0, product.groups / layout.routed_ranks)
    if number_format.casts_weights_once:
        weights /= layout.num_microbatches
    return 1.5 * (rows * product.inner / shared + weights)


def product_seconds(
    product: Product,
    layout: PlanLayout,
    number_format: NumberFormat,
    hardware: Hardware,
    constants: EfficiencyConstants,
) -> float:
    """Return the seconds of a layer's products in the forward for one microbatch on one rank."""
    rows, inner, columns, count = product.rows / layout.context, product.inner, product.columns, product.count
    if product.has_weight:
        rows *= layout.microbatch
    else:
        count *= layout.microbatch
    if product.sharded == "columns":
        columns /= layout.tensor
    elif product.sharded == "inner":
        inner /= layout.tensor
    elif product.sharded == "count":
        count /= layout.tensor
    flops = 2.0 * rows * inner * columns * count * product.active_share
    is_fused = layout.fused_attention and not product.has_weight
    in_float8 = product.has_weight and product.in_float8
    key = "bfloat16" if number_format.products == "float8" and not in_float8 else number_format.products
    peak = hardware.product_rate(key)
    if is_fused:
        head = min(inner, columns)
        share = next(iter(hardware.attention.values()))
        rate = peak * share * head / (head + constants.half_head) * (1.0 + constants.half_head / _DOCUMENTED_HEAD)
        return flops / (rate * alignment(head, constants))
    reached = 1.0
    half = constants.half_size * (peak / 271e12) ** 0.5 * (2.0e12 / hardware.memory_bandwidth) ** 0.5
    groups = max(1.0, product.groups / layout.routed_ranks)  # a rank with a single expert computes plain products
    for size in (rows / groups, columns):
        reached *= size / (size + half)
    reached *= inner / (inner + constants.half_inner) * (constants.grouped if groups > 1 else 1.0)
    if not product.has_weight and min(map(power_of_two, (inner, columns))) < 8:
        peak = min(peak, 2.0 * hardware.product_rate("float32"))
    seconds = flops / (peak * reached)
    if not product.has_weight:  # a batch of small products reads and writes more than it computes
        elements = (rows * inner + inner * columns + rows * columns) * count
        seconds = max(
            seconds, elements * number_format.activation / (hardware.memory_bandwidth * constants.memory_share)
        )
    return seconds / min(alignment(inner, constants), alignment(columns, constants))


def alignment(size: float, constants: EfficiencyConstants) -> float:
    """Return the share of its rate that a product keeps whose dimension has this size.

    What matters is the largest power of two that divides it (Anthony et al., arXiv 2401.14489, section 6): tensor cores
    reach their rate from 64 elements on.
    """
    return constants.misaligned ** (1.0 - math.log2(max(8, power_of_two(size)) / 8) / 3)


def power_of_two(size: float) -> int:
    """Return the largest power of two, 64 at most, that divides a size."""
    return math.gcd(round(size), 64) if size == round(size) else 1
