"""Selective activation checkpointing of a layer: saves expensive results and recomputes cheap ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from lightning_hybrid.memory.knapsack import Step, choose_kept, needed
from lightning_hybrid.memory.recomputable_values_and_operations import (
    Operation,
    ParameterGatherer,
    Value,
    tensors_of,
)
from lightning_hybrid.memory.recomputation_tape import Tape, restore
from lightning_hybrid.step.objects.bounded_lru_dict import BoundedLRUDict

# Cost of moving a byte, in floating-point operations of a matrix product; and of drawing one at random.
WORK_PER_BYTE = {"cpu": 16.0, "cuda": 100.0}
_WORK_PER_DRAWN_BYTE = {"cpu": 64.0, "cuda": 100.0}
_MAX_CHOICES = 512  # size of the cache of choices


class RecordedRun:
    """What decides on one run of a layer that is recorded.

    Attributes:
        kept: Returns the operations whose results are kept, from the tape of the run.
    """

    def __init__(self, kept: Callable[[Tape], frozenset[int]]) -> None:
        self.kept = kept

    def hooks(self, tape: Tape, restore: Callable[[Any], Tensor]) -> tuple[Callable[[Tensor], Any], Callable[..., Any]]:
        """Returns the functions by which autograd saves and restores tensors of the run, of any shape."""
        return tape.save, restore

    def end(self) -> None:
        """Called after the run, when the tape has dropped what is not kept."""


class SelectiveCheckpointing:
    """Wraps forwards so that autograd saves only a share of the bytes that it would save.

    The saved results are chosen after the forward, by the operations that ran: another branch of the code, or another
    length, is another choice. Choices are cached.
    """

    def __init__(self, share: float) -> None:
        """Take ``share`` (upper bound of the saved bytes, relative to what autograd would save)."""
        self._share = share
        self._kept: BoundedLRUDict[Hashable, frozenset[int]] = BoundedLRUDict(_MAX_CHOICES)
        self._written: set[int] = set()

    def wrap(
        self, forward: Callable[..., Any], fqn: str = "", gatherer: ParameterGatherer | None = None
    ) -> Callable[..., Any]:
        """Wraps ``forward``: its autograd graph holds recipes for the results that are not saved.

        Args:
            forward: Forward of the layer.
            fqn: Name of the layer.
            gatherer: Gathers the layer's parameters on read, so that no recipe may hold them; None if they stay.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if gatherer is None:
                return self._run(fqn, forward, args, kwargs, None)
            with gatherer.inside(fqn) as returned:
                return returned(self._run(fqn, forward, args, kwargs, partial(gatherer.view_getter, fqn)))

        return run

    def _run(self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any, gather_function: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if type(leaf) is Tensor]
        tape = Tape(tensors, self._written, gather_function)
        recorded = self._recorded(fqn, tensors)
        with saved_tensors_hooks(*recorded.hooks(tape, restore)), tape:
            out = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # stand-in tensors would become what they stand for
            self._decide(tape, out, recorded.kept)
        tape.close()
        recorded.end()
        return out

    def _recorded(self, fqn: str, inputs: Sequence[Tensor]) -> RecordedRun:
        """Returns what decides on one run of the layer; called as it begins."""
        del fqn, inputs
        return RecordedRun(self._kept_of)

    def _kept_of(self, tape: Tape) -> frozenset[int]:
        key = _tape_key(tape)
        if key not in self._kept:
            self._kept[key] = self._choose(tape)
        return self._kept[key]

    def _decide(self, tape: Tape, out: Any, kept_of: Callable[[Tape], frozenset[int]]) -> None:
        for leaf in pytree.tree_leaves(out):
            value = tape.value_of_result(leaf) if isinstance(leaf, Tensor) else None
            if value is not None:
                value.is_returned = True
        kept = kept_of(tape)
        for number, operation in enumerate(tape.operations):
            for value in results_of(operation):
                if value.tensor is None:
                    continue
                if value.is_pinned or number in kept:
                    value.recipe = None
                else:
                    value.drop_tensor()

    def _choose(self, tape: Tape) -> frozenset[int]:
        number_of = {id(value): n for n, operation in enumerate(tape.operations) for value in results_of(operation)}
        steps = [step_of(operation, number_of) for operation in tape.operations]
        read = {id(value) for n in needed(steps, ()) for value in tape.operations[n].reads}
        outside = sum(
            value.nbytes for value in tape.outside if not value.is_weight and (value.num_saved or id(value) in read)
        )
        saved = sum(value.nbytes for value in tape.made if value.num_saved)
        return choose_kept(steps, int(self._share * (saved + outside)) - outside)


def results_of(operation: Operation) -> list[Value]:
    """Returns the results of an operation that autograd or another operation may still read."""
    found = [made() for made in operation.makes if made is not None]
    return [value for value in found if value is not None and (value.num_saved or value.num_reads)]


def step_of(operation: Operation, number_of: Mapping[int, int]) -> Step:
    """Returns the cost and size of an operation; ``number_of`` has the operation that made a value, by its id."""
    results = results_of(operation)
    is_saved = any(value.num_saved for value in results)
    return Step(
        work=work_of(operation) if results else 0.0,
        reads=tuple(number_of[id(value)] for value in operation.reads if id(value) in number_of),
        nbytes=sum(value.nbytes for value in results),
        is_saved=is_saved,
        may_keep=all(value.tensor is not None for value in results),
        # Outputs of the layer stay alive outside; if autograd does not save them, code outside may write to them.
        is_free=is_saved and all(value.is_returned or value.is_pinned for value in results),
    )


def work_of(operation: Operation) -> float:
    """Returns the cost of repeating an operation, in floating-point operations."""
    results = results_of(operation)
    device = results[0].device.type
    moved = sum(value.nbytes for value in (*operation.reads, *results))
    work = moved * WORK_PER_BYTE.get(device, 100.0)
    if operation.states:
        work += sum(value.nbytes for value in results) * _WORK_PER_DRAWN_BYTE.get(device, 100.0)
    count = flop_registry.get(operation.function.overloadpacket)
    if count is not None:
        args, kwargs = tensors_of(operation.args), tensors_of(operation.kwargs)
        out = tuple(value.tensor for value in results)
        work += count(*args, **kwargs, out_val=out[0] if len(out) == 1 else out)
    elif "scaled_dot_product" in operation.function._opname:  # the CPU kernel, which torch does not count
        query, key, v = (use.read().shape for use in operation.args[:3])
        heads, rows, columns = query[:-2].numel(), query[-2], key[-2]
        work += 2.0 * heads * rows * columns * (query[-1] + v[-1])
    return work


def _tape_key(tape: Tape) -> Hashable:
    """Returns a cache key, equal for runs that share one choice: sizes are rounded up to a power of two."""
    return tuple(
        (operation.function, *((value.nbytes.bit_length(), value.num_saved > 0) for value in results_of(operation)))
        for operation in tape.operations
    )
