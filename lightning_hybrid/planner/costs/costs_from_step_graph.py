"""Costs of an unmodified module, from the graph of its recorded step or, where it has none, from its parameters."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.planner.costs.bytes_of_loss import bytes_of_loss, is_float, value_bytes
from lightning_hybrid.planner.costs.layer_costs import LayerCosts, ModelCosts, Product, checksum_of_names
from lightning_hybrid.planner.memory.memory_constants import CONSTANTS

Shapes = Mapping[str, tuple[int, ...]]

# Share of the saved bytes that recompute="selective" keeps, as the strategy's option has it.
_SELECTIVE_SHARE = 0.4
# Kernels of a forward, per product and per parameter of one dimension (a norm or a bias), besides those.
_KERNELS_PER_PRODUCT, _KERNELS_PER_VECTOR, _KERNELS_PER_LAYER = 3, 2, 4
_FLOAT32_BYTES = 4
_LAYER_INDEX = re.compile(r"^(.*?\.\d+)(?:\.|$)")
PROOF = "which layers tensor ranks can shard is proved at the start of a run; the plan is subject to that proof"


def costs_from_step_graph(
    graph: StepGraph,
    shapes: Shapes,
    *,
    samples: int,
    name: str = "module",
    frozen: Iterable[str] = (),
    part_of: Mapping[str, str] | None = None,
) -> ModelCosts:
    """Return the costs per sample of a recorded step: a layer for each unit, and for operations between them.

    A layer's products are those of its parameters of two or more dimensions; the rest of its FLOPs are products
    without weights. All saved bytes are counted at the sizes of the recording. Parameters that no operation reads
    belong to the first layer.

    Args:
        graph: Of the training step, recorded with its layers as units.
        shapes: Shape of each parameter, by FQN.
        samples: Samples of the recorded batch.
        name: For reports.
        frozen: FQNs of parameters without gradients.
        part_of: For units that are opened layers, the FQN of the layer: with n stages it is one layer, unless it has
            more than 1/n of all parameters.
    """
    part_of = part_of or {}
    positions = _positions(graph, samples)
    groups = list(_groups(graph, {}))
    layers = _layers(groups, graph, shapes, samples, positions)
    users: dict[str, set[int]] = {}
    for number, group in enumerate(groups):
        for node in group.nodes:
            for parameter in node.parameters:
                users.setdefault(parameter, set()).add(number)
    ends = {0, len(groups) - 1}
    tied = any(len(shapes.get(p, ())) > 1 and ends <= found for p, found in users.items()) and len(groups) > 1
    of_few_stages: list[tuple[LayerCosts, ...]] = []
    while unopened := _unopened(part_of, shapes, len(of_few_stages) + 1):
        merged = _layers(list(_groups(graph, unopened)), graph, shapes, samples, positions)
        of_few_stages.append(tuple(merge_equal(merged)))
    return ModelCosts(
        name,
        tuple(merge_equal(layers)),
        positions=positions,
        has_tied_embedding=tied,
        frozen_parameters=sum(math.prod(shapes[parameter]) for parameter in frozen if parameter in shapes),
        notes=(PROOF,),
        names_checksum=checksum_of_names(shapes),
        layers_of_few_stages=tuple(of_few_stages),
    )


def _unopened(part_of: Mapping[str, str], shapes: Shapes, num_stages: int) -> dict[str, str]:
    """The part of ``part_of`` whose layers are single units of a step in a number of stages."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    most = sum(sizes.values()) / num_stages
    small = {
        layer
        for layer in set(part_of.values())
        if sum(size for name, size in sizes.items() if name.startswith(f"{layer}.")) <= most
    }
    return {unit: layer for unit, layer in part_of.items() if layer in small}


