"""Costs of an unmodified module, from the graph of its recorded step or, where it has none, from its parameters."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.graph.step_graph import Node, StepGraph, Value
from lightning_hybrid.planner.costs.expert_sets import EXPERT_PROOF, ExpertSet, common_number, parameters_of
from lightning_hybrid.planner.costs.layer_costs import LayerCosts, ModelCosts, Product, checksum_of_names

Shapes = Mapping[str, tuple[int, ...]]

# Share of the saved bytes that recompute="selective" keeps, as the strategy's option has it.
_SELECTIVE_SHARE = 0.4
# Kernels of a forward, per product and per parameter of one dimension (a norm or a bias), besides those.
_KERNELS_PER_PRODUCT, _KERNELS_PER_VECTOR, _KERNELS_PER_LAYER = 3, 2, 4
_DTYPE_BITS = re.compile(r"(\d+)")
_LAYER_INDEX = re.compile(r"^(.*?\.\d+)(?:\.|$)")
PROOF = "which layers tensor ranks can shard is proved at the start of a run; the plan is subject to that proof"


def costs_from_step_graph(
    graph: StepGraph,
    shapes: Shapes,
    *,
    samples: int,
    name: str = "module",
    frozen: Iterable[str] = (),
    experts: Mapping[str, Sequence[ExpertSet]] | None = None,
    heads: tuple[int | None, int | None] = (None, None),
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
        experts: The experts of each unit, by its FQN.
        heads: The numbers that tensor ranks must divide: of heads, and of heads of keys and values.
    """
    positions, experts = _positions(graph, samples), experts or {}
    groups = list(_groups(graph))
    owner: dict[str, int] = {}
    for number, group in enumerate(groups):
        for node in group.nodes:
            for parameter in node.parameters:
                owner.setdefault(parameter, number)
    counted: set[int] = set()
    unused = sum(math.prod(shape) for parameter, shape in shapes.items() if parameter not in owner)
    layers = []
    for number, group in enumerate(groups):
        used = dict.fromkeys(parameter for node in group.nodes for parameter in node.parameters if parameter in shapes)
        own = sum(math.prod(shapes[parameter]) for parameter in used if owner[parameter] == number)
        own += 0 if number else unused
        matrices = {parameter: _oriented(parameter, shapes) for parameter in used if len(shapes[parameter]) > 1}
        vectors = len(used) - len(matrices)
        sets = [each for node in group.nodes for each in experts.get(node.unit or "", ())]
        owned = {parameter for parameter in used if owner[parameter] == number}
        layer = _layer(group, graph, matrices, vectors, own, samples, positions, counted, sets)
        layers.append(dataclasses.replace(layer, expert_parameters=parameters_of(sets, shapes, owned)))
    layers = _with_sharded_table(layers, {name: shape for name, shape in shapes.items() if len(shape) == 2}, owner)
    return ModelCosts(
        name,
        tuple(merge_equal(layers)),
        positions=positions,
        heads=heads[0],
        key_value_heads=heads[1],
        experts=common_number(itertools.chain.from_iterable(experts.values())),
        has_tied_embedding=_ends_share_matrix(groups, shapes),
        frozen_parameters=sum(math.prod(shapes[parameter]) for parameter in frozen if parameter in shapes),
        notes=(PROOF, EXPERT_PROOF) if experts else (PROOF,),
        names_checksum=checksum_of_names(shapes),
    )


def _ends_share_matrix(groups: Sequence[_Group], shapes: Shapes) -> bool:
    """Whether the first and the last of several layers read the same matrix."""
    if len(groups) < 2:
        return False
    first, last = ({name for node in group.nodes for name in node.parameters} for group in (groups[0], groups[-1]))
    return any(len(shapes.get(name, ())) > 1 for name in first & last)


def _with_sharded_table(layers: list[LayerCosts], matrices: Shapes, owner: Mapping[str, int]) -> list[LayerCosts]:
    """Return the layers with the largest table of embeddings as parameters that tensor ranks divide by its rows."""
    tables = {name: shape for name, shape in matrices.items() if name in owner and not layers[owner[name]].products}
    if not tables:
        return layers
    name = max(tables, key=lambda each: tables[each][0])
    layer = layers[owner[name]]
    layers[owner[name]] = dataclasses.replace(layer, sharded_parameters=math.prod(tables[name]), reductions=1)
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
    """Nodes of one layer: a unit, or operations between units that read parameters, with what follows them."""

    name: str
    nodes: list[Node] = field(default_factory=list)


def _groups(graph: StepGraph) -> Iterator[_Group]:
    group = _Group("inputs")
    known: set[str] = set()
    for node in graph.nodes:
        starts = node.unit is not None or (node.parameters and not known.issuperset(node.parameters))
        known.update(node.parameters)
        if starts and any(each.parameters for each in group.nodes):
            yield group
            group = _Group("")
        if starts:
            group.name = node.unit or (node.parameters[0].rpartition(".")[0] if node.parameters else node.name)
        group.nodes.append(node)
    if group.nodes:
        yield group


