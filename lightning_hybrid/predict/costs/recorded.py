"""Layers of a recorded step, as the planner's costs: `RecordedStep`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_hybrid.graph.step_graph import Node, StepGraph, Value
from lightning_hybrid.predict.costs.layers import FeatureMap, LayerCosts, Product, Routing, Sharding, parameters_of
from lightning_hybrid.predict.memory import CONSTANTS
from lightning_hybrid.predict.ranks import SELECTIVE_SHARE

_FLOAT32_BYTES = 4
# Losses over classes that chunked_loss computes in chunks.
_OVER_CLASSES = frozenset({"cross_entropy", "nll_loss"})


@dataclass(frozen=True)
class RecordedStep:
    """A recorded training step, with its layers as units."""

    graph: StepGraph  # the step
    shapes: Shapes  # shape of each parameter, by FQN
    samples: int  # samples of the recorded batch
    routings: Mapping[str, Sequence[Routing]]  # the experts of each unit, by its FQN
    # FQNs of the parameters that tensor ranks shard; None if that is not known: then all matrices
    sharded: Set[str] | None = None
    # what convolutions and norms of each unit read, for all samples, by its FQN
    maps: Mapping[str, Sequence[FeatureMap]] = field(default_factory=dict)

    def layers(self, part_of: Mapping[str, str]) -> list[LayerCosts]:
        """Return the costs per sample of each layer: of units, and of operations between them.

        Args:
            part_of: For units that are part of a layer, the FQN of that layer.
        """
        groups, graph, shapes = list(_groups(self.graph, part_of)), self.graph, self.shapes
        owner: dict[str, int] = {}
        for number, group in enumerate(groups):
            for node in group.nodes:
                for parameter in node.parameters:
                    owner.setdefault(parameter, number)
        counted, kept = set[int](), set[int]()
        layers = []
        for number, group in enumerate(groups):
            read = {name for node in group.nodes for name in node.parameters if name in shapes}
            owned = {name for name in read if owner[name] == number}
            layer = self._layer(group, owned, counted)
            layers.append(_with_repeats(layer, group, graph, self.samples, kept))
        if not layers:
            return layers
        unused = sum(math.prod(shape) for parameter, shape in shapes.items() if parameter not in owner)
        layers[0] = dataclasses.replace(layers[0], parameters=layers[0].parameters + unused)
        if graph.loss is not None:
            layers[-1] = _with_loss(layers[-1], groups[-1], graph, self.samples)
        return self._with_sharded_table(layers, owner)

    @property
    def has_tied_embedding(self) -> bool:
        """Whether the first and the last of several layers read the same matrix."""
        groups = list(_groups(self.graph, {}))
        if len(groups) < 2:
            return False
        first, last = ({name for node in group.nodes for name in node.parameters} for group in (groups[0], groups[-1]))
        return any(len(self.shapes.get(name, ())) > 1 for name in first & last)

    @property
    def positions(self) -> int:
        """Tokens of a sample: the second of three dims, where most values that units read have three."""
        graph = self.graph
        read = [graph.values[index].shape for node in graph.nodes if node.unit for index in node.inputs]
        sequences = [shape[1] for shape in read if len(shape) == 3 and shape[0] == self.samples]
        return max(sequences) if 2 * len(sequences) > len(read) else 1

    def _layer(self, group: _Group, owned: Set[str], counted: set[int]) -> LayerCosts:
        """Return a layer's costs, without loss and recomputation; what it saves is added to ``counted`` values."""
        graph, shapes, samples = self.graph, self.shapes, self.samples
        used = dict.fromkeys(parameter for node in group.nodes for parameter in node.parameters if parameter in shapes)
        matrices = {parameter: oriented(parameter, shapes) for parameter in used if len(shapes[parameter]) > 1}
        routings = [each for node in group.nodes for each in self.routings.get(node.unit, ())]
        routed = {parameter for each in routings for parameter in each.parameters}
        dense = {parameter: shape for parameter, shape in matrices.items() if parameter not in routed}
        all_flops = sum(node.flops for node in group.nodes)
        flops = max(0.0, all_flops - sum(each.flops for each in routings)) / samples
        products = products_of_layer(dense, flops, _rows(group, graph, samples), self.sharded)
        sharded = [product for product in products if product.has_weight and product.sharded]
        new = {value for node in group.nodes for value in node.saved_values} - counted
        counted |= new
        element = _element_bytes(group, graph)
        inner = sum(node.saved_bytes for node in group.nodes) + sum(graph.values[value].nbytes for value in new)
        saved = inner / element / samples
        moved = 2.0 * sum(node.moved_bytes for node in group.nodes) / element / samples
        made = {value for node in group.nodes for value in node.outputs}
        inside = {node.index for node in group.nodes}
        later = (node for node in graph.nodes if node.index not in inside)
        read = {value for node in later for value in node.inputs}
        outputs = sum(math.prod(graph.values[value].shape) for value in made & read) / samples
        parameters = sum(math.prod(shapes[parameter]) for parameter in owned)
        is_divided = self.sharded is None or bool(sharded) or bool(routings)
        # A region of tensor ranks begins with a norm, whose input and output all of them save; attention is one of two.
        regions = 2 if len(sharded) > 1 and any(product.is_attention for product in products) else 1
        return LayerCosts(
            group.name,
            products=(*products, *itertools.chain(*(each.products(samples) for each in routings))),
            parameters=parameters,
            sharded_parameters=min(parameters, int(sum(product.inner * product.columns for product in sharded))),
            routed_parameters=parameters_of(routings, shapes, owned),
            moved=moved,
            replicated_moved=min(moved, 4.0 * outputs) if is_divided else moved,
            saved=saved,
            replicated_saved=min(saved, 2.0 * regions * outputs) if is_divided else saved,
            outputs=outputs,
            reductions=reductions_of_layer(products, _width(group, graph)) + len(routings),
            kernels=kernels(len(matrices), len(used) - len(matrices)),
            routed_tokens=sum(each.rows for each in routings) / samples,
            waits_for_rows=bool(routings),
            again=sum(node.repeated_flops for node in group.nodes) / all_flops if all_flops else 0.0,
            maps=tuple(self._maps(group)),
            has_full_positions=not any(_keeps_shape(node, graph) for node in group.nodes),
        )

    def _maps(self, group: _Group) -> Iterator[FeatureMap]:
        """Yield the feature maps that a layer of a model with convolutions reads, inside of units and around them."""
        if not self.maps:
            return
        for node in group.nodes:
            for each in self.maps.get(node.unit, ()):
                yield each._replace(row_elements=each.row_elements / self.samples)
            if node.unit not in self.maps:
                for shape in (self.graph.values[index].shape for index in node.inputs):
                    if len(shape) in (4, 5) and shape[0] == self.samples:
                        rows = max(shape[2:])
                        yield FeatureMap(rows, math.prod(shape) / rows / self.samples)

    def _with_sharded_table(self, layers: list[LayerCosts], owner: Mapping[str, int]) -> list[LayerCosts]:
        """Return the layers with the largest table of embeddings as parameters that tensor ranks divide by its rows."""
        tables = {
            name: shape
            for name, shape in self.shapes.items()
            if len(shape) == 2 and name in owner and not layers[owner[name]].products
        }
        if self.sharded is not None:
            tables = {name: shape for name, shape in tables.items() if name in self.sharded}
        if not tables:
            return layers
        name = max(tables, key=lambda each: tables[each][0])
        layer = layers[owner[name]]
        layers[owner[name]] = dataclasses.replace(layer, sharded_parameters=math.prod(tables[name]), reductions=1)
        return layers


