"""Partition of a step graph: exact balance, the stage of every operation, and refusals that name units."""

import dataclasses
import itertools
import random

import pytest

from lightning_hybrid.errors import PartitionError
from lightning_hybrid.graph.partition import assign, balance, check_shared, owner_stages
from lightning_hybrid.graph.step_graph import Node, StepGraph, Value


def largest(costs, starts):
    ends = [*starts[1:], len(costs)]
    return max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))


def test_balance_matches_brute_force():
    draw = random.Random(0)
    for _ in range(300):
        costs = [draw.choice([0, 0, 1, 2, 3, 5, 8, 100]) for _ in range(draw.randint(1, 9))]
        for parts in range(1, len(costs) + 1):
            starts = balance(costs, parts)
            assert len(starts) == parts and starts[0] == 0
            assert all(a < b for a, b in itertools.pairwise([*starts, len(costs)])), "a segment is empty"
            cuts = itertools.combinations(range(1, len(costs)), parts - 1)
            assert largest(costs, starts) == min(largest(costs, [0, *cut]) for cut in cuts)


@pytest.mark.parametrize("parts", [0, 4])
def test_balance_refuses_empty_parts(parts):
    with pytest.raises(PartitionError, match=f"3 elements cannot be divided into {parts}"):
        balance([1, 2, 3], parts)


def graph_of(*rows, loss=None):
    """Nodes as (name, inputs, parameters); node number i makes value number i."""
    nodes = tuple(
        Node(index, name, tuple(inputs), tuple(parameters), (index,), flops=1.0)
        for index, (name, inputs, parameters) in enumerate(rows)
    )
    values = tuple(Value(index, (2, 2), "float32", (2, 1), requires_grad=True) for index in range(len(rows)))
    sizes = {name: 4 for _, _, parameters in rows for name in parameters}
    return StepGraph("training_step", nodes, values, sizes, loss=len(rows) - 1 if loss is None else loss)


def chain(count):
    """Blocks one after the other, then a loss."""
    rows = [(f"@blocks.{i}", [i - 1] if i else [], [f"blocks.{i}.weight"]) for i in range(count)]
    return graph_of(*rows, ("mean", [count - 1], []))


def test_no_cut_between_a_unit_and_its_computed_weight():
    """A hook reads two parameters of each unit in two steps; the unit itself reads a third."""
    rows = []
    for i in range(2):
        before, name = len(rows) - 1, f"blocks.{i}"
        rows += [("norm", [], [f"{name}.v"]), ("mul", [len(rows)], [f"{name}.g"])]
        inputs = [before, len(rows) - 1] if i else [len(rows) - 1]
        rows.append((f"@{name}", inputs, [f"{name}.bias", f"{name}.g", f"{name}.v"]))
    graph = graph_of(*rows, ("mean", [len(rows) - 1], []))
    homes = owner_stages(graph, 2)
    assert homes == {f"blocks.{i}.{member}": i for i in range(2) for member in ("v", "g", "bias")}
    with pytest.raises(PartitionError, match="only 2 layers"):
        owner_stages(graph, 3)


