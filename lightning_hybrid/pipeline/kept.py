"""Values of a step that stay reachable from the user's module, joined over the microbatches.

``self.outputs.append(prediction)`` runs once per microbatch; the user expects one entry per step. Where a step cannot
run on the whole batch (``whole_batch``), lists that grew by an entry per sample stay, others are joined entry by entry,
and an attribute that is bound anew keeps the value of the last microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.step.joined import has_rows, join
from lightning_hybrid.step.microbatch import sizes_of
from lightning_hybrid.step.replay import StageReplay
from lightning_hybrid.step.transaction import Place


class KeptValues:
    """The lists that a step appends to, as they were before it."""

    def __init__(self, root: nn.Module, replays: Mapping[int, StageReplay], any_stage: int) -> None:
        """Args: root: the user's module. replays: of this rank. any_stage: a stage of this rank."""
        places = replays[any_stage].recording.kept
        self._lists: dict[int, tuple[list[Any], int]] = {}
        for place, _ in places:
            holder = _resolve(root, place._replace(path=place.path[:-1])) if place.path else None
            if isinstance(holder, list):
                self._lists.setdefault(id(holder), (holder, len(holder)))

    def join(self, weights: Sequence[float], microbatches: Sequence[Any]) -> None:
        """Join what the microbatches appended."""
        number = len(weights)
        if number == 1:
            return
        sizes = sizes_of(microbatches)
        for holder, before in self._lists.values():
            grown = holder[before:]
            if grown and len(grown) % number == 0:
                each = len(grown) // number
                if each > 1 and all(size == each and not any(has_rows(e, each) for e in grown) for size in sizes):
                    continue  # one entry per sample
                columns = [grown[place::each] for place in range(each)]
                holder[before:] = [join([_plain(part) for part in column], weights, sizes) for column in columns]


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _resolve(root: nn.Module, place: Place) -> Any:
    value: Any = getattr(root.get_submodule(place.module), place.attribute, None)
    for key in place.path:
        try:
            value = value.__dict__[key] if hasattr(value, "__dict__") and not isinstance(value, dict) else value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value
