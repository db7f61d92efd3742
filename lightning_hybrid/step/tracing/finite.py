"""Finiteness checks in a step: ``if torch.isnan(loss): raise ...``.

Ranks that do not have a value assume that it is finite, and so does a recording; ranks that have it compare in each
batch. ``Value.finite_answer`` is the answer for finite values, carried through logic and counting operations.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError
from lightning_hybrid.step.objects.names import CASTS, names
from lightning_hybrid.step.objects.pytree import flatten, unflatten
from lightning_hybrid.step.standins.numbers import IF_FINITE, Answer, branch_message, source_values

if TYPE_CHECKING:
    from lightning_hybrid.step.tracing.mode import CurrentRun, StepMode


# Results of comparing a value with itself.
_SELF_COMPARISONS = {"eq": True, "__eq__": True, "ne": False, "__ne__": False}
_PASS_THROUGH_OPS = (CASTS - {"half", "bfloat16"}) | names(
    "cpu cuda type bool int long view reshape flatten ravel squeeze unsqueeze expand __getitem__"
)
_LOGIC_OPS = names(
    "any all sum mean max min amax amin count_nonzero stack cat logical_not logical_or logical_and logical_xor"
    " bitwise_not bitwise_or bitwise_and bitwise_xor __invert__ __or__ __ror__ __and__ __rand__ __xor__ __rxor__"
    " add __add__ __radd__ eq ne gt ge lt le __eq__ __ne__ __gt__ __ge__ __lt__ __le__"
)

_COUNTS = frozenset({"sum", "count_nonzero"})


def answer_if_finite(name: str, run: Callable[..., Any], args: Any, kwargs: Any, watch: StepMode) -> Answer | None:
    """The value of every element of an operation's result if the model's values are finite; None if unknown.

    ``watch``, the function mode of the run, has the answers for the arguments.
    """
    if name in IF_FINITE:
        return IF_FINITE[name]
    if name not in _SELF_COMPARISONS and name not in _LOGIC_OPS and name not in _PASS_THROUGH_OPS:
        return None
    leaves, spec = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    marks = [watch.mark_of(tensor) for tensor in tensors]
    answers = [None if mark is None else watch.answer_if_finite(mark) for mark in marks]
    if name in _SELF_COMPARISONS and len(tensors) == 2 and tensors[0] is tensors[1]:
        return _SELF_COMPARISONS[name]
    if any(answer is None for answer in answers):
        return None
    if name in _PASS_THROUGH_OPS:
        return answers[0]
    content = iter(answers)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        real = [_full(leaf, next(content)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = unflatten(real, spec)
        made = run(*args, **kwargs)
        if not isinstance(made, Tensor) or not made.numel():
            return None
        first = made.flatten()[0]
        answer: Answer = first.item()
        is_count = name in _COUNTS and answer  # of elements, whose number may differ in the next batch
        return answer if bool((made == first).all()) and not is_count else None


def _full(tensor: Tensor, answer: Any) -> Tensor:
    # All elements are equal, so one along each dim is enough.
    return torch.full([min(size, 1) for size in tensor.shape], answer, dtype=tensor.dtype)


def number_check_patches(current: CurrentRun) -> Sequence[tuple[Any, str, Any]]:
    """Replacements, as (owner, name, function), of ``isnan`` etc. in ``math`` and NumPy that handle absent numbers."""
    checks = ("isnan", "isinf", "isfinite")
    return [(module, name, _patched_check(current, module, name)) for module in (math, numpy) for name in checks]


def _patched_check(current: CurrentRun, module: Any, name: str) -> Callable[..., Any]:
    original = getattr(module, name)

    def test(value: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current.watch
        if watch is None or watch.inside_unit:
            return original(value, *args, **kwargs)
        assumed_finite = watch.assumed_finite
        if isinstance(value, Tensor) and watch.is_model_value(value):
            if module is numpy:
                return getattr(torch, name)(value)
            value = float(value)
        values = source_values(value)
        if values is None:
            return original(value, *args, **kwargs)
        if not values or assumed_finite is None:  # the ranks that have the values are unknown
            raise ControlFlowError(branch_message(watch.numbers_read), entry="branch")
        assumed_finite.update(values)
        return IF_FINITE[name]

    return test


def check_answer(name: str, result: Any, finite_answer: Answer | None, line: str) -> None:
    """Compares a read by which the step decides with the answer that other ranks assume.

    Args:
        name: Name of the reading method.
        result: The content read.
        finite_answer: The assumed answer; None means any finite number.
        line: The user's line, as ``file:line``.

    Raises:
        ControlFlowError: They differ.
    """
    if finite_answer is not None and name in ("__bool__", "is_nonzero"):
        finite_answer = bool(finite_answer)
    if bool((numpy.isfinite(result) if finite_answer is None else numpy.equal(result, finite_answer)).all()):
        return
    path, _, number = line.rpartition(":")
    code = linecache.getline(path, int(number)).strip() if number.isdecimal() else ""
    raise ControlFlowError(
        f"{line}: the step checks whether values of the model are finite{code and f' ({code})'}, and in this batch"
        " some are not. The recording, and ranks that do not have the values, assume that they are finite; the batch"
        " ends here, before parameters change. Look for the cause with Trainer(detect_anomaly=True) in one process. To"
        f" let your code handle the batch, {WITHOUT_STAGES}",
        entry="finite",
    )
