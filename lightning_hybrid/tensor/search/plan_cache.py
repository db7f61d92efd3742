"""A cache of tensor plans in a file, so that a second run only proves the plans that the first one found.

A plan that was read is proved like a new one, in all settings, before it is used. A file that is torn, stale or of
another program counts as empty, and neither that nor a folder that cannot be written is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lightning_hybrid.parts.parameter_shard_placement import Shard
from lightning_hybrid.tensor.narrow.narrow_layer import narrow_layer
from lightning_hybrid.tensor.plan.plan_json import from_json, to_json
from lightning_hybrid.tensor.plan.unit_plan import SequenceParallel, UnitPlan
from lightning_hybrid.tensor.requests.plan_requests_by_unit import UnitRequests
from lightning_hybrid.tensor.requests.structure_digest import digest_of
from lightning_hybrid.tensor.search.unit_search import plan_unit
from lightning_hybrid.tensor.trial.sharded_unit_proof import prove_cached

FILE_NAME = "tensor_plans.json"
_MAX_PLANS = 500
_ABOUT = "how layers are sharded over tensor ranks; found by a search, which starts anew if this file is deleted"


class PlanCache:
    """Plans units, and reads and writes their plans in a file.

    Attributes:
        path: The file.
        num_read: Number of plans that were read and proved again.
        num_searched: Number of plans that were searched.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Takes ``folder`` (of the file, made where it is missing)."""
        self.path = Path(folder) / FILE_NAME
        self.num_read = self.num_searched = 0
        self._plans = self._read()
        self._searched: dict[str, Any] = {}

    def find(
        self,
        unit: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        size: int,
        *,
        keep_replicated: Mapping[str, str],
        plan_requests: UnitRequests,
        context: int = 1,
        sequence_parallel: SequenceParallel = None,
        vocabulary: Mapping[str, int] | None = None,
    ) -> UnitPlan:
        """A unit's plan, from the file if its proof passes and else from `plan_unit`; arguments as there."""
        by_rows = {name: f"by vocabulary along {dim}" for name, dim in (vocabulary or {}).items()}
        key = digest_of(
            unit, args, kwargs, (size, context), {**keep_replicated, **by_rows}, plan_requests, sequence_parallel
        )
        with contextlib.suppress(Exception):
            read = from_json(self._plans[key]["plan"])
            if not _fits_unit(read, unit, size, context, keep_replicated):
                raise ValueError("a plan for another unit")
            # A plan that shards nothing is right, and may be for a unit that cannot be tried.
            shards_something = read.num_sharded or read.positions is not None
            plan = prove_again(unit, args, kwargs, read) if shards_something else read
            if plan is not None:
                self.num_read += 1
                return plan
        plan = plan_unit(
            unit,
            args,
            kwargs,
            size,
            keep_replicated=keep_replicated,
            context=context,
            sequence_parallel=sequence_parallel,
            plan_requests=plan_requests,
            vocabulary=vocabulary,
        )
        self.num_searched += 1
        with contextlib.suppress(TypeError):
            written = to_json(replace(plan, calls=frozenset(), num_trials=0, seconds=0.0))
            self._searched[key] = {"unit": type(unit).__qualname__, "plan": written}
        return plan

    def save(self) -> str | None:
        """Adds the searched plans to the file; returns why it could not be written, or None."""
        if not self._searched:
            return None
        others = {key: value for key, value in self._read().items() if key not in self._searched}
        entries = dict([*others.items(), *self._searched.items()][-_MAX_PLANS:])
        # Renamed when complete: another run may be reading.
        partial = self.path.with_name(f".{FILE_NAME}.{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"about": _ABOUT, "plans": entries}, indent=1))
            os.replace(partial, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            return f"{type(error).__name__}: {error}"
        return None

    def summary(self, unwritten: str | None) -> str:
        """Describes where plans came from; `unwritten` is the reason why the file could not be written, if any."""
        text = f"{self.num_searched} searched, {self.num_read} read from {self.path} and proved again"
        return text if unwritten is None else f"{text}; nothing is kept for the next run: {unwritten}"

    def _read(self) -> dict[str, Any]:
        try:
            plans = json.loads(self.path.read_text())["plans"]
        except Exception:
            return {}
        return plans if isinstance(plans, dict) else {}


def prove_again(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: UnitPlan) -> UnitPlan | None:
    """Proves a plan on a narrow copy of the unit if there is one, else on the unit, as `prove_cached`."""
    kept = {unit.get_parameter(name).shape[dim] for name, dim in plan.vocabulary.items()}
    narrow = narrow_layer(unit, args, kwargs, plan.size * plan.context, kept)
    return prove_cached(unit, args, kwargs, plan) if isinstance(narrow, str) else narrow.prove_cached(plan)


def _fits_unit(plan: UnitPlan, unit: nn.Module, size: int, context: int, keep_replicated: Collection[str]) -> bool:
    """Whether a plan fits a unit; one that shards parameters which others read does not, although it is proved."""
    names = {name for name, _ in (*unit.named_parameters(), *unit.named_buffers())}
    sharded = {name for name, placement in plan.placements.items() if isinstance(placement, Shard)}
    if plan.size != size or plan.placements.keys() != names or sharded & set(keep_replicated):
        return False
    if plan.positions is None or plan.positions.by == "tensor":
        return plan.full_sequence_plan is None
    full_sequence_plan = plan.full_sequence_plan
    same_storage = full_sequence_plan.placements == plan.placements if full_sequence_plan is not None else size == 1
    return plan.context == context and same_storage