def _layers(
    groups: Sequence[_Group], graph: StepGraph, shapes: Shapes, samples: int, positions: int
) -> list[LayerCosts]:
    """Return the costs of each group, all of which are the full graph."""
    owner: dict[str, int] = {}
    for number, group in enumerate(groups):
        for node in group.nodes:
            for parameter in node.parameters:
                owner.setdefault(parameter, number)
    counted, kept = set[int](), set[int]()
    unused = sum(math.prod(shape) for parameter, shape in shapes.items() if parameter not in owner)
    layers = []
    for number, group in enumerate(groups):
        used = dict.fromkeys(parameter for node in group.nodes for parameter in node.parameters if parameter in shapes)
        own = sum(math.prod(shapes[parameter]) for parameter in used if owner[parameter] == number)
        own += 0 if number else unused
        matrices = [shapes[parameter] for parameter in used if len(shapes[parameter]) > 1]
        vectors = len(used) - len(matrices)
        layer = _layer(group, graph, matrices, vectors, own, samples, positions, counted)
        layers.append(_with_recomputation(layer, group, graph, samples, kept))
    if groups and graph.loss is not None:
        layers[-1] = _with_loss(layers[-1], groups[-1], graph, samples)
    return layers


def costs_from_parameters(
    shapes: Shapes, *, positions: int = 1, name: str = "module", frozen: Iterable[str] = (), reason: str = ""
) -> ModelCosts:
    """Return the costs of a step that cannot be recorded: each matrix of parameters is one product per position.

    Args:
        shapes: Shape of each parameter, by FQN.
        positions: Tokens of one sample.
        name: For reports.
        frozen: FQNs of parameters without gradients.
        reason: Why the step could not be recorded.
    """
    layers: dict[str, list[tuple[int, ...]]] = {}
    for parameter, shape in shapes.items():
        found = _LAYER_INDEX.match(parameter)
        layers.setdefault(found[1] if found else parameter.rpartition(".")[0] or "parameters", []).append(shape)
    costs = []
    for layer, members in layers.items():
        matrices = [shape for shape in members if len(shape) > 1]
        products = tuple(_products_of(matrices, float(positions)))
        through = sum(product.inner + product.columns for product in products) * positions
        costs.append(
            LayerCosts(
                layer,
                products=products,
                parameters=sum(math.prod(shape) for shape in members),
                sharded_parameters=sum(math.prod(shape) for shape in matrices),
                moved=2.0 * through,
                saved=through,
                selective_saved=_SELECTIVE_SHARE * through,
                outputs=min((product.inner for product in products), default=0.0) * positions,
                reductions=_reductions(products),
                kernels=_kernels(len(matrices), len(members) - len(matrices)),
            )
        )
    why = f" ({reason})" if reason else ""
    note = (
        f"the step was not recorded{why}: FLOPs are estimated as 2 per parameter and position, and activations from the"
        " sizes of parameters"
    )
    return ModelCosts(
        name,
        tuple(merge_equal(costs)),
        positions=positions,
        is_traced=False,
        frozen_parameters=sum(math.prod(shapes[parameter]) for parameter in frozen if parameter in shapes),
        notes=(note, PROOF),
        names_checksum=checksum_of_names(shapes),
    )


def merge_equal(layers: Sequence[LayerCosts]) -> Iterator[LayerCosts]:
    """Yield layers with equal ones in a row as one, with their number."""
    last: LayerCosts | None = None
    for layer in layers:
        if last is not None and dataclasses.replace(layer, name=last.name, count=last.count) == last:
            last = dataclasses.replace(last, count=last.count + layer.count)
            continue
        if last is not None:
            yield last
        last = layer
    if last is not None:
        yield last


@dataclass
class _Group:
    """Nodes of one layer: a unit, or operations between units that read parameters, with what follows them.

    Attributes:
        name: FQN of the unit, or of what the first of the parameters belongs to.
        nodes: In order.
        unit: Indices of the nodes of the unit itself.
    """

    name: str
    nodes: list[Node] = field(default_factory=list)
    unit: set[int] = field(default_factory=set)