@dataclass
class _Group:
    """Nodes of one layer: a unit, or operations between units that read parameters, with what follows them."""

    name: str  # FQN of the unit, or of what the first of the parameters belongs to
    nodes: list[Node] = field(default_factory=list)  # in order
    unit: set[int] = field(default_factory=set)  # indices of the nodes of the unit itself


def _groups(graph: StepGraph, part_of: Mapping[str, str]) -> Iterator[_Group]:
    """Yield the layers; units of one layer of ``part_of``, and operations between them, are one unit."""
    group = _Group("inputs")
    known: set[str] = set()
    layers = [part_of.get(node.unit) for node in graph.nodes]
    last = {layer: index for index, layer in enumerate(layers) if layer is not None}
    end = -1
    for index, (node, layer) in enumerate(zip(graph.nodes, layers, strict=True)):
        is_inside = index <= end
        starts = node.unit or (node.parameters and not known.issuperset(node.parameters))
        known.update(node.parameters)
        if starts and not is_inside and any(each.parameters for each in group.nodes):
            yield group
            group = _Group("")
        if starts and not is_inside:
            of_parameter = node.parameters[0].rpartition(".")[0] if node.parameters else node.name
            group.name = layer or node.unit or of_parameter
            end = last[layer] if layer is not None else -1
        if is_inside or node.unit:
            group.unit.add(node.index)
        group.nodes.append(node)
    if group.nodes:
        yield group


