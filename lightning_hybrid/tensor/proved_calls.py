"""Sees whether a unit does in a run what its plan was proved for.

A plan holds for the lines of code that ran in trials. So the lines that call torch are noted there, and again in the
first forward of a run with other plain arguments, shapes or plain attributes than before: a branch that no trial has
taken shows. A unit that reads values of tensors is looked at in each forward. What is decided by nothing of this, such
as a global variable, is not seen.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.step.code_path import CodePath, calls_of
from lightning_hybrid.step.looks import plain_state
from lightning_hybrid.step.recent import Recent
from lightning_hybrid.step.transaction import PLAIN
from lightning_hybrid.step.tree import flatten_call

_VALUE_READS = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__array__", "item", "tolist", "numpy", "equal", "allclose"}
)
_MOST_KEYS = 512


class NotProved(Exception):
    """A unit does something else than what its plan was proved for; the message is the line."""


class ProvedCalls:
    """What is known of the forwards of one unit."""

    def __init__(self, unit: nn.Module, calls: frozenset[int]) -> None:
        """Args: unit: the user's. calls: of trials; see ``calls_of``."""
        self._modules, self._calls = list(unit.modules()), calls
        self._proved: Recent[Hashable, str] = Recent(_MOST_KEYS)  # where something else was called, or nothing
        self._reads_values = False

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What a forward may decide by: plain arguments and attributes, shapes, and what torch is set to."""
        given = len(args), *kwargs, *[_described(leaf) for leaf in flatten_call(args, kwargs)[0]]
        switches = torch.is_grad_enabled(), torch.is_autocast_enabled(), torch.is_autocast_cpu_enabled()
        return given, switches, tuple(plain_state(self._modules))

    def is_new(self, key: Hashable) -> bool:
        """Whether a forward has to be looked at.

        Raises:
            NotProved: One like it has done something else.
        """
        if self._reads_values or key not in self._proved:
            return True
        if where := self._proved[key]:
            raise NotProved(where)
        return False

    def look(self, key: Hashable, path: CodePath) -> None:
        """Look at a forward, which may have failed.

        Raises:
            NotProved: It has done something else.
        """
        calls = calls_of(path.steps)
        where = next((line for call, line in calls.items() if call not in self._calls), "")
        self._reads_values |= any(getattr(function, "__name__", "") in _VALUE_READS for function, _ in path.steps)
        self._proved[key] = where
        if where:
            raise NotProved(where)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if type(leaf) in PLAIN else type(leaf)