def _layer(
    group: _Group,
    graph: StepGraph,
    matrices: Shapes,
    vectors: int,
    parameters: int,
    samples: int,
    positions: int,
    counted: set[int],
    experts: Sequence[ExpertSet],
) -> LayerCosts:
    of_experts = {parameter for each in experts for parameter in each.parameters}
    dense = [shape for parameter, shape in matrices.items() if parameter not in of_experts]
    flops = max(0.0, sum(node.flops for node in group.nodes) - sum(each.flops for each in experts)) / samples
    products = _products(dense, flops, _rows(group, graph, samples))
    new = {value for node in group.nodes for value in node.saved_values} - counted
    counted |= new
    element = _element_bytes(group, graph)
    inner = sum(node.saved_bytes for node in group.nodes) + sum(_value_bytes(graph.values[value]) for value in new)
    saved = inner / element / samples
    made = {value for node in group.nodes for value in node.outputs}
    inside = {node.index for node in group.nodes}
    later = (node for node in graph.nodes if node.index not in inside)
    read = {value for node in later for value in node.inputs}
    outputs = sum(math.prod(graph.values[value].shape) for value in made & read) / samples
    has_weight = [product for product in products if product.has_weight]
    replicated = min(saved, outputs * 2)
    return LayerCosts(
        group.name,
        products=(*products, *itertools.chain(*(each.products(samples) for each in experts))),
        parameters=parameters,
        sharded_parameters=min(parameters, int(sum(product.inner * product.columns for product in has_weight))),
        moved=2.0 * sum(node.moved_bytes for node in group.nodes) / element / samples,
        replicated_moved=min(2.0 * sum(node.moved_bytes for node in group.nodes) / element / samples, 4.0 * outputs),
        saved=saved,
        replicated_saved=replicated,
        selective_saved=max(_SELECTIVE_SHARE * saved, min(saved, outputs)),
        outputs=outputs,
        reductions=_reductions_of_layer(products, _width(group, graph)) + len(experts),
        kernels=_kernels(len(matrices), vectors),
        routed_tokens=sum(each.rows for each in experts) / samples,
        has_full_positions=not any(_keeps_shape(node, graph) for node in group.nodes),
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


def _reductions_of_layer(products: Sequence[Product], width: int) -> int:
    """The same of a recorded layer; with attention: after its projection, and each product down to the width."""
    has_weight = [product for product in products if product.has_weight]
    if not any(product.is_attention for product in products):
        return _reductions(has_weight)
    return 1 + sum(product.columns == width < product.inner for product in has_weight)


def _width(group: _Group, graph: StepGraph) -> int:
    """The last dim of the last floating-point value that the group makes; 0 without."""
    shapes = [
        graph.values[index].shape for node in group.nodes for index in node.outputs if _is_float(graph.values[index])
    ]
    return next((shape[-1] for shape in reversed(shapes) if shape), 0)


def _oriented(parameter: str, shapes: Shapes) -> tuple[int, ...]:
    """The shape of a matrix of parameters as ``[columns, ...]``; its bias tells where they are, if it has one."""
    shape, bias = shapes[parameter], shapes.get(f"{parameter.rpartition('.')[0]}.bias")
    is_transposed = len(shape) == 2 and bias == shape[1:] != shape[:1]
    return shape[::-1] if is_transposed else shape


def _kernels(matrices: int, vectors: int) -> int:
    return _KERNELS_PER_LAYER + _KERNELS_PER_PRODUCT * matrices + _KERNELS_PER_VECTOR * vectors


def _rows(group: _Group, graph: StepGraph, samples: int) -> float:
    """Rows per sample of the largest floating-point value that the group reads or makes, but for its last dim."""
    indices = {value for node in group.nodes for value in (*node.inputs, *node.outputs)}
    shapes = [graph.values[index].shape for index in indices if _is_float(graph.values[index])]
    rows = [math.prod(shape[:-1]) for shape in shapes if len(shape) > 1]
    return max(rows, default=samples) / samples


def _positions(graph: StepGraph, samples: int) -> int:
    """Tokens of a sample: the second of three dims, where most values that units read have three."""
    read = [graph.values[index].shape for node in graph.nodes if node.unit for index in node.inputs]
    sequences = [shape[1] for shape in read if len(shape) == 3 and shape[0] == samples]
    return max(sequences) if 2 * len(sequences) > len(read) else 1


def _is_float(value: Value) -> bool:
    return "float" in value.dtype


def _value_bytes(value: Value) -> float:
    found = _DTYPE_BITS.search(value.dtype)
    size: int = math.prod(value.shape)
    return size * (int(found[1]) / 8 if found else 1.0)


def _element_bytes(group: _Group, graph: StepGraph) -> float:
    """Bytes of an element of the first floating-point value that the group makes."""
    for node in group.nodes:
        for index in node.outputs:
            value = graph.values[index]
            size: int = math.prod(value.shape)
            if _is_float(value) and size:
                return _value_bytes(value) / size
    return 4.0