def test_chain_is_cut_evenly_and_sends_one_value():
    graph = chain(8)
    homes = owner_stages(graph, 4)
    assert [homes[f"blocks.{i}.weight"] for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assignment = assign(graph, homes, 4)
    assert assignment.portals == {(0, 1): (1,), (1, 2): (3,), (2, 3): (5,)}
    assert assignment.loss_stage == 3
    assert assignment.shared == {}
    assert sum(assignment.costs()) == pytest.approx(9 + 8 * 4 * 8)  # FLOPs, and the bytes of the weights


def test_operation_runs_on_the_latest_stage_of_its_inputs():
    graph = graph_of(
        ("@a", [], ["a"]),  # 0
        ("@b", [0], ["b"]),  # 1
        ("add", [0, 0], []),  # 2: reads only stage 0, though it runs after b
        ("@c", [1], ["c"]),  # 3
        ("add", [2, 3], []),  # 4: a long skip from 0 to 2
        ("mul", [4], ["a"]),  # 5: reads an early parameter late
    )
    assignment = assign(graph, owner_stages(graph, 3), 3)
    assert assignment.node_stage == (0, 1, 0, 2, 2, 2)
    assert assignment.portals == {(0, 1): (0,), (0, 2): (2,), (1, 2): (1,)}
    assert assignment.shared == {"a": (0, 2)}
    assert assignment.gradient_portals() == assignment.portals


def test_values_without_gradient_have_no_backward_portal():
    graph = chain(2)
    values = (*graph.values[:0], Value(0, (2, 2), "int64", (2, 1), requires_grad=False), *graph.values[1:])
    graph = StepGraph("training_step", graph.nodes, values, graph.parameter_bytes, loss=graph.loss)
    assignment = assign(graph, owner_stages(graph, 2), 2)
    assert assignment.portals == {(0, 1): (0,)}
    assert assignment.gradient_portals() == {}


def test_value_passed_through_a_unit_stays_on_its_stage():
    nodes = (
        Node(0, "@a", (), ("a",), (0, 1)),
        Node(1, "@b", (0, 1), ("b",), (2, 1)),  # returns its second input
        Node(2, "@c", (2, 1), ("c",), (3,)),
    )
    values = tuple(Value(index, (1,), "float32", (1,), requires_grad=True) for index in range(4))
    graph = StepGraph("training_step", nodes, values, {"a": 4, "b": 4, "c": 4}, loss=3)
    assignment = assign(graph, owner_stages(graph, 3), 3)
    assert assignment.value_stage == (0, 0, 1, 2)
    assert assignment.portals == {(0, 1): (0, 1), (0, 2): (1,), (1, 2): (2,)}


def test_written_value_lives_with_its_source():
    graph = graph_of(
        ("@student.0", [], ["student.0"]),
        ("@student.1", [0], ["student.1"]),
        ("@teacher.0", [], ["teacher.0"]),
        ("@teacher.1", [2], ["teacher.1"]),
        ("mse_loss", [1, 3], []),
        loss=4,
    )
    updates = tuple(
        Node(5 + i, "mul_", (), (f"teacher.{i}", f"student.{i}"), (), written=(f"teacher.{i}",)) for i in range(2)
    )
    graph = StepGraph("training_step", (*graph.nodes, *updates), graph.values, graph.parameter_bytes, loss=4)
    homes = owner_stages(graph, 2)
    assert homes["teacher.0"] == homes["student.0"] and homes["teacher.1"] == homes["student.1"]


def test_update_chain_is_no_first_use_and_ties_its_inputs():
    # teacher.data = teacher * m + student * (1 - m), first thing in the step
    values = tuple(Value(i, (2,), "float32", (1,), False) for i in range(9))
    nodes = []
    for i in range(2):
        nodes.append(Node(len(nodes), "mul", (), (f"teacher.{i}",), (2 * i,)))
        nodes.append(Node(len(nodes), "add", (2 * i,), (f"student.{i}",), (2 * i + 1,)))
        nodes.append(Node(len(nodes), "set", (2 * i + 1,), (f"teacher.{i}",), (), written=(f"teacher.{i}",)))
    for index, (inputs, name) in enumerate(
        [((), "student.0"), ((4,), "student.1"), ((5,), "teacher.0"), ((6,), "teacher.1")]
    ):
        nodes.append(Node(len(nodes), "@" + name, inputs, (name,), (4 + index,), flops=10.0))
    nodes.append(Node(len(nodes), "mse_loss", (5, 7), (), (8,)))
    graph = StepGraph("training_step", tuple(nodes), values, {}, loss=8)
    homes = owner_stages(graph, 2, ["student.1"])
    assert homes["student.0"] == 0 and homes["student.1"] == 1  # as if there were no updates
    # teacher.0 is read after student.1, and a written value is on the stage of its reader
    assert homes["teacher.0"] == homes["teacher.1"] == 1
    assignment = assign(graph, homes, 2)
    assert assignment.holders["teacher.0"] == (1,) and assignment.node_stage[2] == 1


# --- cuts by name ----------------------------------------------------------------------------------------------------


def test_cuts_start_the_stages():
    homes = owner_stages(chain(8), 3, ["blocks.1", "blocks.7"])
    assert [homes[f"blocks.{i}.weight"] for i in range(8)] == [0, 1, 1, 1, 1, 1, 1, 2]


def test_unknown_cut_lists_the_nearest_names():
    with pytest.raises(PartitionError, match=r"'block\.3', which training_step never uses; did you mean 'blocks\.3'\?"):
        owner_stages(chain(8), 2, ["block.3"])


def test_cuts_must_be_in_step_order():
    with pytest.raises(PartitionError, match=r"the order of training_step, which uses blocks\.2 before blocks\.4; "):
        owner_stages(chain(8), 3, ["blocks.4", "blocks.2"])


def test_cut_at_the_first_unit_leaves_stage_0_empty():
    with pytest.raises(PartitionError, match=r"'blocks\.0'"):
        owner_stages(chain(8), 2, ["blocks.0"])


def test_repeated_cut_leaves_a_stage_empty():
    with pytest.raises(PartitionError, match=r"'blocks\.4'"):
        owner_stages(chain(8), 3, ["blocks.4", "blocks.4"])


def test_number_of_cuts_must_match():
    with pytest.raises(PartitionError, match="names 1 module, but 4 stages need 3"):
        owner_stages(chain(8), 4, ["blocks.4"])


def test_more_stages_than_units():
    layers = r"makes 4 stages, but the step has only 3 layers with parameters \(blocks.0, blocks.1, blocks.2\); set "
    sizes = "pipeline_parallel_size=2 or 1, or 3 with devices=3, 6, ...\n"
    with pytest.raises(PartitionError, match=f"pipeline_parallel_size=4 {layers}{sizes}"):
        owner_stages(chain(3), 4, num_ranks=4)
    with pytest.raises(PartitionError, match=r"; set pipeline_parallel_size=1, or 2 with devices=2, 4, \.\.\."):
        owner_stages(chain(2), 3, num_ranks=3)
    with pytest.raises(PartitionError, match="; set pipeline_parallel_size=2 or 1\n"):
        owner_stages(chain(2), 4, num_ranks=4)
    with pytest.raises(
        PartitionError, match=rf"size=2 \* stages_per_rank=2 {layers}.* \* stages_per_rank to 3 or less\n"
    ):
        owner_stages(chain(3), 4, num_ranks=2)


def test_recurrent_step_is_refused():
    rows = [(f"@blocks.{i % 4}", [i - 1] if i else [], [f"blocks.{i % 4}.weight"]) for i in range(8)]
    graph = graph_of(*rows)
    with pytest.raises(PartitionError, match=r"recurrent through its stages: \d+ of 16 .*'blocks\.\d\.weight'.*=1"):
        check_shared(assign(graph, owner_stages(graph, 4), 4))


def with_derivative(graph, through):
    """The last node takes a derivative through others."""
    *nodes, last = graph.nodes
    last = dataclasses.replace(last, together=through)
    return dataclasses.replace(graph, nodes=(*nodes, last))


def test_inner_derivative_runs_on_its_latest_stage():
    graph = with_derivative(chain(4), (2, 3))
    assert owner_stages(graph, 3)["blocks.3.weight"] == owner_stages(graph, 3)["blocks.2.weight"] == 2
    # A cut by name inside of it: what comes before the cut follows.
    assert assign(graph, owner_stages(graph, 2, ["blocks.3"]), 2).node_stage == (0, 0, 1, 1, 1)
    with_inner = with_derivative(chain(4), (0, 1, 2, 3))
    with pytest.raises(PartitionError, match=r"leaves stages \[0\] of 2 empty"):
        assign(with_inner, owner_stages(with_inner, 2, ["blocks.2"]), 2)
    with pytest.raises(
        PartitionError, match=r"only 1 layer with parameters \(blocks\.0\), counting all operations of the deriv"
    ):
        owner_stages(with_inner, 2)
