"""Matrix products of a layer of the user's module, from the shapes of its parameters and its FLOPs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from lightning_hybrid.planner.costs.layer_costs import Product, Sharding

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
