"""Experts of a recorded module, as data: `ExpertSet`, and the products and sizes that its layer's costs have of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from lightning_hybrid.planner.costs.layer_costs import Product

EXPERT_PROOF = (
    "which experts ranks can share is proved at the start of a run; the plan with expert ranks is subject to that proof"
)


@dataclass(frozen=True)
class ExpertSet:
    """Experts of one module, among which its tokens are routed.

    Attributes:
        module: FQN of the module.
        experts: Number of experts.
        parameters: FQNs of their parameters.
        rows: Rows that all experts compute in the recorded step: tokens times experts per token.
        matrices: Sizes ``(inner, columns)`` of the products of each row with one expert's matrices.
    """

    module: str
    experts: int
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
            yield Product(self.rows / samples, inner, columns, sharded="inner" if columns < inner else "columns")

    def in_unit(self, own: str, other: str) -> ExpertSet:
        """Return the experts at the same place in the unit ``other``, which is structurally equal to the unit ``own``.

        Args:
            own: FQN of the unit that the module is in.
            other: FQN of the other unit.
        """
        names = tuple(other + name[len(own) :] for name in self.parameters)
        return ExpertSet(other + self.module[len(own) :], self.experts, names, self.rows, self.matrices)


def common_number(sets: Iterable[ExpertSet]) -> int:
    """Return the number that expert ranks must divide, so that they divide the experts of each module; 0 without."""
    return math.gcd(*(each.experts for each in sets))


def parameters_of(sets: Iterable[ExpertSet], shapes: Mapping[str, tuple[int, ...]], among: Collection[str]) -> int:
    """Return how many parameters the experts have, of those named in ``among``."""
    names = {name for each in sets for name in each.parameters} & set(among)
    return sum(math.prod(shapes[name]) for name in names if name in shapes)
