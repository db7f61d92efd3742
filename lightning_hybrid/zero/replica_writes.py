"""What a user's step writes to full parameters and gradients: replicas that hold shards of one must write the same.

A replica keeps only its shard, so of values that differ, as those computed from its own rows do, none would remain in
full. Writes are found without a message: by the version of a parameter and of its ``.data``, and by another ``.data``.
Only where there are some does a step end with digests of them that replicas compare.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.patching import replaced
from lightning_hybrid.zero.group import ParameterGroup

_DATA: Any = torch.Tensor.data


def _never() -> bool:
    return False


class ReplicaWrites:
    """Lets the ranks that hold shards of parameters compare what a step has written to them.

    A write that depends on the rank itself is one on some ranks only, and an error too.
    """

    def __init__(self, groups: Sequence[ParameterGroup], agreements: Iterable[HookAgreement]) -> None:
        """Take the groups, and an agreement of each set of ranks that hold shards of some."""
        self._groups, self._agreements = groups, {each.group: each for each in agreements}
        self._group_of = {id(parameter): group for group in groups for parameter in group.parameters.values()}
        self._is_user_step, self._are_averaged = False, _never

    @contextlib.contextmanager
    def compared(self, are_averaged: Callable[[], bool] = _never, *, is_user_step: bool = False) -> Iterator[None]:
        """Compare what a step inside has written; then collective. A ``user_step`` calls optimizers itself.

        What it writes to gradients is compared while they ``are_averaged``: before that, each replica has its own.

        Raises:
            RanksDisagree: Replicas have written other values.
        """
        content = property(self._read_data, _DATA.__set__)
        self._is_user_step, self._are_averaged = is_user_step, are_averaged
        try:
            with replaced(nn.Parameter, "data", content, reason="writes through it are compared"):
                yield
            for group in self._groups:
                for name, digest in group.writes.take():
                    self._agreements[group.ranks.shard].has_written(name, digest)
            for agreement in self._agreements.values():
                agreement.agree_on_writes("training_step")
        finally:
            self._is_user_step, self._are_averaged = False, _never
            for group in self._groups:
                group.writes.take()

    def before_shards(self) -> None:
        """Collect what the user's step has written before it calls an optimizer, which gathers stepped shards."""
        for group in self._groups if self._is_user_step else ():
            if group.is_full:
                group.writes.collect({name: group.full_parameter(name) for name in group.writes.names})
                if self._are_averaged():
                    group.writes.collect_gradients()

    def after_shards(self) -> None:
        """Leave out what the optimizer has written."""
        for group in self._groups if self._is_user_step else ():
            group.writes.begin()
            group.writes.begin_gradients()

    def _read_data(self, parameter: nn.Parameter) -> Tensor:
        data: Tensor = _DATA.__get__(parameter)
        group = self._group_of.get(id(parameter))
        if group is not None and group.is_full:
            group.writes.follow(parameter, data)
        return data
