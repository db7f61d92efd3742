"""Costs of an unmodified module, from the graph of its recorded step or, where it has none, from its parameters."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.predict.costs.layers import (
    FeatureMap,
    LayerCosts,
    ModelCosts,
    Routing,
    checksum_of_names,
    common_number,
)
from lightning_hybrid.predict.costs.recorded import (
    RecordedStep,
    Shapes,
    kernels,
    products_with_weights,
    reductions,
)
from lightning_hybrid.predict.ranks import SELECTIVE_SHARE

_LAYER_INDEX = re.compile(r"^(.*?\.\d+)(?:\.|$)")
PROOF = "which layers tensor ranks can shard is proved at the start of a run; the plan is subject to that proof"
ROUTING_PROOF = (
    "which experts ranks can share is proved at the start of a run; the plan with expert ranks is subject to that proof"
)


def costs_from_step_graph(
    graph: StepGraph,
    shapes: Shapes,
    *,
    samples: int,
    name: str = "module",
    frozen: Iterable[str] = (),
    part_of: Mapping[str, str] | None = None,
    routings: Mapping[str, Sequence[Routing]] | None = None,
    heads: tuple[int | None, int | None] = (None, None),
    sharded: Set[str] | None = None,
    maps: Mapping[str, Sequence[FeatureMap]] | None = None,
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
        routings: The experts of each unit, by its FQN.
        heads: The numbers that tensor ranks must divide: of heads, and of heads of keys and values.
        sharded: FQNs of the parameters that tensor ranks shard; None if that is not known: then all matrices.
        maps: What convolutions and norms of each unit read, for all samples, by its FQN.
    """
    routings, part_of = routings or {}, part_of or {}
    step = RecordedStep(graph, shapes, samples, routings, sharded, maps or {})
    of_few_stages: list[tuple[LayerCosts, ...]] = []
    while unopened := _unopened(part_of, shapes, len(of_few_stages) + 1):
        of_few_stages.append(tuple(merge_equal(step.layers(unopened))))
    return ModelCosts(
        name,
        tuple(merge_equal(step.layers({}))),
        positions=step.positions,
        heads=heads[0],
        key_value_heads=heads[1],
        routes=common_number(itertools.chain.from_iterable(routings.values())),
        has_tied_embedding=step.has_tied_embedding,
        frozen_parameters=sum(math.prod(shapes[parameter]) for parameter in frozen if parameter in shapes),
        notes=(PROOF, *((ROUTING_PROOF,) if routings else ())),
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
        products = tuple(products_with_weights(matrices, float(positions)))
        through = sum(product.inner + product.columns for product in products) * positions
        costs.append(
            LayerCosts(
                layer,
                products=products,
                parameters=sum(math.prod(shape) for shape in members),
                sharded_parameters=sum(math.prod(shape) for shape in matrices),
                moved=2.0 * through,
                saved=through,
                selective_saved=SELECTIVE_SHARE * through,
                outputs=min((product.inner for product in products), default=0.0) * positions,
                reductions=reductions(products),
                kernels=kernels(len(matrices), len(members) - len(matrices)),
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
