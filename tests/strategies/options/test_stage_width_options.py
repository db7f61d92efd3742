"""Widths of stages as an option: what is refused, and what sizes follow."""

import pytest

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import LayoutError
from lightning_hybrid.verify.layouts import parse_layout


def strategy(**options):
    return Hybrid3DStrategy(**options)


def test_chosen_widths_are_for_a_number_of_pipeline_ranks():
    assert strategy(pipeline_parallel_size=4, stage_widths="auto").options.mesh_sizes["pipeline_parallel_size"] == 4
    assert strategy(stage_widths="auto", objective="throughput").options.asks_for_plan
    with pytest.raises(LayoutError, match=r"chooses the widths of stages for a number of pipeline ranks, .* set it to"):
        strategy(stage_widths="auto")


@pytest.mark.parametrize("widths", ["auto", [3, 1]])
def test_what_does_not_go_with_widths(widths):
    with pytest.raises(LayoutError, match="gives ranks several stages; leave one of the two out"):
        strategy(pipeline_parallel_size=4, stage_widths=widths, stages_per_rank=2)
    with pytest.raises(ValueError, match="'zero_bubble' has one rank for each stage"):
        strategy(pipeline_parallel_size=4, stage_widths=widths, schedule="zero_bubble")


@pytest.mark.parametrize("widths", ["wide", [3, 0], [], 4])
def test_no_widths(widths):
    with pytest.raises(LayoutError, match="use 'auto' or a list with the number of ranks of each stage"):
        strategy(pipeline_parallel_size=4, stage_widths=widths)


@pytest.mark.parametrize(
    ("text", "devices", "widths"),
    [
        ("stage_widths=3+1", 4, [3, 1]),
        ("dp=2,stage_widths=[2, 1]", 6, [2, 1]),
        ("pp=4,stage_widths=auto", 4, "auto"),
        ("stage_widths=2", 2, [2]),
    ],
)
def test_widths_of_a_command_line(text, devices, widths):
    layout = parse_layout(text)
    assert layout.devices == devices and layout.strategy["stage_widths"] == widths