def _groups(graph: StepGraph, part_of: Mapping[str, str]) -> Iterator[_Group]:
    """Yield the layers; units of one layer of ``part_of``, and operations between them, are one unit."""
    group = _Group("inputs")
    known: set[str] = set()
    layers = [part_of.get(node.unit or "") for node in graph.nodes]
    last = {layer: index for index, layer in enumerate(layers) if layer is not None}
    end = -1
    for index, (node, layer) in enumerate(zip(graph.nodes, layers, strict=True)):
        is_inside = index <= end
        starts = node.unit is not None or (node.parameters and not known.issuperset(node.parameters))
        known.update(node.parameters)
        if starts and not is_inside and any(each.parameters for each in group.nodes):
            yield group
            group = _Group("")
        if starts and not is_inside:
            of_parameter = node.parameters[0].rpartition(".")[0] if node.parameters else node.name
            group.name = layer or node.unit or of_parameter
            end = last[layer] if layer is not None else -1
        if is_inside or node.unit is not None:
            group.unit.add(node.index)
        group.nodes.append(node)
    if group.nodes:
        yield group


def _layer(
    group: _Group,
    graph: StepGraph,
    matrices: Sequence[tuple[int, ...]],
    vectors: int,
    parameters: int,
    samples: int,
    positions: int,
    counted: set[int],
) -> LayerCosts:
    flops = sum(node.flops for node in group.nodes) / samples
    products = _products(matrices, flops, _rows(group, graph, samples))
    new = {value for node in group.nodes for value in node.saved_values} - counted
    counted |= new
    element = _element_bytes(group, graph)
    inner = sum(node.saved_bytes for node in group.nodes) + sum(value_bytes(graph.values[value]) for value in new)
    saved = inner / element / samples
    made = {value for node in group.nodes for value in node.outputs}
    inside = {node.index for node in group.nodes}
    later = (node for node in graph.nodes if node.index not in inside)
    read = {value for node in later for value in node.inputs}
    outputs = sum(math.prod(graph.values[value].shape) for value in made & read) / samples
    has_weight = [product for product in products if product.has_weight]
    # A region of tensor ranks begins with a norm, whose input and output all of them save; attention is one of two.
    regions = 2 if len(has_weight) > 1 and any(product.is_attention for product in products) else 1
    replicated = min(saved, 2.0 * regions * outputs)
    return LayerCosts(
        group.name,
        products=products,
        parameters=parameters,
        sharded_parameters=min(parameters, int(sum(product.inner * product.columns for product in has_weight))),
        moved=2.0 * sum(node.moved_bytes for node in group.nodes) / element / samples,
        replicated_moved=min(2.0 * sum(node.moved_bytes for node in group.nodes) / element / samples, 4.0 * outputs),
        saved=saved,
        replicated_saved=replicated,
        outputs=outputs,
        reductions=_reductions(has_weight),
        kernels=_kernels(len(matrices), vectors),
        has_full_positions=not any(_keeps_shape(node, graph) for node in group.nodes),
    )


def _with_recomputation(layer: LayerCosts, group: _Group, graph: StepGraph, samples: int, kept: set[int]) -> LayerCosts:
    """Return the layer with what recomputation saves: inputs of the unit, and all that operations around it save.

    Args:
        layer: Of the group.
        group: Of the graph.
        graph: Of the step.
        samples: Of the recorded batch.
        kept: Values that recomputation of earlier layers saves; those of this one are added.
    """
    made = {value for node in group.nodes if node.index in group.unit for value in node.outputs}
    around = [node for node in group.nodes if node.index not in group.unit]
    inputs = {value for node in group.nodes if node.index in group.unit for value in node.inputs}
    new = (inputs - made | {value for node in around for value in node.saved_values}) - kept
    kept |= new
    outside = sum(node.saved_bytes for node in around)
    scale = 1 / _element_bytes(group, graph) / samples
    saved = min(layer.saved, (outside + sum(value_bytes(graph.values[value]) for value in new)) * scale)
    inside = max(0.0, layer.saved - outside * scale)
    return dataclasses.replace(
        layer,
        full_saved=saved,
        selective_saved=max(layer.saved - (1 - _SELECTIVE_SHARE) * inside, saved),
        is_recomputed=bool(group.unit),
    )


