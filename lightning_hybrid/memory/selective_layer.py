"""Selective activation checkpointing of a layer: expensive results are kept, cheap ones made again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from lightning_hybrid.memory.knapsack import Step, choose_kept, needed
from lightning_hybrid.memory.op_tape import Kept, Saved, Tape, restore
from lightning_hybrid.memory.recomputable_values import Lender, Operation, Value, tensors_of
from lightning_hybrid.step.objects.lru_cache import Recent

# What moving a byte costs, in floating-point operations of a product of matrices; and drawing one.
_WORK_PER_BYTE = {"cpu": 16.0, "cuda": 100.0}
_WORK_PER_DRAWN_BYTE = {"cpu": 64.0, "cuda": 100.0}
# Choices that are remembered.
_MOST_CHOICES = 512


class Dear:
    """Layers that keep a share of what autograd would save of them.

    What is kept is decided when a layer has run, by what ran: another branch of the code, or another length, is another
    choice. Choices are made once.
    """

    def __init__(self, share: float) -> None:
        """Args: share: of the bytes that would be saved, at most this is kept."""
        self._share = share
        self._kept: Recent[Hashable, frozenset[int]] = Recent(_MOST_CHOICES)
        self._written: set[int] = set()

    def keeping(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, whose graph has recipes for what it does not keep."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return self._run(forward, args, kwargs, None, restore)

        return run

    def keeping_none_of(self, lender: Lender, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same, where the layer's parameters are lent and nothing may hold them.

        Args:
            lender: Of the parameters.
            fqn: Of the layer.
            forward: The layer's own.
        """

        def restore_there(saved: Saved | Kept) -> Tensor:
            # Whatever the backward asks for first: gathering by need would go by what each rank has chosen to keep.
            lender.come_to(fqn)
            return restore(saved)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with lender.inside(fqn):
                return self._run(forward, args, kwargs, partial(lender.giver, fqn), restore_there)

        return run

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any, giver: Any, restore: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tape = Tape((leaf for leaf in leaves if type(leaf) is Tensor), self._written, giver)
        with saved_tensors_hooks(tape.save, restore), tape:
            out = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # tensors that stand for others would become those
            self._decide(tape, out)
        tape.close()
        return out

    def _decide(self, tape: Tape, out: Any) -> None:
        for leaf in pytree.tree_leaves(out):
            value = tape.known(leaf) if isinstance(leaf, Tensor) else None
            if value is not None:
                value.is_returned = True
        kind = _kind(tape)
        if kind not in self._kept:
            self._kept[kind] = self._choose(tape)
        kept = self._kept[kind]
        for number, operation in enumerate(tape.operations):
            for value in results_of(operation):
                if value.held is None:
                    continue
                if value.is_pinned or number in kept:
                    value.keep()
                else:
                    value.lose()

    def _choose(self, tape: Tape) -> frozenset[int]:
        number_of = {id(value): n for n, operation in enumerate(tape.operations) for value in results_of(operation)}
        steps = [_step(operation, number_of) for operation in tape.operations]
        read = {id(value) for n in needed(steps, ()) for value in tape.operations[n].reads}
        outside = sum(
            value.nbytes for value in tape.outside if not value.is_weight and (value.num_saved or id(value) in read)
        )
        saved = sum(value.nbytes for value in tape.made if value.num_saved)
        return choose_kept(steps, int(self._share * (saved + outside)) - outside)


def results_of(operation: Operation) -> list[Value]:
    """Those that anybody may still ask for."""
    found = [made() for made in operation.makes if made is not None]
    return [value for value in found if value is not None and (value.num_saved or value.num_reads)]


def _step(operation: Operation, number_of: dict[int, int]) -> Step:
    results = results_of(operation)
    is_saved = any(value.num_saved for value in results)
    return Step(
        work=work_of(operation) if results else 0.0,
        reads=tuple(number_of[id(value)] for value in operation.reads if id(value) in number_of),
        nbytes=sum(value.nbytes for value in results),
        is_saved=is_saved,
        may_keep=all(value.held is not None for value in results),
        # What the layer returns lives on outside; if it is not saved here, others may write to it.
        is_free=is_saved and all(value.is_returned or value.is_pinned for value in results),
    )


def work_of(operation: Operation) -> float:
    """What it costs to repeat this, in floating-point operations."""
    results = results_of(operation)
    device = results[0].device.type
    moved = sum(value.nbytes for value in (*operation.reads, *results))
    work = moved * _WORK_PER_BYTE.get(device, 100.0)
    if operation.states:
        work += sum(value.nbytes for value in results) * _WORK_PER_DRAWN_BYTE.get(device, 100.0)
    count = flop_registry.get(operation.function.overloadpacket)
    if count is not None:
        args, kwargs = tensors_of(operation.args), tensors_of(operation.kwargs)
        out = tuple(value.held for value in results)
        work += count(*args, **kwargs, out_val=out[0] if len(out) == 1 else out)
    elif "scaled_dot_product" in operation.function._opname:  # of the CPU, which torch does not count
        query, key, v = (use.tensor().shape for use in operation.args[:3])
        heads, rows, columns = query[:-2].numel(), query[-2], key[-2]
        work += 2.0 * heads * rows * columns * (query[-1] + v[-1])
    return work


def _kind(tape: Tape) -> Hashable:
    """Equal for runs of which the same operations are kept: lengths of one power of two are alike."""
    return tuple(
        (operation.function, *((value.nbytes.bit_length(), value.num_saved > 0) for value in results_of(operation)))
        for operation in tape.operations
    )
