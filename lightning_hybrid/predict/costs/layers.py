"""Costs of a model's layers per sample, before any layout: `LayerCosts` and `ModelCosts`.

All sizes are of one sample (one sequence) and of the forward; predictions derive the backward and divide by ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from lightning_hybrid.predict.correction import Correction
    from lightning_hybrid.predict.layout import PlanLayout

Sharding = Literal["columns", "inner", "count", ""]


@dataclass(frozen=True)
class Product:
    """Equal matrix products ``[rows, inner] @ [inner, columns]`` of one layer's forward, for one sample."""

    rows: float  # rows for one sample, such as the length of a sequence
    inner: float  # the size that is summed over
    columns: float  # columns of the result
    count: float = 1.0  # how many such products one sample takes, such as the number of heads
    sharded: Sharding = ""  # what tensor ranks divide; empty if each of them computes all of it
    # whether the second operand is a parameter, shared by all samples: the samples of a microbatch then make one
    # product with more rows. Otherwise they make more products.
    has_weight: bool = True
    is_attention: bool = False  # whether it belongs to attention scores, which context ranks and causal masks shorten
    active_share: float = 1.0  # share of the rows that are computed, such as the causal half of attention scores
    # whether a second forward in the backward runs it. PyTorch's checkpoint stops at the last tensor that the backward
    # needs (``set_checkpoint_early_stop``), before a product whose result nothing saves.
    repeats: bool = True
    groups: int = 1  # matrices, such as those of experts, among which the rows are divided
    in_float8: bool = True  # whether 8-bit precisions convert its operands; otherwise they stay in 16 bits

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward for one sample."""
        return 2.0 * self.rows * self.inner * self.columns * self.count * self.active_share


class FeatureMap(NamedTuple):
    """An image, volume or feature map of a sample that an operation of a layer reads; ranks can share its rows."""

    rows: int  # length of its longest dim of space
    row_elements: float  # elements of one row
    border: int = 0  # rows of neighbours that a kernel reads, on both sides together
    summed: int = 0  # parameters whose gradients are summed over the ranks in the backward
    statistics: int = 0  # sums over rows that a norm takes, in the forward and in the backward

    def rows_of(self, ranks: int) -> int:
        """Return the rows of the rank with most of them; a map with fewer rows than ranks is on each of them."""
        return -(-self.rows // ranks) if self.rows >= ranks else self.rows


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one layer, or of ``count`` equal layers in a row, for one sample.

    Sizes of tensors are numbers of elements; the layout's number format gives the bytes of an element.
    """

    name: str  # FQN or kind of the layer
    count: int = 1  # equal layers in a row
    products: tuple[Product, ...] = ()  # its matrix products
    parameters: int = 0  # number of parameters of one layer, experts included
    sharded_parameters: int = 0  # those that tensor ranks divide, experts not included
    routed_parameters: int = 0  # those among which tokens are routed (experts)
    # elements that memory-bound operations read and write in the forward, besides products and scores
    moved: float = 0.0
    moved_scores: float = 0.0  # elements of attention scores that a softmax outside the products reads and writes
    replicated_moved: float = 0.0  # the part of ``moved`` that tensor ranks do not divide, unless sequence parallel
    saved: float = 0.0  # elements saved for the backward, without attention scores
    replicated_saved: float = 0.0  # the part of ``saved`` that tensor ranks do not divide, unless sequence parallel
    saved_scores: float = 0.0  # elements of attention scores saved; "selective" recomputation saves none
    selective_saved: float = 0.0  # elements saved under selective recomputation (results of expensive operations)
    full_saved: float | None = None  # elements saved under full recomputation; ``outputs`` if None
    outputs: float = 0.0  # elements of its result, which the next stage receives
    reductions: int = 0  # all-reduces of ``outputs`` over tensor ranks in the forward; as many in the backward
    kernels: int = 0  # kernels started in the forward
    # whether the host reads how many rows each expert gets before it starts their kernels, in forward and backward
    waits_for_rows: bool = False
    float32_saved: float = 0.0  # elements saved in 32 bits besides ``saved``, such as logits of a loss
    loss_saved: float = 0.0  # the part of ``saved`` that a loss over classes saves; a loss in chunks saves none
    peak_only: float = 0.0  # elements held in 32 bits during the layer's backward alone, in each of two gradients
    again: float = 0.0  # share of its forward that checkpoints of the user's code run again in the backward
    # whether the backward may run its forward again; that of layers, not of an embedding or a loss
    repeats: bool = True
    # whether each context rank computes all positions of it, as the strategies do of an embedding and of a loss: of
    # whatever has no argument of its result's shape
    has_full_positions: bool = False
    routed_tokens: float = 0.0  # rows that each of all-to-all carries to experts and back; 0 without experts
    maps: tuple[FeatureMap, ...] = ()  # what its operations over space read; empty if it has none

    @property
    def flops(self) -> float:
        """Floating-point operations of one layer's forward for one sample."""
        return sum(product.flops for product in self.products)

    def map_share(self, ranks: int) -> float:
        """Return the share of its feature maps on the one of so many ranks that has most of them; 1 without maps."""
        full = sum(each.rows * each.row_elements for each in self.maps)
        return sum(each.rows_of(ranks) * each.row_elements for each in self.maps) / full if full else 1.0


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model."""

    name: str  # for reports
    layers: tuple[LayerCosts, ...]  # in order of execution; the partition into stages is contiguous
    positions: int = 1  # tokens of one sample, 1 if it is no sequence
    heads: int | None = None  # the number that tensor ranks must divide; None if unknown
    key_value_heads: int | None = None  # the same of keys and values
    routes: int = 0  # experts of a layer among which tokens are routed; 0 without
    has_tied_embedding: bool = False  # whether the first and the last layer share a parameter, counted in the first
    # whether the costs come from a recorded step or configuration; False if estimated from parameters
    is_traced: bool = True
    frozen_parameters: int = 0  # parameters without gradients
    # whether layers take statistics of each microbatch, so that results depend on their number
    has_batch_norm: bool = False
    why_no_stages: str = ""  # why its step cannot be run in stages, and on microbatches; empty if it may
    notes: tuple[str, ...] = field(default=())  # for reports
    # the layers of layouts with 1, 2, ... stages; those of more stages are ``layers``.
    layers_of_few_stages: tuple[tuple[LayerCosts, ...], ...] = ()
    names_checksum: int = 0  # `checksum_of_names` of the parameters; 0 if these are unknown
    sample_elements: float = 0.0  # elements of the tensors of one sample; 0 if unknown
    # of predictions, by the measured steps of a run of this model; None if there is none
    correction: Correction | None = None

    @property
    def is_sequence(self) -> bool:
        """Whether samples have positions, which ranks can divide."""
        return self.positions > 1

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(layer.parameters * layer.count for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """Number of single layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def flops(self) -> float:
        """Floating-point operations of a forward for one sample."""
        return sum(layer.flops * layer.count for layer in self.layers)

    @property
    def most_rows(self) -> int:
        """Rows of the largest feature map that a convolution or norm reads; 0 without."""
        maps = (each for layer in self.layers for each in layer.maps if each.summed)
        return max((each.rows for each in maps), default=0)

    def map_share(self, ranks: int) -> float:
        """Return the share of activations that one of so many ranks has, which share the rows of feature maps."""
        saved = sum(layer.count * layer.saved for layer in self.layers)
        shared = sum(layer.count * layer.saved * layer.map_share(ranks) for layer in self.layers)
        return shared / saved if saved else 1.0

    def with_stages(self, num_stages: int) -> ModelCosts:
        """Return the costs with the layers of a step in a number of stages: in few, an opened layer is one."""
        few = self.layers_of_few_stages
        if num_stages > len(few) or sum(layer.count for layer in few[num_stages - 1]) < num_stages:
            return self
        return replace(self, layers=few[num_stages - 1], layers_of_few_stages=())

    def single_layers(self) -> Iterator[LayerCosts]:
        """All layers one by one, in order."""
        for layer in self.layers:
            for _ in range(layer.count):
                yield layer