def _with_loss(layer: LayerCosts, group: _Group, graph: StepGraph, samples: int) -> LayerCosts:
    """Return the last layer with what the loss saves, and what its backward holds besides."""
    saved, backward = bytes_of_loss(group.nodes, graph)
    return dataclasses.replace(
        layer,
        loss_saved=min(layer.saved, saved / _element_bytes(group, graph) / samples),
        peak_only=backward / (_FLOAT32_BYTES * CONSTANTS.loss_gradients) / samples,
    )


def _keeps_shape(node: Node, graph: StepGraph) -> bool:
    """Whether it calls a unit with an argument of its result's shape, whose positions context ranks divide."""
    shapes = {graph.values[index].shape for index in node.inputs if len(graph.values[index].shape) > 2}
    return node.unit is not None and any(graph.values[index].shape in shapes for index in node.outputs)


def _products(matrices: Sequence[tuple[int, ...]], flops: float, rows: float) -> tuple[Product, ...]:
    """Divide the FLOPs of a layer among its parameters, by their sizes, and products without weights."""
    sizes = [math.prod(shape) for shape in matrices]
    if not flops:
        return ()
    rest = 0.0
    if sizes:
        most = flops / (2.0 * sum(sizes))  # rows, if all FLOPs are those of parameters
        is_linear = all(len(shape) == 2 for shape in matrices)
        share = min(rows, most) if is_linear else most
        rest = flops - 2.0 * share * sum(sizes)
        products = list(_products_of(matrices, share))
    else:
        rest, products = flops, []
    if rest > 1e-6 * flops and rows:
        # As scores of attention: rows against rows.
        products.append(Product(rows, rest / (2.0 * rows * rows), rows, 1.0, "count", False, rows > 1))
    return tuple(products)


def _products_of(matrices: Sequence[tuple[int, ...]], rows: float) -> Iterator[Product]:
    for shape in matrices:
        columns, inner = shape[0], math.prod(shape[1:])
        yield Product(rows, inner, columns, sharded="inner" if columns < inner else "columns")


def _reductions(products: Sequence[Product]) -> int:
    """All-reduces of a layer whose products alternate between sharded columns and sharded rows."""
    return max(1, sum(product.sharded == "inner" for product in products)) if products else 0


def _kernels(matrices: int, vectors: int) -> int:
    return _KERNELS_PER_LAYER + _KERNELS_PER_PRODUCT * matrices + _KERNELS_PER_VECTOR * vectors


def _rows(group: _Group, graph: StepGraph, samples: int) -> float:
    """Rows per sample of the largest floating-point value that the group reads or makes, but for its last dim."""
    indices = {value for node in group.nodes for value in (*node.inputs, *node.outputs)}
    shapes = [graph.values[index].shape for index in indices if is_float(graph.values[index])]
    rows = [math.prod(shape[:-1]) for shape in shapes if len(shape) > 1]
    return max(rows, default=samples) / samples


def _positions(graph: StepGraph, samples: int) -> int:
    """Tokens of a sample: the second of three dims, where most values that units read have three."""
    read = [graph.values[index].shape for node in graph.nodes if node.unit for index in node.inputs]
    sequences = [shape[1] for shape in read if len(shape) == 3 and shape[0] == samples]
    return max(sequences) if 2 * len(sequences) > len(read) else 1


def _element_bytes(group: _Group, graph: StepGraph) -> float:
    """Bytes of an element of the first floating-point value that the group makes."""
    for node in group.nodes:
        for index in node.outputs:
            value = graph.values[index]
            size: int = math.prod(value.shape)
            if is_float(value) and size:
                return value_bytes(value) / size
    return 4.0