def _with_repeats(layer: LayerCosts, group: _Group, graph: StepGraph, samples: int, kept: set[int]) -> LayerCosts:
    """Return the layer with what recomputation saves besides ``kept`` values: inputs of the unit, all around it."""
    made = {value for node in group.nodes if node.index in group.unit for value in node.outputs}
    around = [node for node in group.nodes if node.index not in group.unit]
    inputs = {value for node in group.nodes if node.index in group.unit for value in node.inputs}
    new = (inputs - made | {value for node in around for value in node.saved_values}) - kept
    kept |= new
    outside = sum(node.saved_bytes for node in around)
    scale = 1 / _element_bytes(group, graph) / samples
    saved = min(layer.saved, (outside + sum(graph.values[value].nbytes for value in new)) * scale)
    inside = max(0.0, layer.saved - outside * scale)
    return dataclasses.replace(
        layer,
        full_saved=saved,
        selective_saved=max(layer.saved - (1 - SELECTIVE_SHARE) * inside, saved),
        repeats=bool(group.unit),
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
    return bool(node.unit) and any(graph.values[index].shape in shapes for index in node.outputs)


def _rows(group: _Group, graph: StepGraph, samples: int) -> float:
    """Rows per sample of the largest floating-point value that the group reads or makes, but for its last dim."""
    indices = {value for node in group.nodes for value in (*node.inputs, *node.outputs)}
    shapes = [graph.values[index].shape for index in indices if is_float(graph.values[index])]
    rows = [math.prod(shape[:-1]) for shape in shapes if len(shape) > 1]
    return max(rows, default=samples) / samples


def _width(group: _Group, graph: StepGraph) -> int:
    """The last dim of the last floating-point value that the group makes; 0 without."""
    shapes = [
        graph.values[index].shape for node in group.nodes for index in node.outputs if is_float(graph.values[index])
    ]
    return next((shape[-1] for shape in reversed(shapes) if shape), 0)


def _element_bytes(group: _Group, graph: StepGraph) -> float:
    """Bytes of an element of the first floating-point value that the group makes."""
    for node in group.nodes:
        for index in node.outputs:
            value = graph.values[index]
            size: int = math.prod(value.shape)
            if is_float(value) and size:
                return value.nbytes / size
    return 4.0


class LossBytes(NamedTuple):
    """Bytes of one recorded step around its loss."""

    saved: float  # bytes that a loss over classes saves for its backward; 0 for other losses
    backward: float  # bytes of gradients that are held at once, at the peak of the backward, besides all saved bytes


def bytes_of_loss(nodes: Sequence[Node], graph: StepGraph) -> LossBytes:
    """Return the bytes around the loss: the largest sum of what is live while the last nodes run backward.

    The backward of an operation holds the gradients of its results and of its arguments, those that wait for an earlier
    operation, and, of an operation such as ``cross_entropy`` that saves results of operations inside of it, gradients
    of these.

    Args:
        nodes: Of the last layer, in order; the loss is among their results.
        graph: Of the step.
    """
    memory = _memory_of_values(nodes, graph)
    gradients: dict[int, float] = {}
    freed = peak = 0.0
    for node in reversed(nodes):
        for index in (*node.inputs, *node.outputs):
            value = graph.values[index]
            if value.requires_grad and is_float(value):
                gradients[memory.get(index, index)] = value.nbytes
        inside = 0 if node.unit else node.saved_bytes
        peak = max(peak, sum(gradients.values()) + inside - freed)
        kept = {memory.get(index, index) for index in node.inputs}
        for index in {memory.get(index, index) for index in node.outputs} - kept:
            gradients.pop(index, None)
        freed += node.saved_bytes
    if not any(node.name in _OVER_CLASSES for node in nodes):
        return LossBytes(0.0, peak)
    after = [node for node in nodes if not node.parameters]
    made = {index for node in nodes for index in node.outputs}
    saved = {memory.get(index, index) for node in after for index in node.saved_values if index in made}
    return LossBytes(sum(node.saved_bytes for node in after) + sum(graph.values[i].nbytes for i in saved), peak)


def _memory_of_values(nodes: Sequence[Node], graph: StepGraph) -> dict[int, int]:
    """The value whose memory a view has, by the view: gradients of both are one tensor."""
    found: dict[int, int] = {}
    for node in nodes:
        if not node.unit and not node.moved_bytes and node.inputs:
            size = math.prod(graph.values[node.inputs[0]].shape)
            for index in node.outputs:
                if math.prod(graph.values[index].shape) == size:
                    found[index] = found.get(node.inputs[0], node.inputs[0])
    return found


def is_float(value: Value) -> bool:
    """Whether the value has floating-point elements."""
    return "float" in value.dtype


Shapes = Mapping[str, tuple[int, ...]]

# Kernels of a forward, per product and per parameter of one dimension (a norm or a bias), besides those.
_KERNELS_PER_PRODUCT, _KERNELS_PER_VECTOR, _KERNELS_PER_LAYER = 3, 2, 4


def products_of_layer(
    matrices: Shapes, flops: float, rows: float, sharded: Set[str] | None = None
) -> tuple[Product, ...]:
    """Divide the FLOPs of a layer among its parameters, by their sizes, and products without weights.

    Args:
        matrices: Shape of each parameter of two or more dimensions, by FQN.
        flops: Of the layer's forward for one sample.
        rows: Rows of each product for one sample.
        sharded: FQNs of parameters that tensor ranks shard; all if None.
    """
    sizes = [math.prod(shape) for shape in matrices.values()]
    if not flops:
        return ()
    if sizes:
        most = flops / (2.0 * sum(sizes))  # rows, if all FLOPs are those of parameters
        is_linear = all(len(shape) == 2 for shape in matrices.values())
        share = min(rows, most) if is_linear else most
        rest = flops - 2.0 * share * sum(sizes)
        products = [
            product if sharded is None or name in sharded else dataclasses.replace(product, sharded="")
            for name, product in zip(matrices, products_with_weights(matrices.values(), share), strict=True)
        ]
    else:
        rest, products = flops, []
    if rest > 1e-6 * flops and rows:
        # As scores of attention: rows against rows.
        is_sharded = any(product.sharded for product in products) or not products
        kind: Sharding = "count" if is_sharded else ""
        products.append(Product(rows, rest / (2.0 * rows * rows), rows, 1.0, kind, False, rows > 1))
    return tuple(products)


def products_with_weights(matrices: Iterable[tuple[int, ...]], rows: float) -> Iterator[Product]:
    """Yield the product of each shape ``[columns, ...]`` of parameters with a number of rows."""
    for shape in matrices:
        columns, inner = shape[0], math.prod(shape[1:])
        yield Product(rows, inner, columns, sharded="inner" if columns < inner else "columns")


def reductions(products: Sequence[Product]) -> int:
    """All-reduces of a layer whose products alternate between sharded columns and sharded rows."""
    return max(1, sum(product.sharded == "inner" for product in products)) if products else 0


def reductions_of_layer(products: Sequence[Product], width: int) -> int:
    """The same of a recorded layer; with attention: after its projection, and each product down to the width."""
    sharded = [product for product in products if product.has_weight and product.sharded]
    if not sharded or not any(product.is_attention for product in products):
        return reductions(sharded)
    return 1 + sum(product.columns == width < product.inner for product in sharded)


def oriented(parameter: str, shapes: Shapes) -> tuple[int, ...]:
    """The shape of a matrix of parameters as ``[columns, ...]``; its bias tells where they are, if it has one."""
    shape, bias = shapes[parameter], shapes.get(f"{parameter.rpartition('.')[0]}.bias")
    is_transposed = len(shape) == 2 and bias == shape[1:] != shape[:1]
    return shape[::-1] if is_transposed else shape


def kernels(matrices: int, vectors: int) -> int:
    """Kernels that the forward of a layer starts, with so many parameters of two or more dimensions, and of one."""
    return _KERNELS_PER_LAYER + _KERNELS_PER_PRODUCT * matrices + _KERNELS_PER_VECTOR * vectors