def checksum_of_names(names: Iterable[str]) -> int:
    """Return a checksum of the names of a model's parameters, by which runs of the same model are known."""
    return zlib.crc32("\n".join(names).encode())


@dataclass(frozen=True)
class Routing:
    """Experts of one module, among which its tokens are routed.

    Attributes:
        module: FQN of the module.
        count: Number of experts.
        parameters: FQNs of their parameters.
        rows: Rows that all experts compute in the recorded step: tokens times experts per token.
        matrices: Sizes ``(inner, columns)`` of the products of each row with one expert's matrices.
    """

    module: str
    count: int
    parameters: tuple[str, ...]
    rows: float
    matrices: tuple[tuple[int, int], ...]

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward."""
        return 2.0 * self.rows * sum(inner * columns for inner, columns in self.matrices)

    def products(self, samples: int) -> Iterator[Product]:
        """Yield the products of one of ``samples`` samples."""
        for inner, columns in self.matrices:
            side: Sharding = "inner" if columns < inner else "columns"
            yield Product(self.rows / samples, inner, columns, sharded=side, groups=self.count)

    def in_unit(self, own: str, other: str) -> Routing:
        """Return the experts at the same place in another unit, equal in structure; both are given by their FQNs."""
        names = tuple(other + name[len(own) :] for name in self.parameters)
        return Routing(other + self.module[len(own) :], self.count, names, self.rows, self.matrices)


def common_number(sets: Iterable[Routing]) -> int:
    """Return the number that expert ranks must divide, so that they divide the experts of each module; 0 without."""
    return math.gcd(*(each.count for each in sets))


def parameters_of(sets: Iterable[Routing], shapes: Mapping[str, tuple[int, ...]], among: Collection[str]) -> int:
    """Return how many of the parameters named in ``among`` belong to experts."""
    names = {name for each in sets for name in each.parameters} & set(among)
    return sum(math.prod(shapes[name]) for name in names if name in shapes)


class Parameters(NamedTuple):
    """Numbers of parameters that one rank computes with.

    Attributes:
        dense: Those outside experts.
        routed: Parameters of experts.
    """

    dense: float
    routed: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.routed

    def over_shards(self, layout: PlanLayout) -> Parameters:
        """Return what ZeRO leaves to one rank of these."""
        return Parameters(self.dense / layout.shard, self.routed / layout.routed_shards)


def parameters_of_rank(layers: Iterable[tuple[LayerCosts, int]], layout: PlanLayout) -> Parameters:
    """Return the parameters of layers, each with the number of equal ones, that one rank computes with.

    Tensor ranks divide the width of experts, too.
    """
    dense = routed = 0.0
    for layer, count in layers:
        replicated = layer.parameters - layer.sharded_parameters - layer.routed_parameters
        dense += count * (replicated + layer.sharded_parameters / layout.tensor)
        routed += count * layer.routed_parameters / (layout.routed_ranks * layout.tensor)
    return Parameters(dense, routed)


def layout_of_layer(layer: LayerCosts, layout: PlanLayout) -> PlanLayout:
    """Return the layout by whose sizes the layer's rows and activations are divided."""
    if layout.spatial:
        return layout.replaced(context=1.0 / layer.map_share(layout.context))
    if layer.has_full_positions and layout.context > 1:
        return layout.replaced(context=1)
    return layout
